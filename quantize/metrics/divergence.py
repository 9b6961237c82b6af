"""How the answers of a rounded model differ: one measure, for reports and `benchmarks/quality.py`.

T tokens of text, V tokens that a model knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Targets:
    """What a model should say after each token of some rows of text."""

    ids: Ids  # [rows, T]; -1: there is nothing right
    kinds: Ids  # [rows, T], places in `names`
    names: tuple[str, ...]  # of kinds of text


@dataclass(frozen=True, slots=True)
class Drafted:
    """How often a base takes the first candidate of a float draft that reads its features."""

    by_floats: float
    by_quantized: float


@dataclass(frozen=True, slots=True)
class Quality:
    """Over held-out text: how well the right token is predicted, and how alike.

    Of a language model the right token is the next one, of a draft that which its base takes
    (tokens that the draft does not know are missed, and are no part of its perplexity).
    """

    tokens: int
    perplexity_float: float
    perplexity_quantized: float
    accuracy_float: float  # share of tokens whose likeliest candidate is right
    accuracy_quantized: float
    kl_divergence: float  # of the quantized from the float distribution, nats a token
    top1_agreement: float
    kl_float_head: float | None = None  # the same with the float head; None: the head is one
    kinds: dict[str, Quality] = field(default_factory=dict)  # of text, where there are several
    answers: Changes | None = None  # where there were questions
    drafted: Drafted | None = None  # where there was a draft


def read_quality(facts: Mapping[str, Any]) -> Quality:
    """What `dataclasses.asdict` gave of one."""
    own: dict[str, Any] = {
        "kinds": {name: read_quality(each) for name, each in facts["kinds"].items()}
    }
    if facts["answers"] is not None:
        own["answers"] = read_changes(facts["answers"])
    if facts["drafted"] is not None:
        own["drafted"] = Drafted(**facts["drafted"])
    return Quality(**{**facts, **own})


def read_changes(facts: Mapping[str, Any]) -> Changes:
    """What `dataclasses.asdict` gave of some."""
    kinds = {name: read_changes(each) for name, each in facts["kinds"].items()}
    return Changes(**{**facts, "kinds": kinds})


class Score:
    """Sums over text, by its kind."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names` are those of the kinds."""
        self._names = tuple(names)
        self._sums = np.zeros((len(self._names), _COLUMNS))

    def add(
        self, floats: torch.Tensor, rounded: torch.Tensor, ids: torch.Tensor, kinds: Ids
    ) -> None:
        """Add T tokens.

        Args:
            floats: logits or log-probabilities of the float model [T, V].
            rounded: those of the other model.
            ids: the right tokens [T], -1 where there are none.
            kinds: places in `names` [T].
        """
        logs = [torch.log_softmax(each, -1) for each in (floats, rounded)]
        known = ids >= 0
        places = ids.clamp(min=0)[:, None]
        losses = [-log.gather(-1, places)[:, 0].where(known, torch.zeros(())) for log in logs]
        best = [log.argmax(-1) for log in logs]
        divergence = (logs[0].exp() * (logs[0] - logs[1])).sum(-1)
        hits = [found == ids for found in best]
        columns = [known | True, known, *losses, *hits, divergence, best[0] == best[1]]
        found = torch.stack([column.double() for column in columns], -1).cpu().numpy()
        np.add.at(self._sums, kinds, found)

    def quality(self) -> Quality:
        """Of all tokens, and of each kind where there are several."""
        present = [index for index, sums in enumerate(self._sums) if sums[0]]
        kinds = {self._names[index]: _quality(self._sums[index]) for index in present}
        return _quality(self._sums.sum(0), kinds if len(kinds) > 1 else {})


_COLUMNS = 8  # of the sums of a `Score`


def _quality(sums: NDArray[np.float64], kinds: dict[str, Quality] | None = None) -> Quality:
    count, known, *rest = sums.tolist()
    losses, shares = rest[:2], [total / count for total in rest[2:]]
    perplexities = [math.exp(min(loss / max(known, 1), 700)) for loss in losses]
    return Quality(int(count), *perplexities, *shares, kinds=kinds or {})


@dataclass(frozen=True, slots=True)
class Questioned:
    """A prompt, and what the float model answers to it, greedily."""

    kind: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def said(self) -> tuple[int, ...]:
        """What a model reads to say the answer's tokens one by one, from `start` on."""
        return (*self.prompt, *self.answer[:-1])

    @property
    def start(self) -> int:
        """The place in `said` after which the answer begins."""
        return len(self.prompt) - 1


@dataclass(frozen=True, slots=True)
class Changes:
    """Greedy answers in which the rounded model takes another token than the float model."""

    answers: int
    changed: int
    tokens: float  # of an answer, mean
    kept: float  # of these before the first other one, mean
    kinds: dict[str, Changes] = field(default_factory=dict)  # where there are several


def count_changes(asked: Sequence[Questioned], found: Sequence[Ids]) -> Changes:
    """How many answers are others.

    One pass over a float model's answer tells: until the first other token, a rounded model that
    answers by itself reads the same.

    Args:
        asked: the answers of the float model.
        found: for each, the likeliest tokens of the rounded model after `said`, from `start` on.
    """
    equal = [
        int(np.cumprod(np.equal(each.answer, ids)).sum())
        for each, ids in zip(asked, found, strict=True)
    ]
    pairs = list(zip(asked, equal, strict=True))
    kinds = {
        kind: _changes([pair for pair in pairs if pair[0].kind == kind])
        for kind in dict.fromkeys(each.kind for each in asked)
    }
    return replace(_changes(pairs), kinds=kinds if len(kinds) > 1 else {})


def _changes(pairs: list[tuple[Questioned, int]]) -> Changes:
    sizes = [len(each.answer) for each, _ in pairs]
    kept = [count for _, count in pairs]
    changed = sum(count < size for count, size in zip(kept, sizes, strict=True))
    return Changes(len(pairs), changed, float(np.mean(sizes)), float(np.mean(kept)))
