"""Tokenizers without tokenizer.json, and chat templates by name, as transformers reads them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from edgellm.core.errors import EdgeLLMError, UnsupportedModelError
from edgellm.export.checkpoints import tokenizer as module
from edgellm.export.checkpoints.tokenizer import read_tokenizer

TEXTS = ["Hello world", " The build  of a model\n\nnext", "naïve 👩 日本", "a b"]


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


def stored(folder: Path) -> Tokenizer:
    return Tokenizer.from_buffer(read_tokenizer(folder).files["tokenizer.json"])


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_sentencepiece_model_alone_is_converted(folder, kind):
    """The ids are those of the library that trained it."""
    sentencepiece = pytest.importorskip("sentencepiece")
    corpus = folder / "corpus.txt"
    corpus.write_text((Path(__file__).parents[3] / "README.md").read_text("utf-8"), "utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=500,
        model_type=kind,
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    found = stored(folder)
    for text in TEXTS:
        assert found.encode(text, add_special_tokens=False).ids == processor.encode(text)
        assert found.decode(processor.encode(text)) == text
    assert read_tokenizer(folder).eos_token_id == processor.eos_id()


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ({"transformers"}, "transformers"),
        ({"sentencepiece"}, "sentencepiece"),
        ({"google.protobuf"}, "protobuf"),
        ({"sentencepiece", "google.protobuf"}, "sentencepiece and protobuf"),
    ],
)
def test_missing_packages_are_named(folder, monkeypatch, missing, said):
    (folder / "tokenizer.model").write_bytes(b"any")
    monkeypatch.setattr(module, "_is_installed", lambda name: name not in missing)
    with pytest.raises(EdgeLLMError, match=f"only tokenizer.model .* needs {said}$") as caught:
        read_tokenizer(folder)
    assert "[host]" in caught.value.hint


def test_vocabulary_and_merges_need_the_class(folder):
    """Both files are the same for GPT-2 and Qwen, which split text in different ways."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: at for at, text in enumerate([*letters, "l" + "l", "Ġ" + "a"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), "utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\nl l\nĠ a\n", "utf-8")
    for content in (None, {}, {"eos_token": "!"}):
        if content is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps(content))
        with pytest.raises(EdgeLLMError, match=r"nothing says how the tokenizer splits") as caught:
            read_tokenizer(folder)
        assert "tokenizer_class" in caught.value.hint
    for name in ("GPT2Tokenizer", "Qwen2Tokenizer"):
        config = {"tokenizer_class": name, "eos_token": "!", "unk_token": "!"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        theirs, found = AutoTokenizer.from_pretrained(folder), stored(folder)
        for text in TEXTS:
            expected = theirs.encode(text, add_special_tokens=False)
            assert found.encode(text, add_special_tokens=False).ids == expected


@pytest.fixture
def whole(folder, tiny_checkpoint) -> Path:
    (folder / "tokenizer.json").write_bytes((tiny_checkpoint / "tokenizer.json").read_bytes())
    return folder


NAMED = {"default": "by default", "tool_use": "by tool_use"}


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.json"])
@pytest.mark.parametrize("form", ["object", "list"])
def test_named_templates_are_an_object_or_a_list(whole, file, form):
    named = [{"name": name, "template": text} for name, text in NAMED.items()]
    template = NAMED if form == "object" else named
    (whole / file).write_text(json.dumps({"chat_template": template}))
    assert read_tokenizer(whole).files["chat_template.jinja"] == b"by default"
    if file == "tokenizer_config.json":  # transformers gives the other file to processors
        assert AutoTokenizer.from_pretrained(whole).get_chat_template() == "by default"


@pytest.mark.parametrize("place", ["tokenizer_config.json", "additional_chat_templates"])
def test_named_templates_without_a_default_are_rejected(whole, place):
    """As in transformers, when it applies one of them."""
    others = {"rag": "by rag", "tool_use": "by tool_use"}
    if place == "tokenizer_config.json":
        (whole / place).write_text(json.dumps({"chat_template": others}))
    else:
        (whole / place).mkdir()
        for name, text in others.items():
            (whole / place / f"{name}.jinja").write_text(text)
    with pytest.raises(ValueError, match="multiple chat templates with no default"):
        AutoTokenizer.from_pretrained(whole).get_chat_template()
    with pytest.raises(UnsupportedModelError, match=f"{place}.* rag, tool_use, and none") as caught:
        read_tokenizer(whole)
    assert "chat_template.jinja" in caught.value.hint
    (whole / "chat_template.jinja").write_text("by file")
    assert read_tokenizer(whole).files["chat_template.jinja"] == b"by file"


# Of `tokenization_kimi.py`
_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s(?i:'s|'t|'re|'ve|'m|'ll|'d)?"  # noqa: E501
WORDS = (
    r"[\p{Han}]+", _CASED % ("*", "+"), _CASED % ("+", "*"), r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
)  # fmt: skip


def _write_ranks(folder: Path) -> dict[bytes, int]:
    """A file of tiktoken, with Kimi's class beside it."""
    longer = "ab abc  a in ing ing' 12 123 汉 汉字 字汉 is it's camel Camel".encode().split(b" ")
    tokens = [*(bytes([byte]) for byte in range(256)), *filter(None, longer)]
    ranks = {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (folder / "tiktoken.model").write_text("".join(lines))
    facts = {"special": True, "normalized": False}
    named = {len(ranks): "[BOS]", len(ranks) + 2: "<|im_end|>"}
    config = {
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": {at: {"content": text, **facts} for at, text in named.items()},
        "eos_token": "<|im_end|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ranks


def test_kimis_file_of_tiktoken_is_read(tmp_path, monkeypatch):
    """As transformers converts such files with the pattern of the published class."""
    ranks = _write_ranks(tmp_path)
    found = read_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_buffer(found.files["tokenizer.json"])
    monkeypatch.setattr(TikTokenConverter, "load_tiktoken_bpe", staticmethod(lambda _: ranks))
    expected = TikTokenConverter(vocab_file="", pattern="|".join(WORDS)).converted()
    for text in ("abcab in'ing it's 12345 汉字 a字汉b\n\n camelCamel é", "汉字汉x IT'S\n 1"):
        ids = tokenizer.encode(text).ids
        assert ids == expected.encode(text).ids
        assert tokenizer.decode(ids) == text
    size = len(ranks)
    special = ("[BOS]", f"<|reserved_token_{size + 1}|>", "<|im_end|>")
    assert tokenizer.encode("".join(special)).ids == [size, size + 1, size + 2]
    assert (found.eos_token_id, found.last_token[1]) == (size + 2, size + 255)


def test_a_damaged_file_of_tiktoken_is_rejected(tmp_path):
    _write_ranks(tmp_path)
    path = tmp_path / "tiktoken.model"
    path.write_text(path.read_text()[:-3] + "x\n")
    with pytest.raises(EdgeLLMError, match=r"the tokenizer of .* is damaged"):
        read_tokenizer(tmp_path)
