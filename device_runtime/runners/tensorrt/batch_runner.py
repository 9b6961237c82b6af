"""The batched runner for TensorRT: each sequence has a slot of the KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.model_spec import DecoderSpec
from edgellm.device_runtime.runners import Cache, Outputs
from edgellm.device_runtime.runners.batch_costs import SharedCosts
from edgellm.device_runtime.runners.slot_kv_cache import SharesSlots, slot_cache
from edgellm.device_runtime.runners.tensorrt.bound_pass import bucket_of, bucket_sizes
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import CompiledEngine, Device
from edgellm.device_runtime.runners.tensorrt.kernel_cache import KernelCache
from edgellm.device_runtime.runners.tensorrt.ragged_batch import (
    Inputs,
    groups,
    joined,
    rows_of,
    shares,
)
from edgellm.device_runtime.runners.tensorrt.runner import TensorRtRunner
from edgellm.device_runtime.runners.tensorrt.shapes import Sizes

_COMMITTED = 8  # approximate tokens of a draft that a sequence commits in a round


class _KernelSlots:
    """See `slot_kv_cache.SlotMemory`."""

    def __init__(self, memory: KernelCache) -> None:
        self._memory = memory

    def base(self, slot: int) -> int:
        """The slot's first position in the cache."""
        return slot * self._memory.capacity

    def copy(self, source: int, target: int, length: int) -> None:
        self._memory.copy(self.base(source), self.base(target), length)

    def compact(self, slot: int, length: int, rows: NDArray[np.int64]) -> None:
        self._memory.compact(self.base(slot) + length, rows)

    def read_rows(self, slot: int, length: int) -> NDArray[Any]:
        return self._memory.read_rows(length, self.base(slot))

    def write_rows(self, slot: int, rows: NDArray[Any]) -> None:
        self._memory.write_rows(rows, self.base(slot))


class BatchRunner(TensorRtRunner, SharesSlots):
    """See `runners.SharedRunner`: a block is a slot of full capacity."""

    def __init__(
        self,
        engine: CompiledEngine,
        device: Device,
        *,
        max_rows: int,
        tree_rows: int,
        spec: DecoderSpec | None,
        capacity: int,
        num_sequences: int,
        adapters: int = 0,
    ) -> None:
        """See `TensorRtRunner`; `tree_rows` is the total of all sequences."""
        TensorRtRunner.__init__(
            self,
            engine,
            device,
            max_rows=max_rows,
            tree_rows=tree_rows,
            spec=spec,
            capacity=capacity,
            num_sequences=num_sequences,
            adapters=adapters,
        )
        assert isinstance(self._rows_memory, KernelCache)
        self._kernel_slots, self._max_rows = _KernelSlots(self._rows_memory), max_rows
        _, (_, columns) = engine.shape_range(graph_io.TREE_MASK, engine.num_profiles - 1)
        self._column_buckets = bucket_sizes(columns)
        SharesSlots.__init__(self, self._kernel_slots, num_sequences, capacity)
        self._own = self.cache = self.new_cache()
        self._costs: SharedCosts | None = None

    def prepare(self) -> None:
        """See `TensorRtRunner`; records batches with one token of each sequence."""
        self._passes.prepare()
        if {graph_io.INPUT_IDS, graph_io.LOGITS} <= self._engine.tensors.keys():
            counts = {bucket_of(at + 1, self._buckets) for at in range(self.num_sequences)}
            for count in sorted(counts):
                self._rehearse((count, 1, count))

    @property
    def shared_rows(self) -> tuple[int, int]:
        """See `runners.ArrangesPasses`."""
        return self._column_buckets[-1], self._buckets[-1]

    def learn_costs(self, costs: SharedCosts) -> None:
        """See `runners.ArrangesPasses`."""
        self._costs = costs

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> Outputs:
        """See `runners.Runner`: runs the sequence of `cache`."""
        self.reserve(self._own, int(inputs[graph_io.WRITE_INDEX][0]), rows_of(inputs))
        return self.run_many([(self._own, inputs)])[0]

    def run_many(self, parts: Sequence[tuple[Cache, Inputs]]) -> list[Outputs]:
        """See `runners.SharedRunner`; a batch with too many tokens is several passes."""
        bases = [self.first_row(cache) for cache, _ in parts]
        asked, given = [inputs for _, inputs in parts], list[Outputs]()
        for some in groups(asked, self._max_rows, self._buckets[-1], self._costs):
            given = [{name: each[name].copy() for name in each} for each in given]
            found = TensorRtRunner.run(self, joined(asked[some], bases[some]))
            given += shares(found, asked[some])
        return given

    def ask_many(self, parts: Sequence[tuple[Cache, Inputs]]) -> list[tuple[Outputs, int | None]]:
        """See `device_runtime.runners.device_speculation.Asked`."""
        asked = [inputs for _, inputs in parts]
        if len(groups(asked, self._max_rows, self._buckets[-1])) > 1:
            found = self.run_many(parts)
            return [({name: each[name].copy() for name in each}, None) for each in found]
        bases = [self.first_row(cache) for cache, _ in parts]
        found = self._run(joined(asked, bases), fetches=False)
        return [(each, at) for at, each in enumerate(shares(found, asked))]

    def first_row(self, cache: Cache | None) -> int:
        """See `device_speculation.protocols.Network`."""
        return 0 if cache is None else self._kernel_slots.base(slot_cache(cache).own())

    def _recurs(self, sizes: Sizes) -> bool:
        """See `TensorRtRunner`; also for batches of sequences that commit tokens."""
        rows, _, _ = sizes
        is_draft = graph_io.DRAFT_HIDDEN in self._features
        return super()._recurs(sizes) or (is_draft and rows <= _COMMITTED * self.num_sequences)

    def _padded(self, sizes: Sizes, inputs: Inputs) -> Sizes | None:
        """See `TensorRtRunner`; padding belongs to no sequence and is not written."""
        del inputs
        rows, columns, outputs = sizes
        if max(rows, outputs) > self._buckets[-1]:
            return None
        wide = bucket_of(columns, self._column_buckets)
        return bucket_of(rows, self._buckets), wide, bucket_of(outputs, self._buckets)
