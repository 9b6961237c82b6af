"""Several sequences, each in a slot of its own of the cache, and their passes as rectangles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnxruntime as ort
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.model_spec import DecoderSpec
from edgellm.device_runtime.runners import Cache, Outputs
from edgellm.device_runtime.runners.batch_costs import SharedCosts
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
from edgellm.device_runtime.runners.slot_kv_cache import SharesSlots, slot_cache


class BatchRunner(CudaRunner, SharesSlots):
    """See `runners.SharedRunner`: a page is a slot, of all rows that a sequence may have."""

    def __init__(
        self,
        loader: Loader,
        mover: ort.InferenceSession,
        spec: DecoderSpec,
        capacity: int,
        num_sequences: int,
        adapters: int = 0,
    ) -> None:
        """See `CudaRunner`; behind a sequence's rows there is room for padding."""
        rows = capacity + MAX_JOINED
        CudaRunner.__init__(self, loader, mover, spec, rows, num_sequences, adapters)
        SharesSlots.__init__(self, self._memory, num_sequences, capacity)
        self._own = self.cache = self.new_cache()
        self._cost: Cost = assumed_cost

    def prepare(self, tree_rows: int) -> None:
        """See `CudaRunner`; of trees side by side those are recorded that come."""
        super().prepare(tree_rows)
        maximum = self.num_sequences
        for batch in sorted({batch_of(count, maximum) for count in range(2, maximum + 1)}):
            self._rehearse(1, batch)

    @property
    def shared_rows(self) -> tuple[int, int]:
        """See `runners.ArrangesPasses`."""
        return MAX_JOINED, self.num_sequences * MAX_JOINED

    def learn_costs(self, costs: SharedCosts) -> None:
        """See `runners.ArrangesPasses`."""
        self._cost = costs.of

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> Outputs:
        """See `runners.Runner`: of the sequence whose rows are in `cache`."""
        self.reserve(self._own, int(inputs[graph_io.WRITE_INDEX][0]), rows_of(inputs))
        return self.run_many([(self._own, inputs)])[0]

    def run_many(self, parts: Sequence[tuple[Cache, Mapping[str, NDArray[Any]]]]) -> list[Outputs]:
        """See `runners.SharedRunner`; where rows differ much they are several passes."""
        self._expire()
        slots = [slot_cache(cache).own() for cache, _ in parts]
        asked = {slot: inputs for slot, (_, inputs) in zip(slots, parts, strict=True)}
        found: dict[int, Outputs] = {}
        for some in self._alike(asked):
            for grid in arrange(some, self.slots.ends, self.num_sequences, self._cost):
                found |= shares(self._run(grid), grid)
        return [found[slot] for slot in slots]

    def _alike(self, parts: dict[int, Inputs]) -> list[dict[int, Inputs]]:
        """Those that may share a pass.

        Where there are two graphs rows of a base are computed by the one that computes them alone,
        so that their bits depend on company as little as may be.
        """
        if len(self._forms[0]) == 1 or graph_io.DRAFT_HIDDEN in next(iter(parts.values())):
            return [parts]
        found: dict[object, dict[int, Inputs]] = {}
        for slot, part in parts.items():
            is_lone = graph_io.TREE_MASK not in part and rows_of(part) > 1
            kind = str(slot) if is_lone else graph_io.TREE_MASK in part
            found.setdefault(kind, {})[slot] = part
        return list(found.values())
