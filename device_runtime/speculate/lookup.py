"""What text alone foresees, and how such guesses enter a tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from edgellm.device_runtime.speculate.acceptance_rates import Calibration
from edgellm.device_runtime.speculate.tree import Pool


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens that may follow, and how sure one is of each, given those before it."""

    token_ids: Sequence[int]
    confidences: Sequence[float]


class Lookup(Protocol):
    """Foresees from the words of one request, and those that were said before."""

    most: int  # tokens of all continuations together

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens."""
        ...

    def continuations(self) -> list[Continuation]:
        """What may follow the text."""
        ...

    def end(self) -> None:
        """The request is over; from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class LearnedLookup:
    """What makes the lookups of requests, and how often the base accepts their guesses."""

    start: Callable[[], Lookup]
    calibration: Calibration = field(default_factory=Calibration)

    def begin(self) -> LookupSource:
        """That of a request that begins."""
        return LookupSource(self.start(), self.calibration)


@dataclass(slots=True)
class LookupSource:
    """The lookup of a request."""

    lookup: Lookup
    calibration: Calibration

    def expected(self, continuations: Sequence[Continuation]) -> float:
        """Tokens that the base will accept of the likeliest of the lookup's continuations."""
        for found in continuations[:1]:
            rates = self.calibration.log_rates(np.array(found.confidences))
            return float(np.exp(np.cumsum(rates)).sum())
        return 0.0

    def merge(self, pool: Pool, levels: int, continuations: Sequence[Continuation]) -> None:
        """Hang the lookup's continuations into the pool; tokens that are there already stay."""
        for found in continuations:
            parent, at, token_ids = 0, 0, found.token_ids[:levels]
            while at < len(token_ids):
                known = pool.find(parent, token_ids[at])
                if known is None:
                    confidences = np.array(found.confidences[at:levels])
                    scores = self.calibration.log_rates(confidences)
                    pool.add_chain(parent, token_ids[at:], scores, confidences)
                    break
                parent, at = known, at + 1
