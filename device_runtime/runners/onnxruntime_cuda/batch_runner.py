"""The batched runner for CUDA: one cache slot for each sequence, and padded batches."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.core import graph_io
from edgellm.core.model_spec import DecoderSpec
from edgellm.device_runtime.runners.batch_costs import SharedCosts
from edgellm.device_runtime.runners.kv_cache import KVCache
from edgellm.device_runtime.runners.onnxruntime_cuda.loading import Loader
from edgellm.device_runtime.runners.onnxruntime_cuda.padded_batch import (
    MAX_JOINED,
    Cost,
    Inputs,
    arrange,
    assumed_cost,
    batch_of,
    rows_of,
    shares,
)
from edgellm.device_runtime.runners.onnxruntime_cuda.runner import CudaRunner
from edgellm.device_runtime.runners.onnxruntime_import import ort
from edgellm.device_runtime.runners.outputs import Outputs
from edgellm.device_runtime.runners.slot_kv_cache import SlotPool, slot_cache


class BatchRunner(CudaRunner):
    """Runs batches; a block of the KV cache is a slot of full capacity."""

    def __init__(
        self,
        *,
        loader: Loader,
        mover: ort.InferenceSession,
        spec: DecoderSpec,
        capacity: int,
        num_sequences: int,
        adapters: int = 0,
    ) -> None:
        """See `CudaRunner`; each slot has extra positions for padding."""
        super().__init__(
            loader=loader,
            mover=mover,
            spec=spec,
            capacity=capacity + MAX_JOINED,
            num_sequences=num_sequences,
            adapters=adapters,
        )
        self.max_batch_size = num_sequences
        self.kv_pool = self._slots = SlotPool(self._memory, num_sequences, capacity)
        self.batch_limits = MAX_JOINED, num_sequences * MAX_JOINED
        self._cost: Cost = assumed_cost

    def prepare(self, tree_rows: int) -> None:
        """See `CudaRunner`; batches of trees are recorded at first use."""
        super().prepare(tree_rows)
        maximum = self.max_batch_size
        for batch in sorted({batch_of(count, maximum) for count in range(2, maximum + 1)}):
            self._rehearse(1, batch)

    def learn_costs(self, costs: SharedCosts) -> None:
        """See `Runner`."""
        self._cost = costs.of

    def run_batch(self, parts: Sequence[tuple[KVCache, Inputs]]) -> list[Outputs]:
        """See `Runner`; sequences of very different sizes run in several passes."""
        self._expire()
        slots = [slot_cache(cache).own() for cache, _ in parts]
        asked = {slot: inputs for slot, (_, inputs) in zip(slots, parts, strict=True)}
        found: dict[int, Outputs] = {}
        for some in self._alike(asked):
            for grid in arrange(some, self._slots.ends, self.max_batch_size, self._cost):
                found |= shares(self._run(grid), grid)
        return [found[slot] for slot in slots]

    def _alike(self, parts: dict[int, Inputs]) -> list[dict[int, Inputs]]:
        """Groups of sequences that may share a pass.

        With two graphs, a base's sequence uses the same graph in a batch and alone. So its bits
        depend on the batch as little as possible.
        """
        if len(self._forms[0]) == 1 or graph_io.DRAFT_HIDDEN in next(iter(parts.values())):
            return [parts]
        found: dict[object, dict[int, Inputs]] = {}
        for slot, part in parts.items():
            is_lone = graph_io.TREE_MASK not in part and rows_of(part) > 1
            kind = str(slot) if is_lone else graph_io.TREE_MASK in part
            found.setdefault(kind, {})[slot] = part
        return list(found.values())
