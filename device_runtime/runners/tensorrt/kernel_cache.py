"""The KV cache of edgellm's TensorRT kernels, passed as a table of addresses.

TensorRT gets only the table: it never copies the cache, and the plan is independent of capacity
and dtype. `kernels/triton/cache.py` defines the table.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.errors import BrokenArtifactError
from edgellm.core.model_spec import KVCacheSpec
from edgellm.device_runtime.kernels.triton.catalog import keep_rows
from edgellm.device_runtime.runners.tensorrt.cuda.kv_compaction import displaced
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import CompiledEngine, Device, Planes
from edgellm.device_runtime.runners.tensorrt.device_kv_cache import DeviceCache
from edgellm.device_runtime.runners.tensorrt.packed_buffers import (
    Block,
    Layout,
    Tensors,
    aligned,
    packed_bytes,
)

MAGIC = 0x656467656C6C6D  # as in the kernels
_HEADER, _PARTS = 2, 4  # entries of the header, and of each layer
_MAX_MOVED = 1024  # positions in one compaction
_CODES = {"float16": "fp16", "int8_rows": "int8", "fp8_rows": "fp8"}
KV_DTYPES = {codes: dtype for dtype, codes in _CODES.items()}  # dtypes in manifests by quantization


def table_entries(num_layers: int) -> int:
    """Number of entries of the table for `num_layers`."""
    return _HEADER + _PARTS * num_layers


class KernelCache:
    """See `SlotMemory`: keys and values with their scales, and the table of their addresses."""

    def __init__(
        self,
        *,
        device: Device,
        spec: KVCacheSpec,
        capacity: int,
        engine: CompiledEngine,
        num_sequences: int = 1,
    ) -> None:
        """Allocate.

        Args:
            device: that computes.
            spec: of the cache.
            capacity: positions of a sequence; sequences are consecutive.
            engine: that takes the table.
            num_sequences: sequences in the cache.

        Raises:
            BrokenArtifactError: the engine's table is for another cache.
            LimitError: the device has too little memory.
        """
        entries = table_entries(spec.num_layers)
        found = engine.tensors[graph_io.CACHE_TABLE].shape
        if spec.dtype not in _CODES or found != (entries,):
            raise BrokenArtifactError(
                f"the engine's table of caches has {found[0]} entries, one of {spec.num_layers} "
                f"layers in {spec.dtype} has {entries if spec.dtype in _CODES else 'none'}",
                hint="build the engine again",
            )
        self._spec, self._device, self.capacity = spec, device, capacity
        codes = _CODES[spec.dtype]
        self._dtype = np.dtype(np.float16 if codes == "fp16" else np.int8)
        self._keep = keep_rows(spec.head_dim, codes)
        count, rows = 2 * spec.num_layers * spec.num_kv_heads, num_sequences * capacity
        sizes = {"codes": spec.head_dim * self._dtype.itemsize, "scales": 2 * (codes != "fp16")}
        layout = {name: ((count, rows, size), np.uint8) for name, size in sizes.items() if size}
        self._tensors = Tensors(device, layout)
        self._planes = [
            Planes(address=self._tensors[name], count=count, rows=rows, row_bytes=sizes[name])
            for name in layout
        ]
        self._block = Block(device, aligned(8 * entries))
        self.addresses = {graph_io.CACHE_TABLE: self._write_table(rows, entries)}
        # One block for each sequence of a pass, so that compactions do not wait
        moved = packed_bytes(_moved(_MAX_MOVED))
        self._moved = [Block(device, moved) for _ in range(num_sequences)]
        self._num_moving = 0

    def _write_table(self, rows: int, entries: int) -> int:
        packed = self._block.pack({"table": ((entries,), np.int64)})
        table = packed.arrays["table"]
        table[:_HEADER] = rows, rows ^ MAGIC
        layers = table[_HEADER:].reshape(self._spec.num_layers, -1, 2)  # scales after values
        layers[...] = 0
        for part, planes in enumerate(self._planes):
            part_bytes = self._spec.num_kv_heads * planes.rows * planes.row_bytes
            places = planes.address + part_bytes * np.arange(2 * self._spec.num_layers)
            layers[:, part] = places.reshape(-1, 2)
        self._block.upload(packed)
        self._device.synchronize()
        return packed.addresses["table"]

    def append(self, count: int, write_index_address: int) -> None:
        """Does nothing: the engine's kernels append."""
        del count, write_index_address

    def first_position(self, slot: int) -> int:
        """The first position of a slot in the cache."""
        return slot * self.capacity

    def compact(self, slot: int, length: int, rows: NDArray[np.int64]) -> None:
        """See `SlotMemory`; asynchronous, up to one call for each sequence."""
        if not displaced(rows.tolist()):
            return
        if self._num_moving == len(self._moved):
            self._device.synchronize()  # the former indices are still in use
            self._num_moving = 0
        block = self._moved[self._num_moving]
        packed = block.pack(_moved(len(rows)))
        packed.arrays["path"][:] = rows
        packed.arrays["outcome"][:] = len(rows), 0, 0
        packed.arrays["first"][:] = self.first_position(slot) + length
        block.upload(packed)
        at = packed.addresses
        grid = self._spec.num_layers, self._spec.num_kv_heads, 2
        given = at["path"], at["outcome"], at["first"], self.addresses[graph_io.CACHE_TABLE]
        self._device.launch(self._keep, grid, (*given, self._spec.head_dim))
        self._num_moving += 1

    def on_synchronized(self) -> None:
        """Called after a synchronization of the device."""
        self._num_moving = 0

    def copy(self, source: int, target: int, length: int) -> None:
        """See `SlotMemory`; asynchronous."""
        begin, end = self.first_position(source), self.first_position(target)
        for planes in self._planes:
            self._device.copy_rows(planes, begin, end, length)

    def read(self, slot: int, length: int) -> NDArray:
        """See `SlotMemory`; the two bytes of a scale follow its quantized values."""
        first = self.first_position(slot)
        spec = self._spec
        shape = 2 * spec.num_layers, 1, spec.num_kv_heads, length, -1
        parts = [
            self._device.save_rows(planes, length, first).view(self._dtype).reshape(shape)
            for planes in self._planes
        ]
        return np.concatenate(parts, axis=-1)

    def write(self, slot: int, values: NDArray) -> None:
        """See `SlotMemory`."""
        first, count, end = self.first_position(slot), self._planes[0].count, 0
        for planes in self._planes:
            begin, end = end, end + planes.row_bytes // self._dtype.itemsize
            part = np.ascontiguousarray(values[..., begin:end], self._dtype)
            self._device.load_rows(planes, part.reshape(count, -1).view(np.uint8), first)


