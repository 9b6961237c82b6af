from __future__ import annotations

import json
import shutil

import pytest

from edgellm.core.errors import BrokenArtifactError
from edgellm.core.strict_json import DuplicateKeyError, line_of, parse
from edgellm.export.pipeline.open_checkpoint import open_checkpoint


def test_valid_json_equals_the_standard_library():
    assert parse('{"a": [1, {"b": null, "a": 2.5}], "c": "x"}') == {
        "a": [1, {"b": None, "a": 2.5}],
        "c": "x",
    }
    assert parse(b"[1]") == [1]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('{"a": 1, "a": 1}', "$.a"),
        ('{"a": {"b": [0, {"c d": 1, "x": 2, "c d": 3}]}}', '$.a.b[1]["c d"]'),
        ('[{"a": 1}, {"z": 1, "y": 2, "y": 3, "z": 4}]', "$[1].y"),
        ('{"a": {"b": 1, "b": 2}, "a": 3}', "$.a"),  # the inner one is gone
        ('{"x": {"b": 1, "b": 2}, "y": {"c": 1, "c": 2}}', "$.x.b"),
    ],
)
def test_a_key_twice_is_named_by_its_path(text, path):
    with pytest.raises(DuplicateKeyError) as caught:
        parse(text)
    assert str(caught.value) == f"the key {path} is there twice"


@pytest.mark.parametrize(
    ("name", "text", "path"),
    [
        ("config.json", '{"rope": 1, "rope": 2}', "rope"),
        ("config.json", '{"quantization_config": {"a": 4, "a": 8}}', "quantization_config.a"),
        ("generation_config.json", '{"eos_token_id": 1, "eos_token_id": 2}', "eos_token_id"),
        ("hf_quant_config.json", '{"quantization": {"a": 1, "a": 2}}', "quantization.a"),
        ("tokenizer_config.json", '{"eos_token": "a", "eos_token": "b"}', "eos_token"),
        ("chat_template.json", '{"chat_template": "a", "chat_template": "b"}', "chat_template"),
        ("preprocessor_config.json", '{"size": {"a": 1, "a": 2}}', "size.a"),
    ],
)
def test_checkpoints_with_a_duplicate_key_are_rejected(tiny_checkpoint, tmp_path, name, text, path):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    (folder / name).write_text(text)
    with pytest.raises(BrokenArtifactError) as caught:
        open_checkpoint(str(folder))
    assert f"the key $.{path} is there twice" in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, "[" * 5000 + "]" * 5000, '[{"a":' * 150 + "1" + "}]" * 150],
)
def test_deep_nesting_is_an_error_of_the_value(text):
    """No RecursionError, which readers of files do not catch."""
    with pytest.raises(ValueError, match=r"nested too deeply|Expecting"):
        parse(text)
    assert parse("[" * 256 + "]" * 256)


@pytest.mark.parametrize("indent", [None, 0, 2])
def test_lines_of_values(indent):
    """The value of each path is a word that is once in the text."""
    content = {
        "a": {"b": ["w0", {"c": "w1", "d\n": [[], "w2"]}], 'e"': "w3"},
        "requests": [{}, {"messages": [{"role": "w4"}]}, "w5"],
    }
    text = "\n\n " + json.dumps(content, indent=indent)
    paths = ["$.a.b[0]", "$.a.b[1].c", "", "", "$.requests[1].messages[0].role", "$.requests[2]"]
    for at, path in enumerate(paths):
        if path:
            assert line_of(text, path) == text[: text.index(f"w{at}")].count("\n") + 1
    assert line_of(text, "$") == 1
    assert line_of(text, "$.requests[7].x") == line_of(text, "$.requests")
    assert line_of(text, "$.a.b[0].x") == line_of(text, "$.a.b[0]")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json",
                                  "tokenizer_config.json"])  # fmt: skip
def test_checkpoints_may_begin_with_a_byte_order_mark(tiny_checkpoint, tmp_path, name):
    plain = open_checkpoint(str(tiny_checkpoint))
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    (folder / name).write_text((folder / name).read_text("utf-8"), "utf-8-sig")
    found = open_checkpoint(str(folder))
    assert found.config == plain.config
    assert found.generation_config == plain.generation_config
    assert found.tokenizer_files == plain.tokenizer_files
