"""Several sequences, each in a slot of its own of the cache, and their passes as rectangles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgellm import contract
from edgellm.contract import LimitError
from edgellm.device_runtime.runners import Cache, Outputs
from edgellm.device_runtime.runners.onnxruntime_cuda.cache import DeviceCache
from edgellm.device_runtime.runners.onnxruntime_cuda.grids import (
    MOST_JOINED,
    Inputs,
    arrange,
    batch_of,
    rows_of,
    shares,
)
from edgellm.device_runtime.runners.onnxruntime_cuda.loading import Loader
from edgellm.device_runtime.runners.onnxruntime_cuda.runner import CudaRunner
from edgellm.specs import DecoderSpec


class _Slots:
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


class BatchCache:
    """See `runners.Cache`: the rows of one sequence, which has a slot when it has rows."""

    def __init__(self, memory: DeviceCache, slots: _Slots) -> None:
        self._memory, self._slots = memory, slots
        self.slot: int | None = None

    def own(self) -> int:
        """A slot that no other has; raises `LimitError`."""
        before = self.slot
        if before is None or self._slots.uses[before] > 1:
            self.slot = self._slots.take()
            if before is not None:
                self._memory.copy(before, self.slot)
                self._slots.ends[self.slot] = self._slots.ends[before]
                self._slots.give_back(before)
        assert self.slot is not None
        return self.slot

    def reserve(self, end: int) -> None:
        """A slot of its own for `end` rows; raises `LimitError`."""
        self._slots.ends[self.own()] = end

    def share(self) -> BatchCache:
        """Another with the same rows."""
        new = BatchCache(self._memory, self._slots)
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


class BatchRunner(CudaRunner):
    """See `runners.SharedRunner`: a page is a slot, of all rows that a sequence may have."""

    def __init__(
        self,
        loader: Loader,
        mover: ort.InferenceSession,
        spec: DecoderSpec,
        capacity: int,
        num_sequences: int,
    ) -> None:
        """See `CudaRunner`; behind a sequence's rows there is room for padding."""
        super().__init__(loader, mover, spec, capacity + MOST_JOINED, num_sequences)
        self.num_sequences, self.page_rows, self.pass_rows = num_sequences, capacity, 0
        self._slots = _Slots(num_sequences)
        self._own = self.cache = self.new_cache()

    def prepare(self, tree_rows: int) -> None:
        """See `CudaRunner`; of trees side by side those are recorded that come."""
        super().prepare(tree_rows)
        most = self.num_sequences
        for batch in sorted({batch_of(count, most) for count in range(2, most + 1)}):
            self._rehearse(1, batch)

    @property
    def free_rows(self) -> int:
        """See `runners.SharedRunner`."""
        return self._slots.uses.count(0) * self.page_rows

    def free_rows_without(self, caches: Sequence[Cache]) -> int:
        """See `runners.SharedRunner`."""
        held = [one.slot for one in map(_batch_cache, caches) if one.slot is not None]
        freed = sum(self._slots.uses[slot] == held.count(slot) for slot in {*held})
        return self.free_rows + freed * self.page_rows

    def new_cache(self) -> BatchCache:
        """See `runners.SharedRunner`."""
        return BatchCache(self._memory, self._slots)

    def reserve(self, cache: Cache, write_index: int, rows: int) -> None:
        """See `runners.SharedRunner`."""
        _batch_cache(cache).reserve(write_index + rows)

    def least_rows(self, cache: Cache) -> int:
        """See `runners.SharedRunner`: windows keep all."""
        del cache
        return 0

    def write_rows(self, cache: Cache, rows: NDArray[Any], least_rows: int) -> None:
        """See `runners.SharedRunner`."""
        del least_rows
        cache.write_rows(rows)

    def fork(self, cache: Cache) -> BatchCache:
        """See `runners.SharedRunner`; rows are copied on the device."""
        return _batch_cache(cache).share()

    def release(self, cache: Cache) -> None:
        """See `runners.SharedRunner`."""
        _batch_cache(cache).release()

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> Outputs:
        """See `runners.Runner`: of the sequence whose rows are in `cache`."""
        self.reserve(self._own, int(inputs[contract.WRITE_INDEX][0]), rows_of(inputs))
        return self.run_many([(self._own, inputs)])[0]

    def run_many(self, parts: Sequence[tuple[Cache, Mapping[str, NDArray[Any]]]]) -> list[Outputs]:
        """See `runners.SharedRunner`; where rows differ much they are several passes."""
        self._expire()
        slots = [_batch_cache(cache).own() for cache, _ in parts]
        asked = {slot: inputs for slot, (_, inputs) in zip(slots, parts, strict=True)}
        found: dict[int, Outputs] = {}
        for some in self._alike(asked):
            for grid in arrange(some, self._slots.ends, self.num_sequences):
                found |= shares(self._run(grid), grid)
        return [found[slot] for slot in slots]

    def _alike(self, parts: dict[int, Inputs]) -> list[dict[int, Inputs]]:
        """Those that may share a pass.

        Where there are two graphs rows of a base are computed by the one that computes them alone,
        so that their bits depend on company as little as may be.
        """
        if len(self._graphs) == 1 or contract.DRAFT_HIDDEN in next(iter(parts.values())):
            return [parts]
        found: dict[object, dict[int, Inputs]] = {}
        for slot, part in parts.items():
            is_lone = contract.TREE_MASK not in part and rows_of(part) > 1
            kind = str(slot) if is_lone else contract.TREE_MASK in part
            found.setdefault(kind, {})[slot] = part
        return list(found.values())


def _batch_cache(cache: Cache) -> BatchCache:
    assert isinstance(cache, BatchCache)
    return cache
