"""KV cache in slots: each sequence has one slot of full capacity, or none.

For runners whose device memory is indexed by slot; a block of `SharedRunner` is a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm.core.errors import LimitError
from edgellm.device_runtime.runners import Cache


class SlotMemory(Protocol):
    """A KV cache with several slots on a device."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot to another."""
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
    """Allocator of slots, with reference counts."""

    def __init__(self, count: int) -> None:
        self.uses = [0] * count  # sequences that share the slot
        self.ends = [0] * count  # positions that were written

    def allocate(self) -> int:
        """Allocate the lowest free slot, so passes cover few slots; raises `LimitError`."""
        slot = next((at for at, uses in enumerate(self.uses) if not uses), None)
        if slot is None:
            raise LimitError(
                f"no slot of the KV cache is free, of {len(self.uses)}",
                hint="send fewer requests at a time, or build with a larger --maxBatchSize",
            )
        self.uses[slot], self.ends[slot] = 1, 0
        return slot

    def free(self, slot: int) -> None:
        """Remove one sequence from the slot."""
        self.uses[slot] -= 1
        if not self.uses[slot]:
            self.ends[slot] = 0


class SlotCache:
    """See `runners.Cache`: the cache of one sequence; it has a slot if it is not empty."""

    def __init__(self, memory: SlotMemory, slots: Slots) -> None:
        self._memory, self._slots = memory, slots
        self.slot: int | None = None

    def own(self) -> int:
        """An exclusive slot, copied from a shared one if necessary; raises `LimitError`."""
        before = self.slot
        if before is None or self._slots.uses[before] > 1:
            self.slot = self._slots.allocate()
            if before is not None:
                self._memory.copy(before, self.slot, self._slots.ends[before])
                self._slots.ends[self.slot] = self._slots.ends[before]
                self._slots.free(before)
        assert self.slot is not None
        return self.slot

    def reserve(self, end: int) -> None:
        """Allocate an exclusive slot for `end` positions; raises `LimitError`."""
        self._slots.ends[self.own()] = end

    def share(self) -> SlotCache:
        """A copy-on-write copy."""
        new = SlotCache(self._memory, self._slots)
        new.slot = self.slot
        if self.slot is not None:
            self._slots.uses[self.slot] += 1
        return new

    def release(self) -> None:
        """Free the slot."""
        if self.slot is not None:
            self._slots.free(self.slot)
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
    """The cache methods of a `SharedRunner` with slots."""

    pass_rows = 0

    def __init__(self, memory: SlotMemory, num_sequences: int, capacity: int) -> None:
        """Args: the device memory, the number of slots, and positions of each."""
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
        """See `runners.SharedRunner`: sliding windows free nothing."""
        del cache
        return 0

    def write_rows(self, cache: Cache, rows: NDArray[Any], least_rows: int) -> None:
        """See `runners.SharedRunner`."""
        del least_rows
        cache.write_rows(rows)

    def fork(self, cache: Cache) -> SlotCache:
        """See `runners.SharedRunner`; the copy is made on the device."""
        return slot_cache(cache).share()

    def release(self, cache: Cache) -> None:
        """See `runners.SharedRunner`."""
        slot_cache(cache).release()


def slot_cache(cache: Cache) -> SlotCache:
    """Cast a cache of a runner with slots."""
    assert isinstance(cache, SlotCache)
    return cache
