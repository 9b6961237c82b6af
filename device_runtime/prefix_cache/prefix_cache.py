"""Prefix cache: finished sequences whose KV blocks remain cached for prompts with equal prefixes.

They keep their blocks until others need them. Eviction is by cost: length times age, where age
counts sequences since the last use.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from edgellm.device_runtime.arrays import RowKey

MAX_FINISHED = 64  # each is compared with every prompt


@dataclass(slots=True, eq=False)
class CachedPrefix:
    """A finished sequence."""

    keys: list[RowKey]  # of its positions and the next token; perhaps of a prompt alone
    kvs: tuple[Any, ...]  # its `CachedSequence`s in the base and in the draft
    used: int = 0  # clock value of its last use


@dataclass(slots=True)
class PrefixCache:
    """All finished sequences of an engine."""

    maximum: int = MAX_FINISHED
    all: list[CachedPrefix] = field(default_factory=list)  # the most recently used is the last
    _clock: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def add(self, one: CachedPrefix) -> None:
        """Add a sequence; free those that it contains."""
        for other in [other for other in self.all if self._serves(one, other)]:
            self.free(other)
        if longer := next((other for other in self.all if self._serves(other, one)), None):
            self._close(one)
            self.use(longer)
            return
        one.used = next(self._clock)
        self.all.append(one)
        while len(self.all) > self.maximum:
            self.free(self.all[0])

    def use(self, one: CachedPrefix) -> None:
        """Record that a prompt reuses its prefix."""
        one.used = next(self._clock)
        self.all.remove(one)
        self.all.append(one)

    def take(self, one: CachedPrefix) -> tuple[Any, ...]:
        """Remove a sequence, and return its KV caches for another to continue."""
        self.all.remove(one)
        return one.kvs

    def evict(self) -> bool:
        """Free the sequence of highest cost; False if there is none."""
        if not self.all:
            return False
        now = next(self._clock)
        self.free(max(self.all, key=lambda one: len(one.keys) * (now - one.used)))
        return True

    def free(self, one: CachedPrefix) -> None:
        """Free a sequence."""
        self.all.remove(one)
        self._close(one)

    def _serves(self, one: CachedPrefix, other: CachedPrefix) -> bool:
        """Whether a prompt can continue from all positions of `other` in `one`."""
        keys = other.keys[:-1]
        if not _begins(one.keys, keys):
            return False
        pairs = zip(one.kvs, other.kvs, strict=True)
        return all(mine.num_cached(keys) >= its.num_cached(keys) for mine, its in pairs)

    def _close(self, one: CachedPrefix) -> None:
        for kv in one.kvs:
            kv.free()


def _begins(keys: list[RowKey], others: list[RowKey]) -> bool:
    return len(keys) >= len(others) and keys[: len(others)] == others
