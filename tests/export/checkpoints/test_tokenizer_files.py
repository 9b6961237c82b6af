"""Tokenizers without tokenizer.json, and chat templates by name, as transformers reads them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.integrations.mistral.tokenizer import MistralConverter

from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
    RequestError,
    UnsupportedModelError,
)
from edgellm.device_runtime.text.tokenizer import ChatTokenizer
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


TEKKEN_SPECIAL = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[IMG]",
    "<pad>",
    "[AUDIO]",
    "[BEGIN_AUDIO]",
]
_BEGIN = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN_WORDS = (
    rf"{_BEGIN}{_UPPER}*{_LOWER}+|{_BEGIN}{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NUM_SPECIAL, NUM_TOKENS = 20, 280


def _write_tekken(folder: Path, version: str = "v7", **changes) -> None:
    """A tekken.json of `NUM_TOKENS` tokens, which lists more of them."""
    longer = " th he the  the The ing  a an and 日本 语 é na 👩 12 \n\n ab abc  ab bc".encode()
    tokens = [*(bytes([byte]) for byte in range(256)), *filter(None, longer.split(b" "))]
    tokens += [b" t", b" th", b" the", b"  ", b"    ", b"\n\n", *(b"x%d" % at for at in range(20))]
    content = {
        "config": {
            "pattern": TEKKEN_WORDS,
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": NUM_TOKENS + NUM_SPECIAL,
            "default_num_special_tokens": NUM_SPECIAL,
            "version": version,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(dict.fromkeys(tokens))
        ],
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(TEKKEN_SPECIAL)
        ],
    }
    (folder / "tekken.json").write_text(json.dumps(content | changes))


def test_mistrals_tekken_json_is_read(tmp_path):
    """As transformers converts it, with the token that mistral-common begins texts with."""
    _write_tekken(tmp_path)
    found = read_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_buffer(found.files["tokenizer.json"])
    expected = MistralConverter(str(tmp_path / "tekken.json")).converted()
    texts = [
        *TEXTS,
        "The theory  and\n\n\nthe   An",
        "12345 1.5",
        "日本语 é👩 ÀÉ x19 x0",
        "[INST]the[/INST]",
    ]
    for text in texts:
        ids = expected.encode(text).ids
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids
        assert tokenizer.encode(text).ids == [TEKKEN_SPECIAL.index("<s>"), *ids]
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.get_vocab() == expected.get_vocab()
    assert (found.eos_token_id, found.last_token[1]) == (2, NUM_TOKENS + NUM_SPECIAL - 1)


def _chat(folder: Path, target: Path) -> ChatTokenizer:
    """The tokenizer of a bundle of the folder."""
    target.mkdir()
    for name, content in read_tokenizer(folder).files.items():
        (target / name).write_bytes(content)
    return ChatTokenizer(target)


AUDIO, IMAGE = {"type": "audio", "audio": ""}, {"type": "image", "image": ""}
WHY, WHAT = {"type": "text", "text": "Why?"}, {"type": "text", "text": " What?"}
SYSTEM = {"role": "system", "content": "Be brief."}
# Texts of mistral-common 1.13 (`encode_chat_completion`), with one token for an image or a clip
CONVERSATIONS = (
    (
        [SYSTEM, "Hi", "Yes.", " Go on"],
        "[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi[/INST]Yes.</s>[INST] Go on[/INST]",
    ),
    ([[AUDIO, WHY]], "[INST][BEGIN_AUDIO][AUDIO]Why?[/INST]"),
    (
        [[WHY, AUDIO], "No", [AUDIO, AUDIO, WHAT]],
        "[INST]Why?[BEGIN_AUDIO][AUDIO][/INST]No</s>"
        "[INST][BEGIN_AUDIO][AUDIO][BEGIN_AUDIO][AUDIO] What?[/INST]",
    ),
    ([[WHY, IMAGE]], "[INST][IMG]Why?[/INST]"),
    ([[WHY, IMAGE, WHAT, IMAGE]], "[INST]Why?[IMG] What?[IMG][/INST]"),
)


def _messages(contents: list) -> list[dict]:
    """Messages of user and assistant in turn, after one of the system."""
    turns = [each for each in contents if each is not SYSTEM]
    roles = ("user", "assistant")
    found = [{"role": roles[at % 2], "content": content} for at, content in enumerate(turns)]
    return [each for each in contents if each is SYSTEM] + found


@pytest.mark.parametrize("version", ["v7", "v13"])
def test_tekken_json_without_a_template_has_the_instruct_form(tmp_path, version):
    _write_tekken(tmp_path, version)
    tokenizer = _chat(tmp_path, tmp_path / "bundle")
    for contents, expected in CONVERSATIONS:
        assert tokenizer.render(_messages(contents), add_generation_prompt=True) == f"<s>{expected}"
    rejected = ([SYSTEM, [AUDIO, WHY]], "no system"), (["Hi", [IMAGE]], "of the user")
    for contents, said in rejected:
        with pytest.raises(RequestError, match=said):
            tokenizer.render(_messages(contents))
    (tmp_path / "chat_template.jinja").write_text("its own")
    assert read_tokenizer(tmp_path).files["chat_template.jinja"] == b"its own"


@pytest.mark.parametrize("changes", [{"version": "v15"}, {"special_tokens": None}, "[THINK]"])
def test_tekken_json_of_an_unknown_form_has_no_template(tmp_path, changes):
    """The tokenizer is read; v3 lists no special tokens and has no messages of the system."""
    if changes == "[THINK]":
        texts = [*TEKKEN_SPECIAL, changes]
        listed = [{"rank": rank, "token_str": text} for rank, text in enumerate(texts)]
        changes = {"version": "v13", "special_tokens": listed}
    _write_tekken(tmp_path, **{"version": "v3", **changes})
    tokenizer = _chat(tmp_path, tmp_path / "bundle")
    assert tokenizer.decode(tokenizer.encode("the [INST]", add_special_tokens=False)) == "the "
    with pytest.raises(RequestError, match="no chat template") as caught:
        tokenizer.render(_messages(["Hi"]))
    assert "chat_template.jinja" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab": [{"rank": 1, "token_bytes": "YQ=="}]},
        {"special_tokens": [{"rank": 1, "token_str": "<s>"}]},
        {"special_tokens": None, "version": "v11"},
        {"config": {}},
    ],
)
def test_a_damaged_tekken_json_is_rejected(tmp_path, changes):
    _write_tekken(tmp_path, **changes)
    with pytest.raises(BrokenArtifactError, match=r"the tokenizer of .* is damaged"):
        read_tokenizer(tmp_path)
