"""Runners of graphs for CUDA; all tensors stay on the device named in the config.

The host computes attention masks and cache slots. Recurring passes are padded to a few sizes and
recorded as CUDA graphs, if the device supports them. Padding follows the tokens: it is masked, and
the next pass overwrites it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.model_spec import DecoderSpec
from edgellm.device_runtime.runners.onnxruntime_cuda.attention_inputs import (
    HOST_INPUTS,
    LAST_ROW,
    LIVE_ROWS,
    ROW_NUMBERS,
    SLOTS,
    VISIBLE,
    VISIBLE_IN_WINDOW,
    fill_visible,
    slot_indices,
)
from edgellm.device_runtime.runners.onnxruntime_cuda.bound_pass import BoundPass
from edgellm.device_runtime.runners.onnxruntime_cuda.device_kv_cache import DeviceCache
from edgellm.device_runtime.runners.onnxruntime_cuda.loading import Loader
from edgellm.device_runtime.runners.onnxruntime_cuda.lora import DeviceAdapters
from edgellm.device_runtime.runners.onnxruntime_cuda.padded_batch import Grid, flat_index, lone
from edgellm.device_runtime.runners.onnxruntime_cuda.size_buckets import Sizes, bucket_sizes
from edgellm.device_runtime.runners.onnxruntime_graphs import (
    KEPT_ROWS,
    Held,
    dtype_of,
    input_types,
    run_arrays,
)
from edgellm.device_runtime.runners.onnxruntime_import import ort
from edgellm.device_runtime.runners.outputs import FetchedOutputs, Outputs
from edgellm.device_runtime.runners.runner import Inputs, Runner
from edgellm.device_runtime.runners.slot_kv_cache import SlotPool

_log = logging.getLogger(__name__)
_PLACES = (graph_io.WRITE_INDEX, graph_io.TREE_MASK)  # converted to masks and slots
_SHOWN = 200  # maximum characters of an error
_NOT_ROWS = (graph_io.LOGITS_INDEX, graph_io.TOP_K)
_NO_ROWS = np.zeros(0, np.int64)
_MAX_RECORDED = 256  # recorded passes; each takes device memory


class PlainRunner(Runner):
    """Runs a graph without a KV cache."""

    def __init__(self, graph: ort.InferenceSession) -> None:
        self._graph = graph

    def hold(self, inputs: Inputs) -> None:
        """See `Runner`; has no inputs to hold."""

    def run(self, inputs: Inputs) -> Outputs:
        """See `Runner`."""
        return run_arrays(self._graph, inputs)


class CudaRunner(Runner):
    """Runs a graph with a KV cache, and maybe a second one for causal passes.

    Engines with LoRA have each graph a second time, for passes with adapters.
    """

    def __init__(
        self,
        *,
        loader: Loader,
        mover: ort.InferenceSession | None,
        spec: DecoderSpec,
        capacity: int,
        num_sequences: int = 1,
        adapters: int = 0,
    ) -> None:
        """Load, and allocate the cache.

        Args:
            loader: loads the graphs.
            mover: compacts the cache; None if it is never compacted.
            spec: of the network.
            capacity: positions of a sequence in the cache.
            num_sequences: sequences in the cache.
            adapters: adapter slots.

        Raises:
            BrokenArtifactError: ONNX Runtime rejects a graph.
            LimitError: the device has too little memory.
        """
        self._loader, self._window = loader, spec.sliding_window
        self._captures = loader.can_capture
        self._graphs = loader.sessions(captures=self._captures)
        self._types = [input_types(graph) for graph in self._graphs]
        indices = range(len(self._graphs))
        masks = ([name.startswith(graph_io.ADAPTER_MASK) for name in each] for each in self._types)
        adapted = [at for at, each in enumerate(masks) if any(each)]
        self._adapters: DeviceAdapters | None = None
        if adapted:
            self._adapters = DeviceAdapters(self._graphs[adapted[0]], adapters, loader.device)
        plain = [at for at in indices if at not in adapted]
        # Graphs by whether a pass has adapters, then by whether it is causal
        self._forms = plain or adapted, adapted
        self._memory = DeviceCache(
            spec=spec.kv,
            capacity=capacity,
            device=loader.device,
            mover=mover,
            num_sequences=num_sequences,
        )
        self.kv_pool = SlotPool(self._memory, num_sequences, capacity)
        self._heads, self._capacity = spec.kv.num_kv_heads, capacity
        self._axes, self._first_image = spec.position_axes, spec.vocab_size
        # Held images change address and size: passes without images bind a row of zeros
        self._held, self._no_images = Held(loader.device), Held(loader.device)
        none = _no_image_rows(self._graphs[0])
        self._no_images.replace(none)
        self._takes_images = bool(none)
        self._kept: dict[tuple[object, ...], BoundPass] = {}
        self._width = self._num_recorded = 0
        self._latest: list[FetchedOutputs] = []

    def hold(self, inputs: Inputs) -> None:
        """See `Runner`."""
        types = self._types[0]
        self._held.replace(
            {
                name: np.asarray(array, types[name])
                for name, array in inputs.items()
                if name in types
            }
        )

    def hold_adapters(self, weights: NDArray[np.float32], table: NDArray[np.int64]) -> None:
        """See `Runner`."""
        assert self._adapters is not None
        self._adapters.hold(weights, table)

    def prepare(self, tree_rows: int) -> None:
        """Record passes of one token and of trees up to `tree_rows`, for all context lengths."""
        for rows in (1, *(size for size in bucket_sizes(tree_rows) if size > 1)):
            self._rehearse(rows)

    def _rehearse(self, rows: int, batch: int = 1) -> None:
        if not self._captures:
            return
        for end in Sizes(1, 1).widths(self._capacity):
            begin = max(end - rows - 1, 0)
            positions = np.arange(begin, begin + rows)
            inputs = {
                graph_io.INPUT_IDS: np.zeros((1, rows), np.int64),
                graph_io.POSITION_IDS: np.broadcast_to(positions, (self._axes, rows)),
                graph_io.WRITE_INDEX: np.array([begin]),
                graph_io.LOGITS_INDEX: np.arange(rows),
            }
            if rows > 1:
                inputs[graph_io.TREE_MASK] = np.tri(rows, dtype=np.bool_)
            for _ in range(2):  # the first run finds the sizes of outputs
                self._run(Grid(0, (inputs,) * batch, (begin,) * batch))
                self._expire()

    def run(self, inputs: Inputs) -> Outputs:
        """See `Runner`."""
        self._expire()
        return self._run(lone(inputs))

    def _expire(self) -> None:
        while self._latest:
            self._latest.pop().expire()

    def _run(self, grid: Grid) -> FetchedOutputs:
        """Run one pass; outputs of earlier passes stay valid."""
        asked, batch = Sizes(grid.rows, grid.outputs), len(grid.parts)
        taken, drafts = asked, graph_io.DRAFT_HIDDEN in grid.some
        has_images = self._has_images(grid)
        if self._captures and not has_images:
            taken = asked.padded(batch, grid.end, self._capacity, drafts=drafts)
        bound = self._bind(grid, taken, has_images=has_images)
        self._fill(bound.inputs, grid)
        try:
            bound.run(self._held if has_images else self._no_images)
        except Exception as error:  # a failed recording; the pass itself may run
            if not bound.is_recording:
                raise
            self._stop_recording(error)
            return self._run(grid)
        found = FetchedOutputs(bound.outputs, lambda name: bound.fetch(name, asked))
        self._latest.append(found)
        return found

    def _has_images(self, grid: Grid) -> bool:
        return self._takes_images and any(
            part is not None and (part[graph_io.INPUT_IDS] >= self._first_image).any()
            for part in grid.parts
        )

    def _stop_recording(self, error: Exception) -> None:
        """Reload the sessions: one that failed to record cannot be used again."""
        line = str(error).splitlines()[0]
        found = re.search(r"CUDA failure [^;]+", line)
        reason = found[0].strip() if found is not None else line[:_SHOWN]
        _log.warning("passes cannot be recorded as CUDA graphs, which is slower: %s", reason)
        self._captures = False
        self._kept.clear()
        self._graphs = self._loader.sessions(captures=False)

    def _bind(self, grid: Grid, taken: Sizes, *, has_images: bool) -> BoundPass:
        """A pass of these sizes; without recordings, passes are cached until the width changes."""
        form, batch, adapters = self._form_of(grid), len(grid.parts), grid.adapters
        index = self._forms[any(adapters)][form]
        width = taken.width(grid.end + taken.rows, self._capacity)
        if width != self._width and not self._captures:
            self._width = width
            self._kept.clear()
        chosen = _chosen(grid)
        recurs = taken.recurs and self._captures
        # A prompt's first pass uses the attention kernel without a past
        is_first = form and batch == 1 and not grid.end and not recurs
        live = taken.rows if is_first else width
        sizes = {"rows": taken.rows, "outputs": taken.outputs, "width": width, "live": live}
        key = (index, grid.first, batch, has_images, *sizes.values(), *chosen.values())
        if (bound := self._kept.get(key)) is not None:
            return bound
        arrays = self._arrays(grid, sizes, self._types[index])
        arrays |= {name: np.array([maximum]) for name, maximum in chosen.items()}
        capture_id = -1 if self._captures else 0
        if recurs and self._num_recorded < _MAX_RECORDED:
            capture_id = self._num_recorded = self._num_recorded + 1

        def place(binding: ort.IOBinding) -> None:
            self._memory.bind(binding, grid.first, batch)
            if self._adapters is not None and index in self._forms[1]:
                self._adapters.bind(binding)

        bound = BoundPass(
            session=self._graphs[index],
            device=self._loader.device,
            place=place,
            inputs=arrays,
            capture_id=capture_id,
        )
        if taken.rows <= KEPT_ROWS:
            self._kept[key] = bound
        return bound

    def _form_of(self, grid: Grid) -> int:
        """1 for the causal graph: positions equal slots, and a batch has single tokens; else 0."""
        if len(self._forms[0]) == 1 or (len(grid.parts) > 1 and grid.rows > 1):
            return 0
        for part in grid.parts:
            if part is None or (self._axes > 1 and graph_io.TREE_MASK not in part):
                continue
            positions = part[graph_io.POSITION_IDS]
            slots = np.arange(positions.shape[1]) + part[graph_io.WRITE_INDEX][0]
            if graph_io.TREE_MASK in part or not np.array_equal(positions[0], slots):
                return 0
        return 1

    def _arrays(
        self, grid: Grid, sizes: Mapping[str, int], types: Mapping[str, type]
    ) -> dict[str, NDArray[Any]]:
        """The device inputs of a pass, with padded sizes."""
        batch, rows, width = len(grid.parts), sizes["rows"], sizes["width"]
        shapes = {
            name: (len(array) if batch == 1 else batch, rows, *array.shape[2:])
            for name, array in grid.some.items()
            if name not in (*_PLACES, *_NOT_ROWS)
        }
        if self._axes > 1:  # all sequences concatenated
            shapes[graph_io.POSITION_IDS] = self._axes, batch * rows
        shapes |= {graph_io.LOGITS_INDEX: (sizes["outputs"],), LAST_ROW: (batch,)}
        if self._adapters is not None:
            shapes |= {name: (batch, rows, size) for name, size in self._adapters.masks.items()}
        masks = dict.fromkeys((VISIBLE, VISIBLE_IN_WINDOW), (batch, 1, rows, width))
        arrays: dict[str, NDArray[Any]] = {
            name: np.zeros(shape, types[name])
            for name, shape in {**shapes, **masks}.items()
            if name in types
        }
        arrays |= {LIVE_ROWS: np.array(sizes["live"], np.int32)} if LIVE_ROWS in types else {}
        if SLOTS in types:
            arrays[SLOTS] = slot_indices(self._heads, rows, batch)
        if ROW_NUMBERS in types:
            arrays[ROW_NUMBERS] = np.arange(batch * rows).reshape(batch, rows)
        return arrays

    def _fill(self, bound: Mapping[str, NDArray[Any]], grid: Grid) -> None:
        """Write token ids, cache slots and attention masks."""
        rows = bound[graph_io.INPUT_IDS].shape[1]
        index = flat_index(grid, rows)
        bound[graph_io.LOGITS_INDEX][: len(index)] = index
        if self._adapters is not None and self._adapters.masks.keys() <= bound.keys():
            for name, mask in self._adapters.masks_of(np.array(grid.adapters)[:, None]).items():
                bound[name][...] = mask
        for place, (part, begin) in enumerate(zip(grid.parts, grid.ends, strict=True)):
            for name, array in (part or {}).items():
                if name in bound and name not in _NOT_ROWS:
                    own = self._own_rows(name, bound[name], place, rows)
                    own[:, : array.shape[1]] = array
                    own[:, array.shape[1] :] = array[:, -1:]
            if SLOTS in bound:
                bound[SLOTS][place, ..., 2] = np.arange(rows) + begin
            if LAST_ROW in bound:
                bound[LAST_ROW][place] = begin + rows - 1
            positions = _NO_ROWS if part is None else part[graph_io.POSITION_IDS][0]
            mask = None if part is None else part.get(graph_io.TREE_MASK)
            for name, window in ((VISIBLE, None), (VISIBLE_IN_WINDOW, self._window)):
                if name in bound:
                    fill_visible(bound[name][place, 0], begin, positions, mask, window)

    def _own_rows(self, name: str, array: NDArray[Any], place: int, rows: int) -> NDArray[Any]:
        """A sequence's part of an input, [1, rows, ...]; M-RoPE's positions [3, rows]."""
        if name == graph_io.POSITION_IDS and self._axes > 1:
            return array[:, place * rows : (place + 1) * rows]
        return array[place : place + 1]


def _no_image_rows(graph: ort.InferenceSession) -> dict[str, NDArray[Any]]:
    """A row of zeros for each input with image embeddings."""
    return {
        value.name: np.zeros(
            [dim if isinstance(dim, int) else 1 for dim in value.shape], dtype_of(value.type)
        )
        for value in graph.get_inputs()
        if value.name in (graph_io.IMAGE_EMBEDS, graph_io.DEEPSTACK_EMBEDS)
    }


def _chosen(grid: Grid) -> dict[str, int]:
    """Inputs in host memory, which a recording fixes."""
    parts = [part for part in grid.parts if part is not None]
    names = [name for name in HOST_INPUTS if name in parts[0]]
    return {name: max(int(part[name][0]) for part in parts) for name in names}
