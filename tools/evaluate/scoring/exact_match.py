"""Exact match of numbers and captions."""

from __future__ import annotations

import re
from decimal import Decimal

# A minus is a sign unless it follows a word, a number or a closing bracket.
_NUMBER = re.compile(r"(?:(?<![\w)\].])-)?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text, without commas between digits."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def number_matches(answer: str, reference: str) -> bool:
    """Return whether the last numbers of answer and reference are equal (gsm8k); 18 is 18.00."""
    number = last_number(answer)
    return number is not None and number == last_number(reference)


def text_matches(answer: str, reference: str) -> bool:
    """Return whether a caption equals the reference, except for whitespace.

    Spaces before punctuation, which word tokenizers leave, are ignored, too.
    """
    return _plain(answer) == _plain(reference)


def _plain(text: str) -> str:
    return re.sub(r"\s+([.,:;!?])", r"\1", " ".join(text.split()))
