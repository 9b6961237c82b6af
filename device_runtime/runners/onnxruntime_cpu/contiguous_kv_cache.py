"""The contiguous KV cache of one sequence in host memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.model_spec import KVCacheSpec
from edgellm.device_runtime.runners.kv_cache import joined_rows, split_rows
from edgellm.device_runtime.runners.onnxruntime_import import ort


class ContiguousKVCache:
    """See `SlotMemory`; has one slot.

    Keys and values of each layer are [1, num_kv_heads, C, head_dim].
    """

    def __init__(self, spec: KVCacheSpec, capacity: int) -> None:
        layers = [(layer, part) for layer in range(spec.num_layers) for part in ("key", "value")]
        shapes = [spec.heads_of(layer) for layer, _ in layers]
        # ONNX Runtime does not keep the arrays alive.
        self._rows = [
            np.zeros((1, heads, capacity, head_dim), spec.dtype) for heads, head_dim in shapes
        ]
        self._is_mixed = bool(spec.heads)
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
            for each in self._rows:
                # The right side is a copy, so overlapping positions are safe.
                each[..., length : length + len(rows), :] = each[..., length + rows, :]

    def read(self, slot: int, length: int) -> NDArray[Any]:
        """See `SlotMemory`."""
        del slot
        found = [rows[..., :length, :] for rows in self._rows]
        return joined_rows([rows[0] for rows in found]) if self._is_mixed else np.stack(found)

    def write(self, slot: int, values: NDArray[Any]) -> None:
        """See `SlotMemory`."""
        del slot
        shapes = [rows.shape[1::2] for rows in self._rows]
        parts = split_rows(values, shapes) if self._is_mixed else [part[0] for part in values]
        for rows, part in zip(self._rows, parts, strict=True):
            rows[0, :, : values.shape[-2]] = part
