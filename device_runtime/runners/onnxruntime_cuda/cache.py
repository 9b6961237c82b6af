"""A KV cache on a device, which is named by data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgellm import contract
from edgellm.contract import LimitError
from edgellm.device_runtime.runners.onnxruntime_cuda.slots import (
    HOST_INPUTS,
    KEPT,
    SLOTS,
    slot_indices,
)
from edgellm.device_runtime.runners.onnxruntime_graphs import CPU
from edgellm.manifest import KVCacheSpec


class Buffers:
    """Arrays of the host and their copies on a device, bound as inputs."""

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
        """What the arrays hold now, but for what they held before: a copy is a wait."""
        for name, array in self.arrays.items():
            if name not in self._sent or not np.array_equal(self._sent[name], array):
                self._values[name].update_inplace(array)
                self._sent[name] = array.copy()


def allocate(shape: Sequence[int], dtype: np.dtype, device: str) -> ort.OrtValue:
    """Memory on a device; raises `LimitError` if there is not so much."""
    try:
        return ort.OrtValue.ortvalue_from_shape_and_type(list(shape), dtype, device)
    except Exception as error:  # noqa: BLE001 - the classes are private to the extension module
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raise LimitError(
            f"the device has no room for {size / 1e6:.0f} MB: {str(error).splitlines()[0]}",
            hint="close other programs, or build with a smaller --maxKVCacheCapacity",
        ) from None


class DeviceCache:
    """Keys and values of all layers on a device, each [1, num_kv_heads, C, head_dim]."""

    def __init__(
        self,
        spec: KVCacheSpec,
        capacity: int,
        device: str,
        mover: ort.InferenceSession | None = None,
    ) -> None:
        """Allocate; `mover` is the graph `ROWS_GRAPH` of caches that are compacted.

        Raises:
            LimitError: the device is too small.
        """
        self._mover = mover
        self._heads, self._device = spec.num_kv_heads, device
        shape = (1, spec.num_kv_heads, capacity, spec.head_dim)
        names = [(layer, part) for layer in range(spec.num_layers) for part in ("key", "value")]
        zeros = np.zeros(shape, spec.dtype)
        self._values = {name: allocate(shape, zeros.dtype, device) for name in names}
        for value in self._values.values():
            value.update_inplace(zeros)  # masked rows must be numbers, too

    def bind(self, binding: ort.IOBinding) -> None:
        """As inputs, and in the same place as outputs."""
        for (layer, part), value in self._values.items():
            binding.bind_ortvalue_input(contract.past_name(layer, part), value)
            binding.bind_ortvalue_output(contract.present_name(layer, part), value)

    def compact(self, length: int, rows: NDArray[np.int64]) -> None:
        """See `runners.Cache`."""
        if rows[-1] + 1 == len(rows):
            return  # they stand where they belong
        assert self._mover is not None
        binding = self._mover.io_binding()
        slots = slot_indices(self._heads, len(rows))
        slots[..., 2] = length + np.arange(len(rows))
        buffers = Buffers(self._device, {KEPT: length + rows, SLOTS: slots}, binding)
        self.bind(binding)
        buffers.upload()
        self._mover.run_with_iobinding(binding)

    def read_rows(self, length: int) -> np.ndarray:
        """The whole cache passes to the host; it is asked for once a prompt at most."""
        return np.stack([value.numpy()[:, :, :length] for value in self._values.values()])

    def write_rows(self, rows: np.ndarray) -> None:
        """See `runners.Cache`."""
        for value, found in zip(self._values.values(), rows, strict=True):
            array = value.numpy()
            array[:, :, : found.shape[-2]] = found
            value.update_inplace(array)
