"""Passes over graphs for CUDA: everything lies on the device, which is named by data.

The host says what rows see and where they go. Passes that recur are padded to few sizes and
recorded as CUDA graphs, where the device records any: padding stands behind the rows, where the
next pass overwrites it, and no row sees it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgellm import contract
from edgellm.device_runtime.runners import FetchedOutputs
from edgellm.device_runtime.runners.onnxruntime_cuda.bound_pass import BoundPass
from edgellm.device_runtime.runners.onnxruntime_cuda.cache import DeviceCache
from edgellm.device_runtime.runners.onnxruntime_cuda.loading import Loader
from edgellm.device_runtime.runners.onnxruntime_cuda.sizes import Sizes, bucket_sizes, sizes_of
from edgellm.device_runtime.runners.onnxruntime_cuda.slots import (
    HOST_INPUTS,
    LAST_ROW,
    LIVE_ROWS,
    SLOTS,
    VISIBLE,
    VISIBLE_IN_WINDOW,
    fill_visible,
    slot_indices,
)
from edgellm.device_runtime.runners.onnxruntime_graphs import (
    KEPT_ROWS,
    Held,
    input_types,
    run_arrays,
)
from edgellm.specs import DecoderSpec

_log = logging.getLogger(__name__)
_PLACES = (contract.WRITE_INDEX, contract.TREE_MASK)  # which become masks and slots
_SHOWN = 200  # characters of an error
_NOT_ROWS = (contract.LOGITS_INDEX, contract.TOP_K)


class PlainRunner:
    """See `runners.Runner`: a graph without a cache."""

    cache = None

    def __init__(self, graph: ort.InferenceSession) -> None:
        self._graph = graph

    def hold(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        """See `runners.Runner`; nothing is held."""

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """See `runners.Runner`."""
        return run_arrays(self._graph, inputs)


class CudaRunner:
    """See `runners.Runner`: a graph with a cache, or two, one of them for passes without masks."""

    def __init__(
        self,
        loader: Loader,
        mover: ort.InferenceSession | None,
        spec: DecoderSpec,
        capacity: int,
        window: int | None = None,
    ) -> None:
        """Load, and allocate the cache.

        Args:
            loader: of the graphs.
            mover: compacts the cache; None where nobody does.
            spec: of the network.
            capacity: rows of the cache.
            window: of positions that a row sees in layers that have one.

        Raises:
            BrokenArtifactError: ONNX Runtime refuses a graph.
            LimitError: the device is too small.
        """
        self._loader, self._window = loader, window
        # What is held of images changes its place and size
        self._captures = loader.can_capture and spec.images is None
        self._graphs = loader.sessions(captures=self._captures)
        self._types = [input_types(graph) for graph in self._graphs]
        self.cache = DeviceCache(spec.kv, capacity, loader.device, mover)
        self._heads, self._capacity = spec.kv.num_kv_heads, capacity
        self._axes, self._held = spec.position_axes, Held(loader.device)
        self._kept: dict[tuple[object, ...], BoundPass] = {}
        self._width = 0
        self._latest: FetchedOutputs | None = None

    def hold(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        """See `runners.Runner`."""
        types = self._types[0]
        self._held.replace(
            {
                name: np.asarray(array, types[name])
                for name, array in inputs.items()
                if name in types
            }
        )

    def prepare(self, tree_rows: int) -> None:
        """Record single tokens, and trees of up to `tree_rows` rows, at all lengths of contexts."""
        for rows in (1, *(size for size in bucket_sizes(tree_rows) if size > 1)):
            for end in Sizes(1, 1).widths(self._capacity):
                if self._captures:
                    self._rehearse(rows, max(end - rows - 1, 0))

    def _rehearse(self, rows: int, begin: int) -> None:
        positions = np.arange(begin, begin + rows)
        inputs = {
            contract.INPUT_IDS: np.zeros((1, rows), np.int64),
            contract.POSITION_IDS: np.broadcast_to(positions, (self._axes, rows)),
            contract.WRITE_INDEX: np.array([begin]),
            contract.LOGITS_INDEX: np.arange(rows),
        }
        if rows > 1:
            inputs[contract.TREE_MASK] = np.tri(rows, dtype=np.bool_)
        for _ in range(2):  # the first run finds the sizes of outputs
            self.run(inputs)

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> FetchedOutputs:
        """See `runners.Runner`."""
        if self._latest is not None:
            self._latest.expire()
        asked = sizes_of(inputs)
        taken = asked.padded(inputs, self._capacity) if self._captures else asked
        bound = self._bind(inputs, taken)
        self._fill(bound.inputs, inputs, asked)
        try:
            bound.run(self._held)
        except Exception as error:  # whatever stops a recording, the pass itself may run
            if not bound.is_recording:
                raise
            self._stop_recording(error)
            return self.run(inputs)
        self._latest = FetchedOutputs(bound.outputs, lambda name: bound.fetch(name, asked))
        return self._latest

    def _stop_recording(self, error: Exception) -> None:
        """A session that failed to record is not to be used again."""
        line = str(error).splitlines()[0]
        found = re.search(r"CUDA failure [^;]+", line)
        reason = found[0].strip() if found is not None else line[:_SHOWN]
        _log.warning("passes cannot be recorded as CUDA graphs, which is slower: %s", reason)
        self._captures = False
        self._kept.clear()
        self._graphs = self._loader.sessions(captures=False)

    def _bind(self, inputs: Mapping[str, NDArray[Any]], taken: Sizes) -> BoundPass:
        """A pass of these sizes; without recording they are kept until the context grows."""
        index, begin = self._graph_of(inputs), int(inputs[contract.WRITE_INDEX][0])
        width = taken.width(begin + taken.rows, self._capacity)
        if width != self._width and not self._captures:
            self._width = width
            self._kept.clear()
        chosen = tuple(int(inputs[name][0]) for name in HOST_INPUTS if name in inputs)
        recurs = taken.recurs and self._captures
        # A prompt's first pass is one for the kernel where there are no rows before it
        live = taken.rows if index and not begin and not recurs else width
        key = (index, taken.rows, taken.outputs, live, *chosen)
        if (bound := self._kept.get(key)) is not None:
            return bound
        arrays = self._arrays(inputs, taken, width, live, self._types[index])
        capture_id = -1 if self._captures else 0
        if recurs:
            capture_id = len(self._kept) + 1
        bound = BoundPass(self._graphs[index], self._loader.device, self.cache, arrays, capture_id)
        if taken.rows <= KEPT_ROWS:
            self._kept[key] = bound
        return bound

    def _graph_of(self, inputs: Mapping[str, NDArray[Any]]) -> int:
        """The graph without masks counts slots as positions."""
        if len(self._graphs) == 1 or contract.TREE_MASK in inputs:
            return 0
        positions = inputs[contract.POSITION_IDS]
        slots = np.arange(positions.shape[1]) + inputs[contract.WRITE_INDEX][0]
        return int(self._axes > 1 or np.array_equal(positions[0], slots))

    def _arrays(
        self,
        inputs: Mapping[str, NDArray[Any]],
        taken: Sizes,
        width: int,
        live: int,
        types: Mapping[str, type],
    ) -> dict[str, NDArray[Any]]:
        """All inputs of a pass, of the sizes that are taken."""
        shapes = {
            name: (array.shape[0], taken.rows, *array.shape[2:])
            for name, array in inputs.items()
            if name not in (*_PLACES, *_NOT_ROWS)
        }
        shapes |= {contract.LOGITS_INDEX: (taken.outputs,), contract.TOP_K: (1,)}
        masks = dict.fromkeys((VISIBLE, VISIBLE_IN_WINDOW), (taken.rows, width))
        arrays = {
            name: np.zeros(shape, types[name])
            for name, shape in {**shapes, **masks, LAST_ROW: (1,)}.items()
            if name in types
        }
        arrays |= {LIVE_ROWS: np.array(live, np.int32)} if LIVE_ROWS in types else {}
        return arrays | ({SLOTS: slot_indices(self._heads, taken.rows)} if SLOTS in types else {})

    def _fill(
        self, bound: Mapping[str, NDArray[Any]], inputs: Mapping[str, NDArray[Any]], asked: Sizes
    ) -> None:
        """Say what the rows are, where they stand and what they see."""
        for name, array in inputs.items():
            if name not in bound:
                continue
            if name in _NOT_ROWS:
                bound[name][: len(array)] = array
            else:
                bound[name][:, : asked.rows] = array
                bound[name][:, asked.rows :] = array[:, -1:]
        begin = int(inputs[contract.WRITE_INDEX][0])
        rows = bound[contract.INPUT_IDS].shape[1]
        if SLOTS in bound:
            bound[SLOTS][..., 2] = np.arange(rows) + begin
        if LAST_ROW in bound:
            bound[LAST_ROW][0] = begin + rows - 1
        mask, positions = inputs.get(contract.TREE_MASK), inputs[contract.POSITION_IDS][0]
        for name, window in ((VISIBLE, None), (VISIBLE_IN_WINDOW, self._window)):
            if name in bound:
                fill_visible(bound[name], begin, positions, mask, window)
