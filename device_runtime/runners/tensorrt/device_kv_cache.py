"""The KV cache on the device, for engines with cache tensors."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.errors import EdgeLLMError
from edgellm.core.model_spec import KVCacheSpec
from edgellm.device_runtime.runners.tensorrt.cuda.kv_compaction import WORD_BYTES, displaced
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import (
    ALIGNMENT,
    Device,
    NewRows,
    Planes,
)
from edgellm.device_runtime.runners.tensorrt.packed_buffers import Block, aligned

_MAX_MOVED = 1024  # positions in one compaction


class DeviceCache:
    """See `SlotMemory`; has one slot.

    Keys and values are contiguous, [2 * layers, 1, num_kv_heads, C, head_dim].
    """

    def __init__(
        self, *, device: Device, spec: KVCacheSpec, capacity: int, max_new_rows: int = 0
    ) -> None:
        """Allocate.

        Args:
            device: that computes.
            spec: of the cache.
            capacity: positions of a plane; planes of all heads must be a multiple of `ALIGNMENT`,
                see `aligned_capacity`.
            max_new_rows: maximum tokens of a pass, if the engine outputs new keys and values; 0:
                it updates the cache.

        Raises:
            LimitError: the device has too little memory.
            EdgeLLMError: the head size is unsupported.
        """
        dtype = np.dtype(spec.dtype)
        row_bytes = spec.head_dim * dtype.itemsize
        if row_bytes % WORD_BYTES:
            raise EdgeLLMError(
                f"heads of {row_bytes} bytes are not supported on a GPU",
                hint="--backend onnxruntime runs heads of this size",
            )
        self._spec, self._dtype, self._device = spec, dtype, device
        self.capacity = capacity
        planes, plane_bytes = 2 * spec.num_layers * spec.num_kv_heads, capacity * row_bytes
        self._buffer = device.allocate(planes * plane_bytes)
        self._planes = Planes(
            address=self._buffer.address, count=planes, rows=capacity, row_bytes=row_bytes
        )
        self._rows = Block(device, 4 * _MAX_MOVED)
        self._is_moving = False
        self.addresses: dict[str, int] = {}  # inputs and outputs have the same address
        parts = [(layer, part) for layer in range(spec.num_layers) for part in ("key", "value")]
        for at, (layer, part) in enumerate(parts):
            address = self._buffer.address + at * spec.num_kv_heads * plane_bytes
            self.addresses[graph_io.past_name(layer, part)] = address
            self.addresses[graph_io.present_name(layer, part)] = address
        self._stride = aligned(spec.num_kv_heads * max_new_rows * row_bytes)
        self._new_rows = device.allocate(len(parts) * self._stride) if max_new_rows else None
        if self._new_rows is not None:
            for at, (layer, part) in enumerate(parts):
                address = self._new_rows.address + at * self._stride
                self.addresses[graph_io.present_name(layer, part)] = address

    def append(self, count: int, write_index_address: int) -> None:
        """Enqueue the append of a pass's positions, if the engine does not update the cache.

        Args:
            count: tokens of the pass, padding included.
            write_index_address: of the pass's input, int64 on the device.
        """
        if self._new_rows is not None:
            rows = NewRows(
                address=self._new_rows.address,
                stride=self._stride,
                planes=self._spec.num_kv_heads,
                write_index_address=write_index_address,
            )
            self._device.append_rows(self._planes, rows, count)

    def copy(self, source: int, target: int, length: int) -> None:
        """There is no other slot."""
        raise NotImplementedError

    def compact(self, slot: int, length: int, rows: NDArray[np.int64]) -> None:
        """See `SlotMemory`; asynchronous."""
        del slot
        if not displaced(rows.tolist()):
            return
        if self._is_moving:
            self._device.synchronize()  # the former indices are still in use
        packed = self._rows.pack({"rows": (rows.shape, np.int32)})
        packed.arrays["rows"][:] = rows
        self._rows.upload(packed)
        self._device.move_rows(self._planes, packed.addresses["rows"], len(rows), length)
        self._is_moving = True

    def on_synchronized(self) -> None:
        """Called after a synchronization of the device."""
        self._is_moving = False

    def read(self, slot: int, length: int) -> NDArray:
        """See `SlotMemory`."""
        del slot
        spec = self._spec
        rows = self._device.save_rows(self._planes, length).view(self._dtype)
        return rows.reshape(2 * spec.num_layers, 1, spec.num_kv_heads, length, spec.head_dim)

    def write(self, slot: int, values: NDArray) -> None:
        """See `SlotMemory`."""
        del slot
        flat = np.ascontiguousarray(values, self._dtype).reshape(self._planes.count, -1)
        self._device.load_rows(self._planes, flat.view(np.uint8))


def aligned_capacity(spec: KVCacheSpec, capacity: int) -> int:
    """The smallest capacity of at least `capacity` with aligned tensors."""
    row_bytes = spec.head_dim * np.dtype(spec.dtype).itemsize
    step = ALIGNMENT // math.gcd(ALIGNMENT, row_bytes)
    return -(-capacity // step) * step
