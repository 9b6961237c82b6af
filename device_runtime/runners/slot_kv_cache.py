"""KV cache in slots: each sequence has one slot of full capacity, or none.

For runners whose memory is indexed by slot; a block of the `KVPool` is a slot.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm.core.errors import LimitError
from edgellm.device_runtime.runners.kv_cache import KVCache


class SlotMemory(Protocol):
    """A KV cache with several slots on a device."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot to another."""
        ...

    def compact(self, slot: int, length: int, rows: NDArray[np.int64]) -> None:
        """See `KVCache.compact`."""
        ...

    def read(self, slot: int, length: int) -> NDArray[Any]:
        """See `KVCache.read`."""
        ...

    def write(self, slot: int, values: NDArray[Any]) -> None:
        """See `KVCache.write`."""
        ...


class SlotPool:
    """See `KVPool`: allocates slots, with reference counts."""

    max_pass_tokens = 0  # sliding windows free nothing

    def __init__(self, memory: SlotMemory, num_slots: int, capacity: int) -> None:
        """Args: the memory, its slots, and positions of each."""
        self.memory, self.block_size = memory, capacity
        self.swaps_first = num_slots == 1
        self.uses = [0] * num_slots  # sequences that share the slot
        self.ends = [0] * num_slots  # positions that were written

    @property
    def num_free(self) -> int:
        """See `KVPool`."""
        return self.uses.count(0) * self.block_size

    def num_free_without(self, caches: Iterable[KVCache]) -> int:
        """See `KVPool`."""
        held = [one.slot for one in map(slot_cache, caches) if one.slot is not None]
        freed = sum(self.uses[slot] == held.count(slot) for slot in {*held})
        return self.num_free + freed * self.block_size

    def new_cache(self) -> SlotCache:
        """See `KVPool`."""
        return SlotCache(self)

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
    """See `KVCache`: it has a slot if it is not empty."""

    min_length = 0

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self.slot: int | None = None

    def own(self) -> int:
        """An exclusive slot, copied from a shared one if necessary; raises `LimitError`."""
        pool, before = self._pool, self.slot
        if before is None or pool.uses[before] > 1:
            self.slot = pool.allocate()
            if before is not None:
                pool.memory.copy(before, self.slot, pool.ends[before])
                pool.ends[self.slot] = pool.ends[before]
                pool.free(before)
        assert self.slot is not None
        return self.slot

    def allocate(self, length: int, count: int) -> None:
        """See `KVCache`."""
        self._pool.ends[self.own()] = length + count

    def compact(self, length: int, rows: NDArray[np.int64]) -> None:
        """See `KVCache`."""
        self._pool.memory.compact(self.own(), length, rows)

    def read(self, length: int) -> NDArray[Any]:
        """See `KVCache`."""
        assert self.slot is not None or not length
        return self._pool.memory.read(self.slot or 0, length)

    def write(self, values: NDArray[Any], min_length: int = 0) -> None:
        """See `KVCache`."""
        del min_length
        slot = self.own()
        self._pool.memory.write(slot, values)
        self._pool.ends[slot] = values.shape[-2]

    def fork(self) -> SlotCache:
        """See `KVCache`; the copy is made in the memory."""
        new = SlotCache(self._pool)
        new.slot = self.slot
        if self.slot is not None:
            self._pool.uses[self.slot] += 1
        return new

    def free(self) -> None:
        """See `KVCache`."""
        if self.slot is not None:
            self._pool.free(self.slot)
            self.slot = None


def slot_cache(cache: KVCache) -> SlotCache:
    """Cast a cache of a runner with slots."""
    assert isinstance(cache, SlotCache)
    return cache
