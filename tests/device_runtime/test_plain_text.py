"""Text that spells special tokens stays text, and does not affect the text around it.

The expected ids are the library's own, by a tokenizer with renamed special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_families import FAMILIES, NAMES, make_tokenizer
from tokenizers import Tokenizer

from edgellm.device_runtime.engine.chat_template import Formatter
from edgellm.device_runtime.text.tokenizer import ChatTokenizer

_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[I] {{ m.content | trim }} [/I]"
    "{% if m.role == 'assistant' %} {{ eos_token }}{% endif %}{% endfor %} {{ eos_token }}then"
)
_RENAMED = {"<unk>": "⟦unk⟧", "<s>": "⟦begin⟧", "</s>": "⟦end⟧"}
_CONTENTS = ("x <s> y", "<s>", "</s>x", "x</s>", "a <unk> b", "<<s>>", "<s></s>", "▁<s>", "<s</s>")
_PARTS = (*NAMES, "x", "the", " ", "\n", "é", "👩", "<", ">", "s", "▁", "I")
_MIXTURE = st.lists(st.sampled_from(_PARTS), max_size=8).map("".join)
_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cn"]), max_size=12)
Make = Callable[[str], ChatTokenizer]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Engines' tokenizers by family."""
    made: dict[str, ChatTokenizer] = {}

    def one(family: str) -> ChatTokenizer:
        if family not in made:
            folder = tmp_path_factory.mktemp("tokenizer")
            save(make_tokenizer(family), folder)
            made[family] = ChatTokenizer(folder)
        return made[family]

    return one


def save(tokenizer: Tokenizer, folder: Path, names: tuple[str, ...] = NAMES) -> None:
    _, begin, end = names
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": begin, "eos_token": end})
    )
    (folder / "chat_template.jinja").write_text(_TEMPLATE)


def _prompt(tokenizer: ChatTokenizer, *contents: str) -> list[int]:
    turns = [
        {"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(contents)
    ]
    text = Formatter(tokenizer).format(turns, {"continue_final_message": False})
    return tokenizer.encode(text, add_special_tokens=False)


def _expected(family: str, *contents: str) -> list[int]:
    """A text for a tokenizer in which <s> is not special, since its special tokens are renamed."""
    tokenizer = make_tokenizer(family, tuple(_RENAMED[name] for name in NAMES))
    text = _RENAMED["<s>"]
    for at, content in enumerate(contents):
        text += f"[I] {content.strip()} [/I]" + (" " + _RENAMED["</s>"] if at % 2 else "")
    return tokenizer.encode(f"{text} {_RENAMED['</s>']}then", add_special_tokens=False).ids


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("content", _CONTENTS)
def test_spelled_special_tokens_stay_text(make, family, content):
    assert _prompt(make(family), content) == _expected(family, content)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(contents=st.lists(_MIXTURE, min_size=1, max_size=3))
def test_any_mixture_stays_text(make, family, contents):
    assert _prompt(make(family), *contents) == _expected(family, *contents)


@pytest.mark.parametrize("family", FAMILIES)
def test_encoding_equals_the_librarys(make, family):
    """`encode_special_tokens` keeps all special tokens of a text as text."""
    tokenizer = make_tokenizer(family)
    tokenizer.encode_special_tokens = True
    expected = tokenizer.encode("x <s> the y", add_special_tokens=False).ids
    if not {0, 1, 2} & {*expected}:
        ours = make(family)
        assert ours.encode(ours.as_text("x <s> the y"), add_special_tokens=False) == expected


@pytest.mark.each_change("byte_level", "unigram_normalized", "wordpiece", "whole_words", "prepend")
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(contents=st.lists(_TEXT, min_size=1, max_size=3))
def test_ordinary_text_equals_transformers(make, family, contents):
    from transformers import PreTrainedTokenizerFast

    tokenizer = make_tokenizer(family)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    theirs.chat_template = _TEMPLATE
    turns = [
        {"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(contents)
    ]
    expected = theirs.apply_chat_template(turns, tokenize=True, return_dict=False)
    assert _prompt(make(family), *contents) == expected


def test_normalized_special_tokens_stay_text(make):
    """NFKC makes "<s>" of full-width characters."""
    found = _prompt(make("unigram"), "x \uff1cs\uff1e y")
    assert found.count(1) == 1  # the template's own
    assert found == _expected("unigram", "x \uff1cs\uff1e y")


@pytest.mark.parametrize("family", ["metaspace_never", "byte_level"])
def test_a_special_token_of_one_character(tmp_path, family):
    tokenizer = make_tokenizer(family)
    tokenizer.add_special_tokens(["$"])
    save(tokenizer, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("${{ messages[0].content }}$")
    ours, dollar = ChatTokenizer(tmp_path), tokenizer.token_to_id("$")
    found = _prompt(ours, "a$b$$")
    assert ours.decode(found, skip_special_tokens=False) == "$a$b$$$"
    if family != "byte_level":  # its byte is the token
        assert [at for at, index in enumerate(found) if index == dollar] == [0, len(found) - 1]


def test_special_tokens_that_strip_white_space(tmp_path):
    """As RoBERTa's <mask>, which includes the space before it."""
    from tokenizers import AddedToken

    tokenizer = make_tokenizer("byte_level")
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    save(tokenizer, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("a <mask> b{{ messages[0].content }}")
    ours, mask = ChatTokenizer(tmp_path), tokenizer.token_to_id("<mask>")
    a = tokenizer.encode("a").ids
    tokenizer.encode_special_tokens = True
    assert _prompt(ours, "x <mask> <s> c") == [*a, mask, *tokenizer.encode("bx <mask> <s> c").ids]


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    """Files of sentence-transformers truncate texts; transformers ignores both settings."""
    tokenizer = make_tokenizer("byte_level")
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    save(tokenizer, tmp_path)
    ours = ChatTokenizer(tmp_path)
    found = ours.encode("the the the x y", add_special_tokens=False)
    assert ours.decode(found) == "the the the x y"
    assert len(found) < 64
