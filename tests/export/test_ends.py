"""End-of-sequence tokens, and tokens around a text, of folders and GGUF files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import WORDS, make_checkpoint
from gguf_files import write_gguf

from edgellm.core.errors import BrokenArtifactError, UnsupportedModelError
from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.export import models
from edgellm.export.graph.architecture import (
    ExportOptions,
    end_ids,
)
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

_NORMAL, _CONTROL, _USER = 1, 3, 4
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|endoftext|>"),
    *("<|end_of_text|>", "<|return|>", "<end_of_utterance>"),
)
_HARMONY = dict.fromkeys(("<|return|>", "<|call|>", "<|end|>"), _CONTROL)
_SOLAR = dict.fromkeys(("<|flush|>", "<|calls|>", "<|end|>"), _CONTROL)
_WORDS = {"<EOT>": _NORMAL, "<eos>": _USER, "<|im_start|>": _CONTROL, "<|fim_pad|>": _CONTROL}
_BOTH = {"add_bos_token": True, "add_eos_token": True}
Write = Callable[..., Path]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(tmp_path_factory.mktemp("ends"), **models.find("qwen3").TINY)
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture
def write(tmp_path, tiny) -> Write:
    """Write a file by the reference library."""

    def one(texts: dict[str, int], ids: dict[str, int], **extra: Any) -> Path:
        """`texts` are tokens with their types, from id 20 on; `ids` those that the file names."""

        def words(writer: Any, size: int) -> None:
            tokens = WORDS + [f"w{index}" for index in range(len(WORDS), size - 2)] + ["w", "9"]
            types = [_CONTROL if at in (1, 2) else _NORMAL for at in range(size)]
            for at, (text, kind) in enumerate(texts.items(), 20):
                tokens[at], types[at] = text, kind
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre("smollm")
            writer.add_token_list(tokens)
            writer.add_token_types(types)
            writer.add_token_merges(["w 9"])
            for name, value in ids.items():
                getattr(writer, f"add_{name}")(value)

        write_gguf(tmp_path / "model.gguf", "qwen3", tiny, words=words, **extra)
        return tmp_path / "model.gguf"

    return one


@pytest.mark.parametrize("text", [*_ENDS, "<EOT>", "[EOS]"])
def test_end_of_turn_tokens_are_found_by_their_texts(write, text):
    checkpoint = open_checkpoint(str(write({text: _CONTROL}, {"eos_token_id": 2})))
    assert end_ids(checkpoint) == {2, 20}


@pytest.mark.parametrize("kind", [_NORMAL, _USER])
def test_end_tokens_stored_as_words_become_control_tokens(write, kind):
    """llama.cpp makes control tokens of them, so that prompts hold them too."""
    from tokenizers import Tokenizer

    checkpoint = open_checkpoint(str(write({"<|im_end|>": kind}, {"eos_token_id": 2})))
    assert end_ids(checkpoint) == {2, 20}
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_files["tokenizer.json"].decode())
    assert tokenizer.encode("<|im_end|>").ids == [20]
    assert tokenizer.get_added_tokens_decoder()[20].special


@pytest.mark.parametrize(
    ("texts", "ids", "expected"),
    [
        ({}, {"eos_token_id": 2, "eot_token_id": 7, "eom_token_id": 8}, {2, 7, 8}),
        ({}, {}, {2}),  # </s> by its text
        (_HARMONY, {}, {2, 20, 21}),  # <|end|> ends a message, and others follow
        (_HARMONY, {"eot_token_id": 22}, {2, 20, 21}),
        (_HARMONY, {"eos_token_id": 22}, {2, 20, 21, 22}),
        (_SOLAR, {}, {2, 20, 21}),
        (dict.fromkeys(("<|call|>", "<|end|>"), _CONTROL), {}, {2, 20, 21}),
        (_WORDS, {}, {2}),  # of a text, and marks that begin a turn
    ],
)
def test_end_tokens_are_chosen_by_text_and_id(write, texts, ids, expected):
    assert end_ids(open_checkpoint(str(write(texts, ids)))) == expected


@pytest.fixture
def folder(tiny_checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def _edit(folder: Path, name: str, **changes: Any) -> None:
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    content |= changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.mark.parametrize(
    "eos", ["w60", {"__type": "AddedToken", "content": "w60", "special": True}]
)
def test_the_tokenizers_own_end_token_counts(folder, tmp_path, eos):
    """As in fine-tunes whose config.json is that of the base."""
    _edit(folder, "tokenizer_config.json", eos_token=eos)
    manifest = export_llm(
        open_checkpoint(str(folder)), tmp_path / "out", ExportOptions(dtype="fp32")
    )
    assert manifest.eos_token_ids == (2, 60)


def test_a_model_without_end_tokens_is_reported(command_here, folder, tmp_path):
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        _edit(folder, name, eos_token_id=None, eos_token=None)
    arguments = ("--model_dir", folder, "--output_dir", tmp_path / "out", "--dtype", "fp32")
    result = command_here("edgellm-export", "llm", *arguments)
    assert result.returncode == 0
    assert "\nwarning: the checkpoint names no end token" in result.stderr
    assert load_bundle(tmp_path / "out", LLM_BUNDLE).eos_token_ids == ()
    shown = command_here("edgellm-inspect", tmp_path / "out").stdout
    assert "none: the maximum length or a stop string ends outputs" in " ".join(shown.split())


def test_tokens_of_special_tokens_map_are_read(folder):
    """As transformers reads them; `<s>` was no token of the tokenizer's own either."""
    from transformers import AutoTokenizer

    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = tokenizer["added_tokens"][1:]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    _edit(folder, "tokenizer_config.json", bos_token=None, eos_token=None)
    _edit(folder, "special_tokens_map.json", bos_token={"content": "<s>"}, eos_token="w60")
    checkpoint = open_checkpoint(str(folder))
    config = json.loads(checkpoint.tokenizer_files["tokenizer_config.json"])
    assert config["bos_token"] == {"content": "<s>"}
    assert checkpoint.eos_token_id == 60
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs.bos_token == "<s>"
    assert theirs.eos_token_id == 60
    from tokenizers import Tokenizer

    ours = Tokenizer.from_str(checkpoint.tokenizer_files["tokenizer.json"].decode())
    for text in ("<s>", "w30 <s>w31 w60", "w60</s>"):
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(
            text, add_special_tokens=False
        )


