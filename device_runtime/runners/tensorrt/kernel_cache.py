"""A KV cache on the device that an engine's kernels know by address.

TensorRT sees a table of addresses alone: the cache is copied in no pass, its capacity and codes are
none of the plan's. `kernels/triton/cache.py` says what is in the table.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.errors import BrokenArtifactError
from edgellm.core.model_spec import KVCacheSpec
from edgellm.device_runtime.kernels.triton.catalog import keep_rows
from edgellm.device_runtime.runners.tensorrt.cache import DeviceCache
from edgellm.device_runtime.runners.tensorrt.cuda.kv_compaction import displaced
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import CompiledEngine, Device, Planes
from edgellm.device_runtime.runners.tensorrt.packed_buffers import (
    Block,
    Layout,
    Tensors,
    aligned,
    packed_bytes,
)

MAGIC = 0x656467656C6C6D  # the kernels' own
_HEADER, _PARTS = 2, 4  # entries before the layers', and of a layer
_MAX_MOVED = 1024  # rows at once
_CODES = {"float16": "fp16", "int8_rows": "int8", "fp8_rows": "fp8"}
KV_DTYPES = {codes: dtype for dtype, codes in _CODES.items()}  # of a manifest, by codes


def table_entries(num_layers: int) -> int:
    """Of the table of so many layers' caches."""
    return _HEADER + _PARTS * num_layers


class KernelCache:
    """Keys and values of all layers with their scales, and the table that says where they lie."""

    def __init__(
        self,
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
            capacity: rows of a sequence; those of the next stand behind them.
            engine: that takes the table.
            num_sequences: that the cache has room for.

        Raises:
            BrokenArtifactError: the engine's table is not of such a cache.
            LimitError: the device is too small.
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
        self._planes = [Planes(self._tensors[name], count, rows, sizes[name]) for name in layout]
        self._block = Block(device, aligned(8 * entries))
        self.addresses = {graph_io.CACHE_TABLE: self._write_table(rows, entries)}
        # Of one sequence each, so that those of a pass are compacted without a wait
        moved = packed_bytes(_moved(_MAX_MOVED))
        self._moved = [Block(device, moved) for _ in range(num_sequences)]
        self._num_moving = 0

    def _write_table(self, rows: int, entries: int) -> int:
        packed = self._block.pack({"table": ((entries,), np.int64)})
        table = packed.arrays["table"]
        table[:_HEADER] = rows, rows ^ MAGIC
        layers = table[_HEADER:].reshape(self._spec.num_layers, -1, 2)  # scales behind codes
        layers[...] = 0
        for part, planes in enumerate(self._planes):
            part_bytes = self._spec.num_kv_heads * planes.rows * planes.row_bytes
            places = planes.address + part_bytes * np.arange(2 * self._spec.num_layers)
            layers[:, part] = places.reshape(-1, 2)
        self._block.upload(packed)
        self._device.synchronize()
        return packed.addresses["table"]

    def append(self, count: int, write_index_address: int) -> None:
        """Nothing: the engine's kernels do so."""
        del count, write_index_address

    def compact(self, length: int, rows: NDArray[np.int64]) -> None:
        """See `runners.Cache`; does not wait, but for more than sequences share a pass."""
        if not displaced(rows.tolist()):
            return
        if self._num_moving == len(self._moved):
            self._device.synchronize()  # the rows before are still read
            self._num_moving = 0
        block = self._moved[self._num_moving]
        packed = block.pack(_moved(len(rows)))
        packed.arrays["path"][:] = rows
        packed.arrays["outcome"][:], packed.arrays["first"][:] = (len(rows), 0, 0), length
        block.upload(packed)
        at = packed.addresses
        grid = self._spec.num_layers, self._spec.num_kv_heads, 2
        given = at["path"], at["outcome"], at["first"], self.addresses[graph_io.CACHE_TABLE]
        self._device.launch(self._keep, grid, (*given, self._spec.head_dim))
        self._num_moving += 1

    def settled(self) -> None:
        """Somebody waited for the device."""
        self._num_moving = 0

    def copy(self, source: int, target: int, count: int) -> None:
        """Ask for rows from `target` on to become those from `source` on."""
        for planes in self._planes:
            self._device.copy_rows(planes, source, target, count)

    def read_rows(self, length: int, first: int = 0) -> NDArray:
        """See `runners.Cache`; the two bytes of a row's scale stand behind its codes."""
        spec = self._spec
        shape = 2 * spec.num_layers, 1, spec.num_kv_heads, length, -1
        parts = [
            self._device.save_rows(planes, length, first).view(self._dtype).reshape(shape)
            for planes in self._planes
        ]
        return np.concatenate(parts, axis=-1)

    def write_rows(self, rows: NDArray, first: int = 0) -> None:
        """See `runners.Cache`; from `first` on."""
        count, end = self._planes[0].count, 0
        for planes in self._planes:
            begin, end = end, end + planes.row_bytes // self._dtype.itemsize
            part = np.ascontiguousarray(rows[..., begin:end], self._dtype)
            self._device.load_rows(planes, part.reshape(count, -1).view(np.uint8), first)


def _moved(count: int) -> Layout:
    """What `keep_rows` reads."""
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
    """The cache of an engine.

    Args:
        engine: takes a table of addresses, or the cache's tensors.
        device: that computes.
        spec: of the cache.
        capacity: rows that were asked for; it has these, or some more.
        max_rows: of a pass.
        num_sequences: that share passes; above 1 the engine takes a table.

    Raises:
        BrokenArtifactError: the engine takes another cache.
        LimitError: the device is too small.
        EdgeLLMError: heads of this size are not moved.
    """
    if graph_io.CACHE_TABLE in engine.tensors:
        return KernelCache(device, spec, capacity, engine, num_sequences)
    past, present = (
        engine.tensors[name].shape
        for name in (graph_io.past_name(0, "key"), graph_io.present_name(0, "key"))
    )
    return DeviceCache(device, spec, past[2], max_rows if present != past else 0)
