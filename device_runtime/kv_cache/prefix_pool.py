"""Answers that are over, whose rows stay in the caches for prompts that begin alike.

They keep their pages until others need them. Who goes first is a matter of cost: many rows that
nobody has asked for since many answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from edgellm.device_runtime.arrays import RowKey
from edgellm.device_runtime.kv_cache.prefix_cache import SequenceCache

MAX_FINISHED = 64  # each is compared with every prompt


@dataclass(slots=True, eq=False)
class Finished:
    """One of them."""

    keys: list[RowKey]  # of its rows, and of the token behind; perhaps of a prompt alone
    contexts: tuple[Any, ...]  # in the base's cache, and in the draft's
    used: int = 0  # the number of the answer that was the last to use it


@dataclass(slots=True)
class FinishedSequences:
    """See the module."""

    caches: Sequence[SequenceCache]
    maximum: int = MAX_FINISHED
    all: list[Finished] = field(default_factory=list)  # the one that was used last is the last
    _clock: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def add(self, one: Finished) -> None:
        """Keep the rows of one; those of which it holds all are given back."""
        for other in [other for other in self.all if self._serves(one, other)]:
            self.forget(other)
        if longer := next((other for other in self.all if self._serves(other, one)), None):
            self._close(one)
            self.use(longer)
            return
        one.used = next(self._clock)
        self.all.append(one)
        while len(self.all) > self.maximum:
            self.forget(self.all[0])

    def use(self, one: Finished) -> None:
        """A prompt begins with rows of it."""
        one.used = next(self._clock)
        self.all.remove(one)
        self.all.append(one)

    def take(self, one: Finished) -> tuple[Any, ...]:
        """Its rows are another answer's now."""
        self.all.remove(one)
        return one.contexts

    def forget_one(self) -> bool:
        """Give rows back, of the one that costs most; False: there is none."""
        if not self.all:
            return False
        now = next(self._clock)
        self.forget(max(self.all, key=lambda one: len(one.keys) * (now - one.used)))
        return True

    def forget(self, one: Finished) -> None:
        """Give its rows back."""
        self.all.remove(one)
        self._close(one)

    def _serves(self, one: Finished, other: Finished) -> bool:
        """Whether a prompt can go on from all rows of another behind those of one."""
        keys = other.keys[:-1]
        if not _begins(one.keys, keys):
            return False
        pairs = zip(self.caches, one.contexts, other.contexts, strict=True)
        return all(
            cache.held_by(mine, keys) >= cache.held_by(its, keys) for cache, mine, its in pairs
        )

    def _close(self, one: Finished) -> None:
        for cache, context in zip(self.caches, one.contexts, strict=True):
            cache.close(context)


def _begins(keys: list[RowKey], others: list[RowKey]) -> bool:
    return len(keys) >= len(others) and keys[: len(others)] == others