def test_special_tokens_map_is_ignored_if_the_tokenizer_lists_all(folder):
    _edit(folder, "tokenizer_config.json", added_tokens_decoder={})
    _edit(folder, "special_tokens_map.json", bos_token="w60")
    found = open_checkpoint(str(folder)).tokenizer_files["tokenizer_config.json"]
    assert found == (folder / "tokenizer_config.json").read_bytes()


@pytest.mark.parametrize(
    ("switches", "template"),
    [
        ({"add_eos_token": True}, "$A </s>"),
        (_BOTH, "<s> $A </s>"),
        ({"add_sep_token": True, "sep_token_id": 20}, "$A [SEP]"),
        ({**_BOTH, "add_sep_token": True, "sep_token_id": 2}, "<s> $A </s>"),
        ({"add_bos_token": False}, "$A"),
        ({"add_eos_token": False, "add_sep_token": False}, "$A"),
    ],
)
def test_tokens_around_a_text_follow_the_metadata(write, switches, template):
    from tokenizers import Tokenizer, processors

    path = write({"[SEP]": _CONTROL}, {"bos_token_id": 1, "eos_token_id": 2, **switches})
    found = open_checkpoint(str(path)).tokenizer_files["tokenizer.json"].decode()
    ours, theirs = Tokenizer.from_str(found), Tokenizer.from_str(found)
    theirs.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 1), ("</s>", 2), ("[SEP]", 20)]
    )
    assert ours.encode("w 99 9").ids == theirs.encode("w 99 9").ids


