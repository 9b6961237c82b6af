"""ROUGE-1, ROUGE-2 and ROUGE-L of a summary (Lin 2004).

F1 of n-grams and of the longest common subsequence. Words are runs of letters and digits in lower
case, without stemming.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

_WORD = re.compile(r"[^\W_]+")


def rouge(summary: str, reference: str) -> dict[str, float]:
    """Return the three scores, from 0 to 1."""
    ours, theirs = (_WORD.findall(text.lower()) for text in (summary, reference))
    scores = {f"rouge{size}": _overlap(ours, theirs, size) for size in (1, 2)}
    return {**scores, "rougeL": _f1(longest_common(ours, theirs), len(ours), len(theirs))}


def _overlap(ours: Sequence[str], theirs: Sequence[str], size: int) -> float:
    one, other = (
        Counter(tuple(words[at : at + size]) for at in range(len(words) - size + 1))
        for words in (ours, theirs)
    )
    return _f1((one & other).total(), one.total(), other.total())


def longest_common(ours: Sequence[str], theirs: Sequence[str]) -> int:
    """Return the length of the longest common subsequence."""
    before = [0] * (len(theirs) + 1)
    for word in ours:
        row = [0]
        for at, other in enumerate(theirs):
            row.append(before[at] + 1 if word == other else max(row[at], before[at + 1]))
        before = row
    return before[-1]


def _f1(common: int, ours: int, theirs: int) -> float:
    return 2 * common / (ours + theirs) if common else 0.0
