"""Lookup drafts: predictions from text alone, merged into draft trees."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from edgellm.device_runtime.speculate.policy.acceptance_rates import Calibration
from edgellm.device_runtime.speculate.tree import CandidatePool


class Continuation(NamedTuple):
    """Predicted tokens, with the confidence of each given those before it."""

    token_ids: Sequence[int]
    confidences: Sequence[float]


class Lookup(Protocol):
    """Predicts tokens from the text of one request, and maybe from earlier requests."""

    maximum: int  # tokens of all continuations in total

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens."""
        ...

    def continuations(self) -> list[Continuation]:
        """Predicted continuations of the text."""
        ...

    def end(self, token_ids: Sequence[int]) -> None:
        """The request has finished, with these last tokens; thread-safe."""
        ...


@dataclass(frozen=True, slots=True)
class LearnedLookup:
    """Creates the lookups of requests; holds their acceptance rates."""

    start: Callable[[], Lookup]
    calibration: Calibration = field(default_factory=Calibration)

    def begin(self) -> LookupSource:
        """The lookup of a new request."""
        return LookupSource(self.start(), self.calibration)


@dataclass(slots=True)
class LookupSource:
    """The lookup of a request, with the acceptance rates of its kind."""

    lookup: Lookup
    calibration: Calibration

    def chances(self, continuations: Sequence[Continuation]) -> Iterator[float]:
        """Probabilities that the base accepts 1, 2, ... tokens of the likeliest continuation."""
        chance = 1.0
        for found in continuations[:1]:
            for confidence in found.confidences:
                chance *= math.exp(self.calibration.log_rate(confidence))
                yield chance

    def merge(
        self, pool: CandidatePool, levels: int, continuations: Sequence[Continuation]
    ) -> None:
        """Add the lookup's continuations to the pool.

        A token that the pool already has gets the higher of both scores.
        """
        for found in continuations:
            parent, at, token_ids = 0, 0, found.token_ids[:levels]
            confidences = np.array(found.confidences[:levels])
            rates = self.calibration.log_rates(confidences)
            while at < len(token_ids):
                known = pool.find(parent, token_ids[at])
                if known is None:
                    pool.add_chain(parent, token_ids[at:], rates[at:], confidences[at:])
                    break
                score = pool.scores[parent] + rates[at]
                pool.scores[known] = max(pool.scores[known], score)
                parent, at = known, at + 1


class TextDrafts:
    """The predictions of a request's lookups; the lookups receive text lazily."""

    def __init__(self, lookups: Sequence[LearnedLookup] = ()) -> None:
        """Start the lookups of a new request."""
        self.sources = [lookup.begin() for lookup in lookups]
        self.maximum = sum(source.lookup.maximum for source in self.sources)  # tokens
        self._pending: list[int] = []
        self._found: list[list[Continuation]] | None = None  # None: the text is newer
        self.looked_s = 0.0  # seconds of lookups since the caller reset it

    def add(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens."""
        self._pending += token_ids
        self._found = None

    def flush(self) -> None:
        """Pass pending tokens to the lookups."""
        if self._pending:
            for source in self.sources:
                source.lookup.extend(self._pending)
            self._pending = []

    def look(self) -> list[list[Continuation]]:
        """The continuations of each lookup."""
        if self._found is None:
            begin = time.perf_counter()
            self.flush()
            self._found = [source.lookup.continuations() for source in self.sources]
            self.looked_s += time.perf_counter() - begin
        return self._found

    def chances(self) -> list[Iterator[float]]:
        """`LookupSource.chances` of each lookup that has a continuation."""
        pairs = zip(self.sources, self.look(), strict=True)
        return [source.chances(found) for source, found in pairs if found]

    def merge(self, pool: CandidatePool, levels: int) -> list[int]:
        """Merge all lookups into the pool; returns its size after each."""
        sizes: list[int] = []
        for source, continuations in zip(self.sources, self.look(), strict=True):
            source.merge(pool, levels, continuations)
            sizes.append(pool.count)
        return sizes

    def end(self) -> None:
        """The request has finished; thread-safe."""
        for source in self.sources:
            source.lookup.end(self._pending)
        self._pending = []
