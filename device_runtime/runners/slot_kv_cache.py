"""Slots of a KV cache: each of some sequences has all the rows that it may have, or none.

For runners whose memory knows its slots by number; a page of `SharedRunner` is a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm.core.errors import LimitError
from edgellm.device_runtime.runners import Cache


class SlotMemory(Protocol):
    """A cache of several slots on a device."""

    def copy(self, source: int, target: int, length: int) -> None:
        """The first rows of a slot into another."""
        ...

    def compact(self, slot: int, length: int, rows: NDArray[np.int64]) -> None:
        """See `runners.Cache`."""
        ...

    def read_rows(self, slot: int, length: int) -> NDArray[Any]:
        """See `runners.Cache`."""
        ...

    def write_rows(self, slot: int, rows: NDArray[Any]) -> None:
        """See `runners.Cache`."""
        ...


class Slots:
    """Which slots sequences have."""

    def __init__(self, count: int) -> None:
        self.uses = [0] * count  # sequences whose rows lie there
        self.ends = [0] * count  # rows that are there, and more never were

    def take(self) -> int:
        """The lowest that is free, so that passes need few; raises `LimitError`."""
        slot = next((at for at, uses in enumerate(self.uses) if not uses), None)
        if slot is None:
            raise LimitError(
                f"no slot of the KV cache is free, of {len(self.uses)}",
                hint="ask for less at a time, or build with a larger --maxBatchSize",
            )
        self.uses[slot], self.ends[slot] = 1, 0
        return slot

    def give_back(self, slot: int) -> None:
        """One sequence has its rows elsewhere."""
        self.uses[slot] -= 1
        if not self.uses[slot]:
            self.ends[slot] = 0


class SlotCache:
    """See `runners.Cache`: the rows of one sequence, which has a slot when it has rows."""

    def __init__(self, memory: SlotMemory, slots: Slots) -> None:
        self._memory, self._slots = memory, slots
        self.slot: int | None = None

    def own(self) -> int:
        """A slot that no other has; raises `LimitError`."""
        before = self.slot
        if before is None or self._slots.uses[before] > 1:
            self.slot = self._slots.take()
            if before is not None:
                self._memory.copy(before, self.slot, self._slots.ends[before])
                self._slots.ends[self.slot] = self._slots.ends[before]
                self._slots.give_back(before)
        assert self.slot is not None
        return self.slot

    def reserve(self, end: int) -> None:
        """A slot of its own for `end` rows; raises `LimitError`."""
        self._slots.ends[self.own()] = end

    def share(self) -> SlotCache:
        """Another with the same rows."""
        new = SlotCache(self._memory, self._slots)
        new.slot = self.slot
        if self.slot is not None:
            self._slots.uses[self.slot] += 1
        return new

    def release(self) -> None:
        """Give the slot back."""
        if self.slot is not None:
            self._slots.give_back(self.slot)
            self.slot = None

    def compact(self, length: int, rows: NDArray[np.int64]) -> None:
        """See `runners.Cache`."""
        self._memory.compact(self.own(), length, rows)

    def read_rows(self, length: int) -> NDArray[Any]:
        """See `runners.Cache`."""
        assert self.slot is not None
        return self._memory.read_rows(self.slot, length)

    def write_rows(self, rows: NDArray[Any]) -> None:
        """See `runners.Cache`."""
        slot = self.own()
        self._memory.write_rows(slot, rows)
        self._slots.ends[slot] = rows.shape[-2]


class SharesSlots:
    """What a `SharedRunner` says of rows."""

    pass_rows = 0

    def __init__(self, memory: SlotMemory, num_sequences: int, capacity: int) -> None:
        """Args: the cache, its slots, and the rows of each."""
        self.num_sequences, self.page_rows = num_sequences, capacity
        self._slot_memory, self.slots = memory, Slots(num_sequences)

    @property
    def free_rows(self) -> int:
        """See `runners.SharedRunner`."""
        return self.slots.uses.count(0) * self.page_rows

    def free_rows_without(self, caches: Sequence[Cache]) -> int:
        """See `runners.SharedRunner`."""
        held = [one.slot for one in map(slot_cache, caches) if one.slot is not None]
        freed = sum(self.slots.uses[slot] == held.count(slot) for slot in {*held})
        return self.free_rows + freed * self.page_rows

    def new_cache(self) -> SlotCache:
        """See `runners.SharedRunner`."""
        return SlotCache(self._slot_memory, self.slots)

    def reserve(self, cache: Cache, write_index: int, rows: int) -> None:
        """See `runners.SharedRunner`."""
        slot_cache(cache).reserve(write_index + rows)

    def least_rows(self, cache: Cache) -> int:
        """See `runners.SharedRunner`: windows keep all."""
        del cache
        return 0

    def write_rows(self, cache: Cache, rows: NDArray[Any], least_rows: int) -> None:
        """See `runners.SharedRunner`."""
        del least_rows
        cache.write_rows(rows)

    def fork(self, cache: Cache) -> SlotCache:
        """See `runners.SharedRunner`; rows are copied on the device."""
        return slot_cache(cache).share()

    def release(self, cache: Cache) -> None:
        """See `runners.SharedRunner`."""
        slot_cache(cache).release()


def slot_cache(cache: Cache) -> SlotCache:
    """A cache of such a runner."""
    assert isinstance(cache, SlotCache)
    return cache
