"""Calibration text: packed samples with chat templates, and disjoint held-out samples."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
from conftest import write_tokenizer
from jinja2 import TemplateError
from quantize_cases import write_text

from edgellm.core.errors import EdgeLLMError
from edgellm.quantize.calibration.text import load_tokenizer, read_calibration, templated

OPTIONS = {"num_samples": 20, "num_held_out": 4, "seq_len": 16, "vocab_size": 96, "seed": 0}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 96)
    return load_tokenizer({path.name: path.read_bytes() for path in folder.iterdir()})


def test_samples_are_full_and_disjoint(tokenizer, tmp_path):
    text = write_text(tmp_path / "text.jsonl")
    found = read_calibration(str(text), tokenizer, **OPTIONS)
    assert found.rows.shape == (20, 16)
    assert found.held_out.shape == (4, 16)
    assert not {tuple(row) for row in found.rows} & {tuple(row) for row in found.held_out}
    user, assistant = tokenizer.convert_tokens_to_ids(["user", "assistant"])
    assert user in found.rows
    assert assistant in found.rows
    again = read_calibration(str(text), tokenizer, **OPTIONS)
    np.testing.assert_array_equal(again.rows, found.rows)
    assert again.sha256 == found.sha256
    other = read_calibration(str(text), tokenizer, **{**OPTIONS, "seed": 1})
    assert other.sha256 != found.sha256


def test_short_texts_give_fewer_samples(tokenizer, tmp_path):
    text = write_text(tmp_path / "text.jsonl", 6)
    found = read_calibration(str(text), tokenizer, **OPTIONS)
    assert 0 < len(found.rows) < 20
    assert len(found.held_out) == 1


def test_duplicate_documents_are_dropped(tokenizer, tmp_path):
    """A copy could be calibration text and held out."""
    text = write_text(tmp_path / "text.jsonl", 6)
    once = read_calibration(str(text), tokenizer, **OPTIONS)
    text.write_text(text.read_text() * 3)
    assert read_calibration(str(text), tokenizer, **OPTIONS).sha256 == once.sha256


def test_blank_lines_separate_the_documents_of_a_text_file(tokenizer, tmp_path):
    path = tmp_path / "notes.txt"
    paragraph = " ".join(f"w{number}" for number in range(9, 50))
    path.write_text("\r\n\r\n".join(f"{paragraph} w{50 + i}" for i in range(20)), newline="")
    found = read_calibration(str(path), tokenizer, **OPTIONS)
    assert found.name == "notes.txt"
    assert len(found.rows) == 20


def test_the_default_text_is_valid(tokenizer):
    found = read_calibration("default", tokenizer, **{**OPTIONS, "num_held_out": 40})
    assert found.name == "default"
    assert len(found.rows) == 20
    assert found.kinds == ("code", "prose", "sums")
    assert found.held_out_kinds.shape == found.held_out.shape
    assert {*found.held_out_kinds.flat} == {0, 1, 2}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("no.jsonl", None, "no such text file"),
        ("a.jsonl", b"", "holds no text"),
        ("a.txt", b"\n \n\n", "holds no text"),
        ("a.csv", b"a,b", "neither .jsonl nor .txt"),
        ("a.txt", b"w9 w10 \xff", "is not UTF-8"),
        ("a.jsonl", b'{"text": "w9 w10"}', "too short"),
        ("a.jsonl", b'{"text": "w9 w10", "kind": 3}', "line 1 is neither"),
        ("a.jsonl", b'{"text": "w9"}\n{"txt": 1}', "line 2 is neither a conversation"),
        ("a.jsonl", b'{"text": "a", "text": "b"}', "text is there twice"),
        ("a.jsonl", b"[1]", "line 1 is neither a conversation"),
        ("a.jsonl", b"{", "line 1 is neither a conversation"),
        ("a.jsonl", b'{"text": 3}', "line 1 is neither a conversation"),
        ("a.jsonl", b'{"messages": [{"role": "tool", "content": "x"}]}', "no tools here"),
    ],
)
def test_invalid_files_are_rejected(tokenizer, tmp_path, name, content, words):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EdgeLLMError, match=words):
        read_calibration(str(path), tokenizer, **OPTIONS)


def test_a_tokenizer_of_another_model_is_rejected(tokenizer, tmp_path):
    text = write_text(tmp_path / "text.jsonl")
    with pytest.raises(EdgeLLMError, match="tokenizer gives id"):
        read_calibration(str(text), tokenizer, **{**OPTIONS, "vocab_size": 20})


def test_lines_may_contain_other_line_ends(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    line = {"text": " ".join(f"w{n}" for n in range(9, 90)) + " w90\u2028w91"}
    path.write_text((json.dumps(line, ensure_ascii=False) + "\n") * 1, "utf-8")
    assert len(read_calibration(str(path), tokenizer, **OPTIONS).rows) > 0


_REFUSES = "{%- if messages[0].role == 'system' %}{{ raise_exception('no system') }}{%- endif %}"
_TEMPLATE = (
    _REFUSES + "{% for each in messages %}{{ each.role }} : {{ each.content }} . {% endfor %}"
)
SYSTEM, USER, ASSISTANT = (
    {"role": role, "content": f"w{20 + at}"}
    for at, role in enumerate(["system", "user", "assistant"])
)


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        ([SYSTEM, USER, ASSISTANT], "user : w20\n\nw21 . assistant : w22 . "),
        ([SYSTEM, ASSISTANT], "assistant : w22 . "),
        ([USER, ASSISTANT], "user : w21 . assistant : w22 . "),
    ],
)
def test_templates_without_a_system_role(tokenizer, messages, shown):
    """Gemma 2's and Mistral 0.1's raise an error; its text then begins the user's turn."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = _TEMPLATE
    assert templated(messages, tokenizer) == shown
    with pytest.raises(TemplateError):
        templated([SYSTEM], tokenizer)


def test_the_own_text_suits_templates_without_a_system_role(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = _TEMPLATE
    assert len(read_calibration("default", tokenizer, **OPTIONS).rows) == 20