def _moved(count: int) -> Layout:
    """The inputs of `keep_rows`."""
    return {"path": ((count,), np.int32), "outcome": ((3,), np.int32), "first": ((1,), np.int64)}


DeviceCaches = DeviceCache | KernelCache


def open_cache(
    engine: CompiledEngine,
    device: Device,
    spec: KVCacheSpec,
    capacity: int,
    max_rows: int,
    num_sequences: int = 1,
) -> DeviceCaches:
    """Allocate the cache of an engine.

    Args:
        engine: takes a table of addresses, or cache tensors.
        device: that computes.
        spec: of the cache.
        capacity: minimum positions of a sequence.
        max_rows: maximum tokens of a pass.
        num_sequences: maximum batch size; above 1 the engine takes a table.

    Raises:
        BrokenArtifactError: the engine takes another cache.
        LimitError: the device has too little memory.
        EdgeLLMError: the head size is unsupported.
    """
    if graph_io.CACHE_TABLE in engine.tensors:
        return KernelCache(
            device=device, spec=spec, capacity=capacity, engine=engine, num_sequences=num_sequences
        )
    past, present = (
        engine.tensors[name].shape
        for name in (graph_io.past_name(0, "key"), graph_io.present_name(0, "key"))
    )
    return DeviceCache(
        device=device, spec=spec, capacity=past[2], max_new_rows=max_rows if present != past else 0
    )
