"""Answers of `edgellm-eval`: alternating modes, resuming, other options, damaged files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import forks
import pytest
from conftest import assert_one_line_error

from edgellm.core.errors import (
    EdgeLLMError,
    LimitError,
)
from edgellm.device_runtime.api.llm import LLM
from edgellm.tools.evaluate.answering import conversation
from edgellm.tools.evaluate.answers import OutputLog
from edgellm.tools.evaluate.datasets.questions import Question
from edgellm.tools.evaluate.scoring import divergence

EAGLE_FIELDS = {"question_id", "answer_id", "model_id", "choices", "tstamp"}
QUESTIONS = [
    {"turns": ["w20 w21", "w22"], "category": "talk", "question_id": 81},
    {"turns": ["w30"], "category": "talk"},
    {"turns": ["w40 w41 w42"], "category": "sums", "scoring": "number", "reference": "3"},
    {"turns": ["w23 w24"], "category": "words", "scoring": "rouge", "reference": "w12 w13"},
]


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return path


@pytest.fixture
def evaluation(tmp_path, eagle_pair, questions):
    """Command line and output folder of a run."""
    out = tmp_path / "run"
    command = [
        sys.executable, "-m", "edgellm.tools.evaluate", "--engineDir", str(eagle_pair.engine),
        "--dataset", str(questions), "--outputDir", str(out), "--maxGenerateLength", "12",
        "--eagle",
    ]  # fmt: skip
    return command, out


def run(command, *more):
    return forks.shared().run("edgellm-eval", *command[3:], *more)


@pytest.fixture
def run_here(command_here):
    """As `run`, in this process."""
    return lambda command, *more: command_here("edgellm-eval", *command[3:], *more)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answer_files_have_the_layout_of_eagle(evaluation, eagle_pair):
    command, out = evaluation
    result = run(command, "--repeats", "2")
    assert result.returncode == 0, result.stderr
    plain, spec = read(out / "plain.jsonl"), read(out / "spec.jsonl")
    assert [row["question_id"] for row in plain] == [81, 2, 3, 4]
    # The first mode alternates by question.
    stamps = [one["tstamp"] < other["tstamp"] for one, other in zip(plain, spec, strict=True)]
    assert stamps == [False, True, False, True]  # of the second repeat
    for one, other in zip(plain, spec, strict=True):
        assert set(one) == EAGLE_FIELDS
        assert [choice["index"] for choice in one["choices"]] == [0, 1]
        assert one["choices"][0]["token_ids"] == other["choices"][0]["token_ids"]
        assert one["choices"][0]["turns"] == one["choices"][1]["turns"]
        for choice in (*one["choices"], *other["choices"]):
            sizes = {len(value) for value in choice.values() if isinstance(value, list)}
            assert sizes == {len(choice["turns"])}
            assert choice["new_tokens"] == [len(ids) for ids in choice["token_ids"]]
        assert one["model_id"] == f"{eagle_pair.engine.name}-plain"
    turns = plain[0]["choices"][0]
    assert len(turns["turns"]) == 2
    llm = LLM(eagle_pair.engine)
    messages = conversation(Question(turns=QUESTIONS[0]["turns"]), turns["turns"][:1])
    prompt = llm.tokenizer.encode(
        llm.tokenizer.render(messages, add_generation_prompt=True), add_special_tokens=False
    )
    assert turns["prompt_tokens"][1] == len(prompt)


def test_a_turn_that_is_too_long_is_reported(evaluation, questions):
    command, out = evaluation
    questions.write_text(json.dumps({"turns": ["w20", "w9 " * 70, "w21"]}) + "\n")
    result = run(command)
    assert result.returncode == 0, result.stderr
    (row,) = read(out / "plain.jsonl")
    assert len(row["choices"][0]["turns"]) == 1
    assert "the engine takes 64" in row["choices"][0]["error"]
    assert re.search(r"failed turns +2: the prompt has \d+ tokens", result.stdout)


def kill_after(command, path, lines):
    """Kill the process once the file has `lines` lines."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.kill()
    process.wait()
    process.stderr.close()
    assert process.returncode == -signal.SIGKILL


