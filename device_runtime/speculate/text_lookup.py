"""What text alone foresees, and how such guesses enter a tree."""

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
    """Tokens that may follow, and how sure one is of each, given those before it."""

    token_ids: Sequence[int]
    confidences: Sequence[float]


class Lookup(Protocol):
    """Foresees from the words of one request, and those that were said before."""

    maximum: int  # tokens of all continuations together

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens."""
        ...

    def continuations(self) -> list[Continuation]:
        """What may follow the text."""
        ...

    def end(self, token_ids: Sequence[int]) -> None:
        """The request is over, and ended with further tokens; from any thread."""
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

    def chances(self, continuations: Sequence[Continuation]) -> Iterator[float]:
        """That the base accepts the likeliest continuation up to its first token, its second..."""
        chance = 1.0
        for found in continuations[:1]:
            for confidence in found.confidences:
                chance *= math.exp(self.calibration.log_rate(confidence))
                yield chance

    def merge(
        self, pool: CandidatePool, levels: int, continuations: Sequence[Continuation]
    ) -> None:
        """Hang the lookup's continuations into the pool.

        Tokens that are there already stay, and are as likely as the surer of both says.
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
    """What the lookups of a request foresee; the text is told to them when they look."""

    def __init__(self, lookups: Sequence[LearnedLookup] = ()) -> None:
        """Of a request that begins."""
        self.sources = [lookup.begin() for lookup in lookups]
        self.maximum = sum(source.lookup.maximum for source in self.sources)  # tokens
        self._untold: list[int] = []
        self._found: list[list[Continuation]] | None = None  # until the text grows
        self.looked_s = 0.0  # spent with looking, since somebody set it to 0

    def add(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens."""
        self._untold += token_ids
        self._found = None

    def tell(self) -> None:
        """Let the lookups read what was committed."""
        if self._untold:
            for source in self.sources:
                source.lookup.extend(self._untold)
            self._untold = []

    def look(self) -> list[list[Continuation]]:
        """What each lookup foresees."""
        if self._found is None:
            begin = time.perf_counter()
            self.tell()
            self._found = [source.lookup.continuations() for source in self.sources]
            self.looked_s += time.perf_counter() - begin
        return self._found

    def chances(self) -> list[Iterator[float]]:
        """Of the likeliest continuation of each lookup that has any."""
        pairs = zip(self.sources, self.look(), strict=True)
        return [source.chances(found) for source, found in pairs if found]

    def merge(self, pool: CandidatePool, levels: int) -> list[int]:
        """Let all hang theirs into the pool; its sizes behind each."""
        sizes: list[int] = []
        for source, continuations in zip(self.sources, self.look(), strict=True):
            source.merge(pool, levels, continuations)
            sizes.append(pool.count)
        return sizes

    def end(self) -> None:
        """The request is over; from any thread."""
        for source in self.sources:
            source.lookup.end(self._untold)
        self._untold = []
