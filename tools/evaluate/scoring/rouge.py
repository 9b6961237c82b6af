"""ROUGE-1, ROUGE-2 and ROUGE-L of a summary (Lin 2004), by the package rouge-score.

F1 without stemming. Words are runs of letters and digits in lower case; the package's own tokenizer
would drop letters that are not ASCII.
"""

from __future__ import annotations

import functools
import re
from importlib.util import find_spec
from typing import Any

from edgellm.core.commands.extras import install
from edgellm.core.errors import EdgeLLMError

_NAMES = ("rouge1", "rouge2", "rougeL")
_WORD = re.compile(r"[^\W_]+")


class _Words:
    """A tokenizer of rouge-score."""

    @staticmethod
    def tokenize(text: str) -> list[str]:
        return _WORD.findall(text.lower())


def require_rouge() -> None:
    """Raise `EdgeLLMError` if rouge-score is not installed."""
    if find_spec("rouge_score") is None:
        raise EdgeLLMError(
            "ROUGE needs rouge-score, which is not installed",
            hint=install("eval"),
        )


def rouge(summary: str, reference: str) -> dict[str, float]:
    """Return the three scores, from 0 to 1."""
    found = _scorer().score(reference, summary)
    return {name: float(found[name].fmeasure) for name in _NAMES}


@functools.cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(_NAMES), tokenizer=_Words())
