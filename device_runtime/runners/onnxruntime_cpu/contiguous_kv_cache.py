"""The contiguous KV cache of one sequence in host memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.model_spec import KVCacheSpec
from edgellm.device_runtime.runners.onnxruntime_import import ort


class ContiguousKVCache:
    """See `SlotMemory`; has one slot.

    Keys and values of all layers are one array [2 * layers, 1, num_kv_heads, C, head_dim].
    """

    def __init__(self, spec: KVCacheSpec, capacity: int) -> None:
        layers = [(layer, part) for layer in range(spec.num_layers) for part in ("key", "value")]
        shape = (len(layers), 1, spec.num_kv_heads, capacity, spec.head_dim)
        # ONNX Runtime does not keep the array alive.
        self._rows = np.zeros(shape, spec.dtype)
        self._values = [ort.OrtValue.ortvalue_from_numpy(rows) for rows in self._rows]
        self._layers = layers

    def bind(self, binding: ort.IOBinding) -> None:
        """Bind the cache as inputs, and the same memory as outputs."""
        for (layer, part), value in zip(self._layers, self._values, strict=True):
            binding.bind_ortvalue_input(graph_io.past_name(layer, part), value)
            binding.bind_ortvalue_output(graph_io.present_name(layer, part), value)

    def copy(self, source: int, target: int, length: int) -> None:
        """There is no other slot."""
        raise NotImplementedError

    def compact(self, slot: int, length: int, rows: NDArray[np.int64]) -> None:
        """See `SlotMemory`."""
        del slot
        if rows[-1] + 1 > len(rows):  # otherwise they are in place already
            # The right side is a copy, so overlapping positions are safe.
            self._rows[..., length : length + len(rows), :] = self._rows[..., length + rows, :]

    def read(self, slot: int, length: int) -> NDArray[Any]:
        """See `SlotMemory`."""
        del slot
        return self._rows[..., :length, :].copy()

    def write(self, slot: int, values: NDArray[Any]) -> None:
        """See `SlotMemory`."""
        del slot
        self._rows[..., : values.shape[-2], :] = values
