"""The batched runner for TensorRT: each sequence has a slot of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.core import graph_io
from edgellm.core.model_spec import DecoderSpec
from edgellm.device_runtime.runners.batch_costs import SharedCosts
from edgellm.device_runtime.runners.kv_cache import KVCache
from edgellm.device_runtime.runners.outputs import Outputs
from edgellm.device_runtime.runners.runner import Inputs
from edgellm.device_runtime.runners.slot_kv_cache import slot_cache
from edgellm.device_runtime.runners.tensorrt.bound_pass import bucket_of, bucket_sizes
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import CompiledEngine, Device
from edgellm.device_runtime.runners.tensorrt.kernel_cache import KernelCache
from edgellm.device_runtime.runners.tensorrt.ragged_batch import groups, joined, shares
from edgellm.device_runtime.runners.tensorrt.runner import TensorRtRunner
from edgellm.device_runtime.runners.tensorrt.shapes import Sizes

_COMMITTED = 8  # approximate tokens of a draft that a sequence commits in a round


class BatchRunner(TensorRtRunner):
    """Runs batches; a block of the KV cache is a slot of full capacity."""

    def __init__(
        self,
        *,
        engine: CompiledEngine,
        device: Device,
        max_rows: int,
        tree_rows: int,
        spec: DecoderSpec | None,
        capacity: int,
        num_sequences: int,
        adapters: int = 0,
    ) -> None:
        """See `TensorRtRunner`; `tree_rows` is the total of all sequences."""
        super().__init__(
            engine=engine,
            device=device,
            max_rows=max_rows,
            tree_rows=tree_rows,
            spec=spec,
            capacity=capacity,
            num_sequences=num_sequences,
            adapters=adapters,
        )
        assert isinstance(self._rows_memory, KernelCache)
        self._cache, self._max_rows = self._rows_memory, max_rows
        _, (_, columns) = engine.shape_range(graph_io.TREE_MASK, engine.num_profiles - 1)
        self._column_buckets = bucket_sizes(columns)
        self.max_batch_size = num_sequences
        # Masks of images may be wider than trees
        self.batch_limits = min(self._column_buckets[-1], self._buckets[-1]), self._buckets[-1]
        self._costs: SharedCosts | None = None

    def prepare(self) -> None:
        """See `TensorRtRunner`; records batches with one token of each sequence."""
        self._passes.prepare()
        if {graph_io.INPUT_IDS, graph_io.LOGITS} <= self._engine.tensors.keys():
            counts = {bucket_of(at + 1, self._buckets) for at in range(self.max_batch_size)}
            for count in sorted(counts):
                self._rehearse((count, 1, count))

    def learn_costs(self, costs: SharedCosts) -> None:
        """See `Runner`."""
        self._costs = costs

    def run_batch(self, parts: Sequence[tuple[KVCache, Inputs]]) -> list[Outputs]:
        """See `Runner`; a batch with too many tokens is several passes."""
        bases = [self.first_row(cache) for cache, _ in parts]
        asked, given = [inputs for _, inputs in parts], list[Outputs]()
        for some in groups(asked, self._max_rows, self._buckets[-1], self._costs):
            given = [{name: each[name].copy() for name in each} for each in given]
            found = TensorRtRunner.run(self, joined(asked[some], bases[some]))
            given += shares(found, asked[some])
        return given

    def run_async(
        self, parts: Sequence[tuple[KVCache, Inputs]]
    ) -> list[tuple[Outputs, int | None]]:
        """See `Runner`."""
        asked = [inputs for _, inputs in parts]
        if len(groups(asked, self._max_rows, self._buckets[-1])) > 1:
            found = self.run_batch(parts)
            return [({name: each[name].copy() for name in each}, None) for each in found]
        bases = [self.first_row(cache) for cache, _ in parts]
        found = self._run(joined(asked, bases), fetches=False)
        return [(each, at) for at, each in enumerate(shares(found, asked))]

    def first_row(self, cache: KVCache | None) -> int:
        """See `device_speculation.protocols.Network`."""
        return 0 if cache is None else self._cache.first_position(slot_cache(cache).own())

    def _recurs(self, sizes: Sizes) -> bool:
        """See `TensorRtRunner`; also for batches of sequences that commit tokens."""
        rows, _, _ = sizes
        is_draft = graph_io.DRAFT_HIDDEN in self._features
        return super()._recurs(sizes) or (is_draft and rows <= _COMMITTED * self.max_batch_size)

    def _padded(self, sizes: Sizes, inputs: Inputs) -> Sizes | None:
        """See `TensorRtRunner`; padding belongs to no sequence and is not written."""
        del inputs
        rows, columns, outputs = sizes
        if max(rows, outputs) > self._buckets[-1]:
            return None
        wide = bucket_of(columns, self._column_buckets)
        return bucket_of(rows, self._buckets), wide, bucket_of(outputs, self._buckets)
