"""The KV cache on the device named in the config."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.errors import LimitError
from edgellm.core.model_spec import KVCacheSpec
from edgellm.device_runtime.runners.onnxruntime_cuda.attention_inputs import (
    HOST_INPUTS,
    KEPT,
    SLOTS,
    slot_indices,
)
from edgellm.device_runtime.runners.onnxruntime_graphs import CPU
from edgellm.device_runtime.runners.onnxruntime_import import ort

_FIRST = np.zeros(1, np.int64)


class Buffers:
    """Host arrays with copies on a device, bound as inputs."""

    def __init__(
        self, device: str, arrays: Mapping[str, np.ndarray], binding: ort.IOBinding
    ) -> None:
        self.arrays = arrays
        self._values = {
            name: allocate(array.shape, array.dtype, CPU if name in HOST_INPUTS else device)
            for name, array in arrays.items()
        }
        self._sent: dict[str, np.ndarray] = {}
        for name, value in self._values.items():
            binding.bind_ortvalue_input(name, value)

    def upload(self) -> None:
        """Upload arrays that have changed, since each copy synchronizes."""
        for name, array in self.arrays.items():
            if name not in self._sent or not np.array_equal(self._sent[name], array):
                self._values[name].update_inplace(array)
                self._sent[name] = array.copy()


def allocate(shape: Sequence[int], dtype: np.dtype, device: str) -> ort.OrtValue:
    """Allocate memory on a device; raises `LimitError` if there is too little."""
    try:
        return ort.OrtValue.ortvalue_from_shape_and_type(list(shape), dtype, device)
    except Exception as error:  # noqa: BLE001 - the classes are private to the extension module
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raise LimitError(
            f"the device has no room for {size / 1e6:.0f} MB: {str(error).splitlines()[0]}",
            hint="close other programs, or build with a smaller --maxKVCacheCapacity",
        ) from None


class DeviceCache:
    """See `SlotMemory`.

    Keys and values of all layers are on a device, each [N, num_kv_heads, C, head_dim]. Each of
    N sequences has a slot; a pass binds consecutive slots.
    """

    def __init__(
        self,
        *,
        spec: KVCacheSpec,
        capacity: int,
        device: str,
        mover: ort.InferenceSession | None = None,
        num_sequences: int = 1,
    ) -> None:
        """Allocate; `mover` is the graph `ROWS_GRAPH` for caches that are compacted or copied.

        Raises:
            LimitError: the device has too little memory.
        """
        self._mover, self._num_sequences = mover, num_sequences
        self._heads, self._device, self._dtype = spec.num_kv_heads, device, np.dtype(spec.dtype)
        self._slot_shape = spec.num_kv_heads, capacity, spec.head_dim
        names = [(layer, part) for layer in range(spec.num_layers) for part in ("key", "value")]
        zeros = np.zeros((num_sequences, *self._slot_shape), spec.dtype)
        self._values = {name: allocate(zeros.shape, zeros.dtype, device) for name in names}
        for value in self._values.values():
            value.update_inplace(zeros)  # masked positions must not be NaN

    def bind(self, binding: ort.IOBinding, first: int = 0, count: int = 1) -> None:
        """Bind slots as inputs, and the same memory as outputs."""
        self._bind_inputs(binding, first, count)
        self._bind_outputs(binding, first, count)

    def _bind_inputs(self, binding: ort.IOBinding, first: int, count: int = 1) -> None:
        for (layer, part), value in self._values.items():
            binding.bind_input(graph_io.past_name(layer, part), *self._slots(value, first, count))

    def _bind_outputs(self, binding: ort.IOBinding, first: int, count: int = 1) -> None:
        for (layer, part), value in self._values.items():
            place = self._slots(value, first, count)
            binding.bind_output(graph_io.present_name(layer, part), *place)

    def _slots(self, value: ort.OrtValue, first: int, count: int) -> tuple[Any, ...]:
        """The memory of slots, as arguments of a binding."""
        size = math.prod(self._slot_shape) * self._dtype.itemsize
        shape = [count, *self._slot_shape]
        return self._device, 0, self._dtype.type, shape, value.data_ptr() + first * size

    def compact(self, slot: int, length: int, rows: NDArray[np.int64]) -> None:
        """See `SlotMemory`."""
        if rows[-1] + 1 == len(rows):
            return  # in place already
        binding = self._movement(length + rows, length + np.arange(len(rows)))
        self.bind(binding, slot)
        self._move(binding)

    def copy(self, source: int, target: int, length: int) -> None:
        """See `SlotMemory`; the whole slot is copied."""
        del length
        binding = self._movement()
        self._bind_inputs(binding, source)
        self._bind_outputs(binding, target)
        self._move(binding)

    def read(self, slot: int, length: int) -> np.ndarray:
        """See `SlotMemory`; copies the whole slot, at most once a prompt."""
        if self._num_sequences == 1:  # nothing is copied on the device
            return np.stack([value.numpy()[:, :, :length] for value in self._values.values()])
        binding = self._movement()
        self._bind_inputs(binding, slot)
        for layer, part in self._values:
            binding.bind_output(graph_io.present_name(layer, part), CPU)
        self._move(binding)
        return np.stack([value.numpy()[:, :, :length] for value in binding.get_outputs()])

    def write(self, slot: int, values: np.ndarray) -> None:
        """See `SlotMemory`."""
        if self._num_sequences == 1:
            for value, found in zip(self._values.values(), values, strict=True):
                array = value.numpy()
                array[:, :, : found.shape[-2]] = found
                value.update_inplace(array)
            return
        binding = self._movement()
        given = np.zeros((len(values), 1, *self._slot_shape), self._dtype)
        given[..., : values.shape[-2], :] = values
        for (layer, part), array in zip(self._values, given, strict=True):
            binding.bind_cpu_input(graph_io.past_name(layer, part), array)
        self._bind_outputs(binding, slot)
        self._move(binding)

    def _movement(
        self, kept: NDArray[np.int64] = _FIRST, places: NDArray[np.int64] = _FIRST
    ) -> ort.IOBinding:
        """A binding that moves positions of a slot; by default the first one to itself."""
        assert self._mover is not None
        binding = self._mover.io_binding()
        slots = slot_indices(self._heads, len(places))
        slots[..., 2] = places
        self._moved = Buffers(self._device, {KEPT: kept, SLOTS: slots}, binding)
        self._moved.upload()
        return binding

    def _move(self, binding: ort.IOBinding) -> None:
        assert self._mover is not None
        self._mover.run_with_iobinding(binding)
        binding.synchronize_outputs()
