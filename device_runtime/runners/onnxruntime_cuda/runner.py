"""Passes over graphs for CUDA: everything lies on the device, which is named by data.

The host says what rows see and where they go. Slots are looked at in steps of `STEP`, so that
bindings serve many passes; what stands behind the live rows is masked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgellm import contract
from edgellm.device_runtime.runners import FetchedOutputs
from edgellm.device_runtime.runners.onnxruntime_cuda.cache import Buffers, DeviceCache
from edgellm.device_runtime.runners.onnxruntime_cuda.slots import (
    HOST_INPUTS,
    SLOTS,
    VISIBLE,
    VISIBLE_IN_WINDOW,
    fill_visible,
    slot_indices,
)
from edgellm.device_runtime.runners.onnxruntime_graphs import (
    CPU,
    KEPT_ROWS,
    Held,
    input_types,
    run_arrays,
)
from edgellm.manifest import DecoderSpec

STEP = 64
_ON_DEVICE = (contract.LOGITS, contract.HIDDEN_TAPS)  # until somebody asks
_PLACES = (contract.WRITE_INDEX, contract.TREE_MASK)  # which become masks and SLOTS


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
    """See `runners.Runner`: a graph with a cache."""

    def __init__(
        self,
        graph: ort.InferenceSession,
        mover: ort.InferenceSession | None,
        spec: DecoderSpec,
        capacity: int,
        device: str,
        window: int | None = None,
    ) -> None:
        """Allocate the cache.

        Args:
            graph: computes on `device`.
            mover: compacts the cache; None where nobody does.
            spec: of the network.
            capacity: rows of the cache.
            device: where everything lies.
            window: of positions that a row sees in layers that have one.

        Raises:
            LimitError: the device is too small.
        """
        self.cache = DeviceCache(spec.kv, capacity, device, mover)
        self._graph, self._device, self._window = graph, device, window
        self._heads, self._capacity = spec.kv.num_kv_heads, capacity
        self._types, self._held = input_types(graph), Held(device)
        self._kept: dict[tuple[object, ...], _BoundPass] = {}
        self._width = 0
        self._latest: FetchedOutputs | None = None

    def hold(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        """See `runners.Runner`."""
        types = self._types
        self._held.replace(
            {
                name: np.asarray(array, types[name])
                for name, array in inputs.items()
                if name in types
            }
        )

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> FetchedOutputs:
        """See `runners.Runner`."""
        if self._latest is not None:
            self._latest.expire()
        bound = self._bind(inputs)
        for name, array in inputs.items():
            if name in bound.inputs:
                bound.inputs[name][...] = array
        self._place(bound.inputs, inputs)
        bound.run(self._held)
        self._latest = FetchedOutputs(bound.outputs, bound.fetch)
        return self._latest

    def _bind(self, inputs: Mapping[str, NDArray[Any]]) -> _BoundPass:
        """Passes of a number of steps are kept until it grows."""
        rows, write_index = inputs[contract.INPUT_IDS].shape[1], inputs[contract.WRITE_INDEX][0]
        width = min(-(-(write_index + rows) // STEP) * STEP, self._capacity)
        if width != self._width:
            self._width = width
            self._kept.clear()
        arrays = {name: array for name, array in inputs.items() if name not in _PLACES}
        chosen = (int(array[0]) for name, array in arrays.items() if name in HOST_INPUTS)
        key = (*(array.shape for array in arrays.values()), *chosen)
        if (bound := self._kept.get(key)) is not None:
            return bound
        masks = {name: np.zeros((rows, width), np.bool_) for name in (VISIBLE, VISIBLE_IN_WINDOW)}
        arrays |= {**masks, SLOTS: slot_indices(self._heads, rows)}
        taken = {
            name: np.array(array, self._types[name])
            for name, array in arrays.items()
            if name in self._types
        }
        bound = _BoundPass(self._graph, self._device, self.cache, taken)
        if rows <= KEPT_ROWS:
            self._kept[key] = bound
        return bound

    def _place(self, bound: Mapping[str, NDArray[Any]], inputs: Mapping[str, NDArray[Any]]) -> None:
        """Say where the rows stand and what they see."""
        write_index, positions = int(inputs[contract.WRITE_INDEX][0]), inputs[contract.POSITION_IDS]
        bound[SLOTS][..., 2] = np.arange(positions.shape[1]) + write_index
        mask = inputs.get(contract.TREE_MASK)
        for name, window in ((VISIBLE, None), (VISIBLE_IN_WINDOW, self._window)):
            if name in bound:
                fill_visible(bound[name], write_index, positions[0], mask, window)


class _BoundPass:
    """One graph bound for fixed sizes."""

    def __init__(
        self,
        session: ort.InferenceSession,
        device: str,
        cache: DeviceCache,
        inputs: Mapping[str, NDArray[Any]],
    ) -> None:
        self._session, self._version = session, 0
        self._binding = session.io_binding()
        self._buffers = Buffers(device, inputs, self._binding)
        self.inputs = inputs
        names = [value.name for value in session.get_outputs()]
        self.outputs = [name for name in names if not name.startswith(contract.PRESENT)]
        for name in self.outputs:
            self._binding.bind_output(name, device if name in _ON_DEVICE else CPU)
        cache.bind(self._binding)

    def run(self, held: Held) -> None:
        """Compute; outputs hold what came of it until the next run."""
        self._version = held.bind(self._binding, self._version)
        self._buffers.upload()
        self._session.run_with_iobinding(self._binding)
        self._binding.synchronize_outputs()

    def fetch(self, name: str) -> NDArray[Any]:
        """An output in the host's memory, floats as float32."""
        found = self._binding.get_outputs()[self.outputs.index(name)].numpy()
        return found.astype(np.float32) if found.dtype == np.float16 else found
