"""Classes of regular expressions are ASCII: Python's re with re.ASCII is the reference."""

from __future__ import annotations

import json
import re

import pytest
from guided_texts import Guided
from hypothesis import given
from hypothesis import strategies as st

from edgellm.core.errors import RequestError
from edgellm.device_runtime.sampling.ascii_regex import with_ascii_classes, with_ascii_lark
from edgellm.device_runtime.sampling.guidance import Guide

# ASCII, and what is a digit, a letter or white space in Unicode.
CHARACTERS = [
    *map(chr, range(128)),
    *"\x85\xa0ªéß²\u0661\u096b\uff10\u1680\u2028\u3000\ufeff\U0001d7d8\U0001fbf8",
]
EXPRESSIONS = [
    *[
        r"\d",
        r"\D",
        r"\w",
        r"\W",
        r"\s",
        r"\S",
        r"[\d]",
        r"[^\d]",
        r"[^\D]",
        r"[\D5]",
        r"[\w.-]",
        r"[\d\-x]",
        r"[]\d]",
        r"[^]\d]",
        r"[\b]",
        r"[\\d]",
    ],
    *[
        r"\[\d\]?",
        r"[\s\S]",
        r"[^\W\d]",
        r"[a\]\d]",
        r"(?:\d|[\w])",
        r"(\d)?",
        r"\d{1}",
        r"[^\s]",
        r"[x\d-]",
        r"(?P<name>\d)",
    ],
]


@pytest.fixture(scope="module")
def guided(tmp_path_factory) -> Guided:
    return Guided(tmp_path_factory.mktemp("bytes"))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_classes_equal_those_of_ascii(guided, expression):
    reference = re.compile(expression, re.ASCII)
    for guide, characters in (
        (Guide("regex", expression), CHARACTERS),
        (Guide("lark", f'start: /{expression}/ // not "this\n'), "5a \u0661é\u2028"),
        (Guide("ebnf", f"start: WORD\nWORD: /{expression}/"), "5a \u0661é\u2028"),
    ):
        expected = [one for one in characters if reference.fullmatch(one)]
        assert [one for one in characters if guided.takes(guide, one)] == expected, guide


@given(st.lists(st.sampled_from([*EXPRESSIONS, "a", ".", "é", r"\.", "[a-z]*"]), max_size=5))
def test_generated_texts_match(guided, parts):
    expression = "".join(parts)
    if expression.count("(?P") > 1:
        return
    text = guided.answer(Guide("regex", expression), seed=len(expression))
    assert text is not None
    assert re.fullmatch(expression, text, re.ASCII | re.DOTALL)


def test_other_escapes_are_unchanged():
    assert with_ascii_classes(r"\\d\\\d") == r"\\d\\[0-9]"
    assert with_ascii_classes(r"\p{Nd}\x41\u{41}\.") == r"\p{Nd}\x41\u{41}\."
    kept = 'start: "\\\\d /\\\\d/" <[5]> </d\\d> %json {"pattern": "\\\\d/\\\\d"} // /\\d/\n# /\\d/'
    assert with_ascii_lark(kept) == kept
    assert with_ascii_lark(r"start: /\d\/\d/i") == r"start: /[0-9]\/[0-9]/i"


@pytest.mark.parametrize("expression", [r"\bab", r"a\Bb", r"[a]\b", r"[^]]\b", r"\\\b"])
def test_word_boundaries_are_rejected(guided, expression):
    for guide in (Guide("regex", expression), Guide("lark", f"start: /{expression}/")):
        with pytest.raises(RequestError, match="word boundaries are not supported") as caught:
            guided.guidance.start(guide)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("expression", ["\\", "a\\", "a\\\\\\"])
def test_a_backslash_at_the_end_is_rejected(guided, expression):
    with pytest.raises(re.error):
        re.compile(expression)
    with pytest.raises(RequestError, match="ends with a backslash") as caught:
        guided.guidance.start(Guide("regex", expression))
    assert caught.value.hint


def test_patterns_of_schemas_are_ascii(guided):
    guide = Guide.of_schema({"type": "string", "pattern": r"^[\d]\w$"})
    assert guided.takes(guide, json.dumps("1a"))
    for text in ("\u0661a", "1é"):
        assert not guided.takes(guide, json.dumps(text, ensure_ascii=False))
