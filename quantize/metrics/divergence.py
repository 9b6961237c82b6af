"""KL divergence, perplexity and agreement, for reports and `benchmarks/quality.py`.

T tokens of text, V tokens of the vocabulary.
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
    """The right token after each token of the text."""

    ids: Ids  # [samples, T]; -1: none
    kinds: Ids  # [samples, T], indices into `names`
    names: tuple[str, ...]  # of kinds of text


@dataclass(frozen=True, slots=True)
class Drafted:
    """Acceptance of a float draft's first candidate, with hidden states of both bases."""

    by_floats: float
    by_quantized: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Prediction of the right tokens over held-out text, and agreement of the two models.

    A language model's right token is the next one, a draft's the base's greedy token. Tokens
    outside the draft's vocabulary count as misses, and not in its perplexity.
    """

    tokens: int
    perplexity_float: float
    perplexity_quantized: float
    accuracy_float: float  # share of tokens whose top-1 prediction is right
    accuracy_quantized: float
    kl_divergence: float  # of the quantized from the float distribution, nats a token
    top1_agreement: float
    kl_float_head: float | None = None  # with the float head; None: the head is float
    kinds: dict[str, Quality] = field(default_factory=dict)  # of text, if several
    answers: Changes | None = None  # with --answers
    drafted: Drafted | None = None  # with a draft


def read_quality(facts: Mapping[str, Any]) -> Quality:
    """Parse the result of `dataclasses.asdict` of a `Quality`."""
    own: dict[str, Any] = {
        "kinds": {name: read_quality(each) for name, each in facts["kinds"].items()}
    }
    if facts["answers"] is not None:
        own["answers"] = read_changes(facts["answers"])
    if facts["drafted"] is not None:
        own["drafted"] = Drafted(**facts["drafted"])
    return Quality(**{**facts, **own})


def read_changes(facts: Mapping[str, Any]) -> Changes:
    """Parse the result of `dataclasses.asdict` of `Changes`."""
    kinds = {name: read_changes(each) for name, each in facts["kinds"].items()}
    return Changes(**{**facts, "kinds": kinds})


class Score:
    """Sums over text by kind."""

    def __init__(self, names: Sequence[str]) -> None:
        """Start with sums of zero; `names` are those of the kinds."""
        self._names = tuple(names)
        self._sums = np.zeros((len(self._names), _COLUMNS))

    def add(
        self, floats: torch.Tensor, rounded: torch.Tensor, ids: torch.Tensor, kinds: Ids
    ) -> None:
        """Add T tokens.

        Args:
            floats: logits or log-probabilities of the float model [T, V].
            rounded: those of the quantized model.
            ids: the right tokens [T]; -1: none.
            kinds: indices into `names` [T].
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
        """Return the quality over all tokens, and over each kind if there are several."""
        present = [index for index, sums in enumerate(self._sums) if sums[0]]
        kinds = {self._names[index]: _quality(self._sums[index]) for index in present}
        return _quality(self._sums.sum(0), kinds if len(kinds) > 1 else {})


_COLUMNS = 8  # sums of a `Score`


def _quality(sums: NDArray[np.float64], kinds: dict[str, Quality] | None = None) -> Quality:
    count, known, *rest = sums.tolist()
    perplexities = [math.exp(min(loss / max(known, 1), 700)) for loss in rest[:2]]
    of_float, of_quantized, divergence, agreement = (total / count for total in rest[2:])
    return Quality(
        tokens=int(count),
        perplexity_float=perplexities[0],
        perplexity_quantized=perplexities[1],
        accuracy_float=of_float,
        accuracy_quantized=of_quantized,
        kl_divergence=divergence,
        top1_agreement=agreement,
        kinds=kinds or {},
    )


@dataclass(frozen=True, slots=True)
class GreedyOutput:
    """A prompt, and the float model's greedy output."""

    kind: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]

    @property
    def input_ids(self) -> tuple[int, ...]:
        """The tokens whose next tokens are the output, from position `start` on."""
        return (*self.prompt, *self.output[:-1])

    @property
    def start(self) -> int:
        """The position in `input_ids` of the prompt's last token."""
        return len(self.prompt) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Greedy outputs of the float model that the quantized model changes."""

    answers: int  # number of outputs
    changed: int
    tokens: float  # of an output, mean
    kept: float  # number of them before the first changed one, mean
    kinds: dict[str, Changes] = field(default_factory=dict)  # if several


def count_changes(asked: Sequence[GreedyOutput], found: Sequence[Ids]) -> Changes:
    """Count the outputs that the quantized model changes.

    One forward pass over the float model's output suffices: until the first changed token, greedy
    decoding with the quantized model has the same input.

    Args:
        asked: the outputs of the float model.
        found: for each, the quantized model's top-1 tokens after `input_ids`, from `start` on.
    """
    equal = [
        int(np.cumprod(np.equal(each.output, ids)).sum())
        for each, ids in zip(asked, found, strict=True)
    ]
    pairs = list(zip(asked, equal, strict=True))
    kinds = {
        kind: _changes([pair for pair in pairs if pair[0].kind == kind])
        for kind in dict.fromkeys(each.kind for each in asked)
    }
    return replace(_changes(pairs), kinds=kinds if len(kinds) > 1 else {})


def _changes(pairs: list[tuple[GreedyOutput, int]]) -> Changes:
    sizes = [len(each.output) for each, _ in pairs]
    kept = [count for _, count in pairs]
    changed = sum(count < size for count, size in zip(kept, sizes, strict=True))
    return Changes(
        answers=len(pairs), changed=changed, tokens=float(np.mean(sizes)), kept=float(np.mean(kept))
    )
