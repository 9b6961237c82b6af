"""Times of words: each token is aligned with the audio that it attends to.

Dynamic time warping finds the monotonic path through the attention of chosen heads to audio
(arXiv 2212.04356, as openai/whisper aligns). Shapes: N heads, S tokens, A positions of 20 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgellm.device_runtime.arrays import F32, I64

# Languages that are written without spaces, by code
_UNSPACED = ("zh", "ja", "th", "lo", "my", "yue")
_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_OPENING = "\"'“¡¿([{-"  # parts of the word after
_CLOSING = "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001 - of the word before
_DIAGONAL, _TOKEN, _POSITION = range(3)  # what a step of a path advances


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A word with its times, and with spaces and punctuation around it."""

    text: str
    start_s: float
    end_s: float


class WordSpan(NamedTuple):
    """A word, and its tokens from `begin` up to `end`."""

    text: str
    begin: int
    end: int


def first_positions(attention: F32, filter_width: int) -> I64:
    """The position at which each token begins, int64 [S].

    Args:
        attention: weights [N, S, A].
        filter_width: positions of the median filter, odd.
    """
    with np.errstate(invalid="ignore", divide="ignore"):  # of tokens that all attend alike
        deviation = attention.std(axis=1, keepdims=True)
        normed = (attention - attention.mean(axis=1, keepdims=True)) / deviation
    score = _median(normed, filter_width).mean(axis=0)
    return _warp(-score.astype(np.float64))


def _median(values: F32, width: int) -> F32:
    """Median filter over the last axis, whose ends are mirrored."""
    reach = width // 2
    if values.shape[-1] <= reach:
        return values
    padded = np.pad(values, ((0, 0), (0, 0), (reach, reach)), mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, width, axis=-1)
    return np.sort(windows, axis=-1)[..., reach]


def _warp(costs: NDArray[np.float64]) -> I64:
    """First positions of the cheapest monotonic path through costs [S, A], from corner to corner.

    Totals are computed by antidiagonal: a cell follows three of the two antidiagonals before it.
    """
    tokens, positions = costs.shape
    totals = np.full((tokens + 1, positions + 1), np.inf, np.float32)
    totals[0, 0] = 0
    steps = np.full((tokens + 1, positions + 1), _POSITION, np.int8)
    steps[1:, 0] = _TOKEN
    for level in range(2, tokens + positions + 1):
        rows = np.arange(max(1, level - positions), min(tokens, level - 1) + 1)
        columns = level - rows
        diagonal, token, position = (
            totals[rows - 1, columns - 1],
            totals[rows - 1, columns],
            totals[rows, columns - 1],
        )
        is_diagonal = (diagonal < token) & (diagonal < position)
        is_token = ~is_diagonal & (token < diagonal) & (token < position)
        before = np.where(is_diagonal, diagonal, np.where(is_token, token, position))
        steps[rows, columns] = np.where(
            is_diagonal, _DIAGONAL, np.where(is_token, _TOKEN, _POSITION)
        )
        totals[rows, columns] = costs[rows - 1, columns - 1] + before
    found, row, column = np.zeros(tokens, np.int64), tokens, positions
    while row > 0:
        found[row - 1] = max(column - 1, 0)
        step = steps[row, column]
        row -= step != _POSITION
        column -= step != _TOKEN
    return found


def split_words(pieces: Sequence[bytes], language: str) -> list[WordSpan]:
    """Words of a text.

    Args:
        pieces: bytes of each token.
        language: code of the text.
    """
    found: list[WordSpan] = []
    for part in _characters(pieces):
        text = part.text.strip()
        begins = language in _UNSPACED or part.text.startswith(" ") or text in _PUNCTUATION
        if begins or not found:
            found.append(part)
        else:
            found[-1] = _joined(found[-1], part)
    return _with_closing(_with_opening(found))


def _characters(pieces: Sequence[bytes]) -> list[WordSpan]:
    """Tokens, joined to whole characters; bytes that are not UTF-8 stay apart."""
    whole, found = b"".join(pieces).decode(errors="replace"), list[WordSpan]()
    begin, length = 0, 0
    for end in range(1, len(pieces) + 1):
        text = b"".join(pieces[begin:end]).decode(errors="replace")
        at = length + text.find("\ufffd")
        if "\ufffd" not in text or whole[at : at + 1] in ("", "\ufffd"):
            found.append(WordSpan(text, begin, end))
            begin, length = end, length + len(text)
    return found


def _joined(first: WordSpan, second: WordSpan) -> WordSpan:
    return WordSpan(first.text + second.text, first.begin, second.end)


def _with_opening(words: Sequence[WordSpan]) -> list[WordSpan]:
    """Opening punctuation after a space joins the next word."""
    found: list[WordSpan] = []
    for word in reversed(words):
        if found and word.text.startswith(" ") and word.text.strip() in _OPENING:
            found[-1] = _joined(word, found[-1])
        else:
            found.append(word)
    return found[::-1]


def _with_closing(words: Sequence[WordSpan]) -> list[WordSpan]:
    """Closing punctuation joins the word before."""
    found: list[WordSpan] = []
    for word in words:
        if found and not found[-1].text.endswith(" ") and word.text in _CLOSING:
            found[-1] = _joined(found[-1], word)
        else:
            found.append(word)
    return found