@pytest.mark.parametrize(("kind", "pooling"), [(0, ""), (1, "mean"), (3, "last")])
def test_pooling_is_read_from_the_file(write, tmp_path, kind, pooling):
    path = write({}, {}, pooling_type=kind, attention__causal=True)
    manifest = export_llm(open_checkpoint(str(path)), tmp_path / "out", ExportOptions(dtype="fp32"))
    assert manifest.pooling == pooling


def test_the_user_may_override_pooling(write, tmp_path):
    checkpoint = open_checkpoint(str(write({}, {}, pooling_type=3)))
    options = ExportOptions(dtype="fp32", pooling="mean")
    assert export_llm(checkpoint, tmp_path / "mean", options).pooling == "mean"
    options = ExportOptions(dtype="fp32", hidden_taps=(0, 1, 2))
    assert export_llm(checkpoint, tmp_path / "base", options).pooling == ""


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"pooling_type": 2}, "pooling_type = 2: texts are embedded by the first position"),
        ({"pooling_type": 4}, "pooling_type = 4: texts are embedded by a classifier"),
        ({"attention__causal": False}, "attention.causal = False"),
    ],
)
def test_other_poolings_are_rejected(write, extra, said):
    with pytest.raises(UnsupportedModelError, match=said):
        open_checkpoint(str(write({}, {}, **extra)))


def _token(content: str, **flags: bool) -> dict[str, Any]:
    usual = ("lstrip", "rstrip", "normalized", "single_word", "special")
    return {"content": content, **dict.fromkeys(usual, False), **flags}


def _with_rows(folder: Path) -> int:
    """How many tokens tokenizer.json has."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    return 1 + max(tokenizer["model"]["vocab"].values())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tokenizer_config.json", lambda at: {"added_tokens_decoder": {at: _token("<x>")}}),
        (
            "tokenizer_config.json",
            lambda at: {
                "added_tokens_decoder": {
                    at + 1: _token("<y>", special=True),
                    at: _token("<x>", lstrip=True, rstrip=True),
                }
            },
        ),
        ("tokenizer_config.json", lambda _: {"added_tokens_decoder": {30: _token("w30")}}),
        ("tokenizer_config.json", lambda _: {"pad_token": "w33"}),
        ("added_tokens.json", lambda at: {"<x>": at, "<y>": at + 1}),
    ],
)
def test_added_tokens_of_other_files_are_read(folder, name, changes):
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    _edit(folder, name, **{str(at): value for at, value in changes(_with_rows(folder)).items()})
    files = open_checkpoint(str(folder)).tokenizer_files
    ours = Tokenizer.from_str(files["tokenizer.json"].decode())
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in ("w31<x>w32", "w31 <x> w32 <y>", "w30 w33", "w29w30w33"):
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False).ids == expected
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)


def test_a_listed_token_with_another_id_is_rejected(folder):
    at = _with_rows(folder) + 1
    _edit(folder, "tokenizer_config.json", added_tokens_decoder={str(at): _token("<x>")})
    with pytest.raises(BrokenArtifactError, match=rf"lists '<x>' with id {at}; .* be {at - 1}"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    "names", [["default"], ["default", "tool_use"], ["tool_use", "../chat_template"]]
)
def test_the_default_of_several_chat_templates_is_exported(folder, names):
    from transformers import AutoTokenizer

    _edit(folder, "tokenizer_config.json", chat_template=None)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "additional_chat_templates").mkdir()
    for name in names:
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(f"by {name}")
    theirs = AutoTokenizer.from_pretrained(folder).get_chat_template()
    assert open_checkpoint(str(folder)).tokenizer_files["chat_template.jinja"].decode() == theirs