def test_a_killed_run_resumes(evaluation, questions):
    """No answer is lost, duplicated or recomputed."""
    command, out = evaluation
    rows = [{"turns": [f"w{20 + index} w{30 + index}"]} for index in range(24)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kill_after(command, out / "spec.jsonl", 3)
    before = (out / "spec.jsonl").read_bytes()
    assert before.count(b"\n") < 24
    with (out / "plain.jsonl").open("ab") as stream:
        stream.write(b'{"question_id": 24, "answer_id": "torn')
    result = run(command)
    assert result.returncode == 0, result.stderr
    for mode in ("plain", "spec"):
        assert [row["question_id"] for row in read(out / f"{mode}.jsonl")] == list(range(1, 25))
    assert (out / "spec.jsonl").read_bytes().startswith(before)
    again = (out / "plain.jsonl").read_bytes()
    assert run(command).returncode == 0
    assert (out / "plain.jsonl").read_bytes() == again


OTHERS = [
    (("--maxGenerateLength", "13"), "--maxGenerateLength: 12, now 13"),
    (("--temperature", "0.5"), "--temperature: 0.0, now 0.5"),
    (("--limit", "2"), "questions (--limit, or the data changed)"),
    (("--eagleDraftTopK", "2"), "options of speculation"),
]


def test_resuming_with_other_options_is_rejected(evaluation, run_here):
    command, out = evaluation
    assert run(command).returncode == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for more, named in OTHERS:
        result = run_here(command, *more)
        assert_one_line_error(result, f"was started with other {named}", "another --outputDir")
        assert result.returncode == 2
        assert before == {path.name: path.read_bytes() for path in out.iterdir()}
    again = run_here(command)
    assert "finished already" in again.stdout
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}
    (out / "notes.txt").write_text("mine")
    assert run_here(command, "--maxGenerateLength", "13", "--overwrite").returncode == 0
    assert json.loads((out / "run.json").read_text())["max_generate_length"] == 13
    assert (out / "notes.txt").read_text() == "mine"


def test_a_foreign_folder_is_refused(evaluation, run_here):
    command, out = evaluation
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    for flags in ((), ("--overwrite",)):
        assert_one_line_error(run_here(command, *flags), "holds no evaluation: it has notes.txt")
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


def test_a_locked_run_is_rejected(evaluation, run_here):
    command, out = evaluation
    assert run_here(command).returncode == 0
    import fcntl

    with (out / "run.json").open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert_one_line_error(run(command), "another edgellm-eval uses")


def test_damaged_answer_files_are_rejected_with_the_line(tmp_path):
    path = tmp_path / "plain.jsonl"
    record = {"question_id": 1, "answer_id": "a", "model_id": "m", "choices": [], "tstamp": 1.0}
    line = json.dumps(record) + "\n"
    for text, message in (
        (line + "{}\n", "line 2 is not an answer"),
        ("\0\0\n" + line, "line 1 is not an answer"),
        (line + line, "line 2: question 1 is answered twice"),
    ):
        path.write_text(text)
        with pytest.raises(EdgeLLMError, match=message) as caught:
            OutputLog(path)
        assert caught.value.hint
        assert path.read_text() == text


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    path = tmp_path / "plain.jsonl"
    log = OutputLog(path)
    row = {"question_id": 1, "answer_id": "a", "model_id": "m", "choices": [], "tstamp": 1.0}
    path.write_text(json.dumps(row) + "\n")
    log.close()
    log = OutputLog(path)
    whole, write = path.read_bytes(), os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, bytes(data[:5])))
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(LimitError, match=rf"No space left on device in {tmp_path}: \d+ bytes"):
        log.append(log.records[1])
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("plain", "spec", "place"),
    [
        ([[1, 2]], [[1, 2]], None),
        ([[1, 2], [3]], [[1, 2], [4]], (1, 0)),
        ([[1, 2]], [[1]], (0, 1)),
        ([[1, 2], [3]], [[1, 5], [3]], (0, 1)),
        ([[1]], [[1], [2]], (1, 0)),
    ],
)
def test_the_first_difference_of_answers_is_located(plain, spec, place):
    assert divergence.locate(plain, spec) == place


@pytest.mark.parametrize(
    ("more", "fragments"),
    [
        (("--spec", "magic"), ("--spec magic",)),
        (("--multimodalEngineDir", "nowhere"), ("nowhere",)),
        (("--engineDir", "nowhere"), ("nowhere",)),
        (("--dataset", "mtbench"), ("unknown dataset 'mtbench'", "mt_bench")),
        (("--compare", "a", "b"), ("reads two finished runs",)),
    ],
)
def test_invalid_arguments_are_rejected(evaluation, run_here, more, fragments):
    command, out = evaluation
    result = run_here(command, *more)
    assert_one_line_error(result, *fragments)
    assert result.returncode == 2
    assert not out.exists()


def test_output_inside_the_engine_is_rejected(evaluation, run_here, eagle_pair):
    command, _ = evaluation
    inside = eagle_pair.engine / "draft" / "run"
    result = run_here(command, "--outputDir", str(inside))
    assert_one_line_error(result, "lies in the engine's folder")


def test_images_need_a_visual_engine(evaluation, run_here, tmp_path):
    command, _ = evaluation
    (tmp_path / "a.png").write_bytes(b"x")
    path = tmp_path / "pictures.jsonl"
    path.write_text('{"image": "a.png", "caption": "A cat."}\n')
    result = run_here(command, "--dataset", "captions", "--dataFile", str(path))
    assert_one_line_error(result, "has images", "--multimodalEngineDir")
