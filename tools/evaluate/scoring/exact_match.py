"""Answers that are right or wrong: numbers and captions."""

from __future__ import annotations

import re
from decimal import Decimal

# A minus is a sign unless it follows a word, a number or a bracket, where it subtracts.
_NUMBER = re.compile(r"(?:(?<![\w)\].])-)?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> Decimal | None:
    """The last number in a text; commas between digits do not count."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def number_matches(answer: str, reference: str) -> bool:
    """gsm8k's rule here: the last number of the answer equals that of the reference, 18 = 18.00."""
    number = last_number(answer)
    return number is not None and number == last_number(reference)


def text_matches(answer: str, reference: str) -> bool:
    """Whether a caption is the expected one; spaces and line breaks do not count.

    Nor do spaces before punctuation, which tokenizers of words leave.
    """
    return _plain(answer) == _plain(reference)


def _plain(text: str) -> str:
    return re.sub(r"\s+([.,:;!?])", r"\1", " ".join(text.split()))
