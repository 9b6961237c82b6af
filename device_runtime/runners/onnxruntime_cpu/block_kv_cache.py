"""KV cache in blocks: sequences allocate blocks from shared pools, with copy-on-write."""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.errors import LimitError
from edgellm.core.model_spec import (
    INT4,
    SPARE_ROWS,
    KVCacheSpec,
    cache_bytes,
    pool_pages,
    table_pages,
)
from edgellm.core.resources import physical_memory_bytes
from edgellm.device_runtime.runners.kv_cache import KVCache, joined_rows, split_rows
from edgellm.device_runtime.runners.onnxruntime_import import ort

_NOWHERE = -1  # in block tables, for no block


class BlockPool:
    """See `KVPool`: the blocks of a network's KV cache, with one pool for each window size."""

    swaps_first = False

    def __init__(self, kv: KVCacheSpec, capacity: int, num_sequences: int = 1) -> None:
        """Allocate blocks for `num_sequences` of `capacity` positions.

        Raises:
            LimitError: all blocks together exceed this machine's memory.
        """
        assert kv.pages is not None
        _require_memory(cache_bytes(kv, capacity, num_sequences))
        self.block_size, self._capacity = kv.pages.rows, capacity * num_sequences
        layers: dict[int, list[int]] = {}
        for layer, window in enumerate(kv.pages.windows):
            layers.setdefault(window, []).append(layer)
        self._pools = [
            _Pool(kv=kv, window=window, layers=own, capacity=capacity, tables=num_sequences)
            for window, own in layers.items()
        ]
        self._kv, self.max_pass_tokens = kv, kv.pages.pass_rows

    def new_cache(self) -> BlockKVCache:
        """See `KVPool`; it has no blocks yet."""
        return BlockKVCache([_Table(pool) for pool in self._pools], self._kv)

    @property
    def num_free(self) -> int:
        """Positions in free blocks; pools bounded by windows have blocks for all sequences."""
        whole = [pool.num_free for pool in self._pools if not pool.is_bounded]
        return min(whole, default=self._capacity)

    def num_fitting(self, lengths: Iterable[int]) -> int:
        """Number of whole new sequences, the first of these lengths, that have free blocks."""
        free = min(pool.num_free for pool in self._pools) // self.block_size
        ends = accumulate(-(-length // self.block_size) for length in lengths)
        return sum(end <= free for end in ends)

    def num_free_without(self, caches: Iterable[KVCache]) -> int:
        """See `KVPool`."""
        own = [block_kv_cache(cache) for cache in caches]
        whole = [
            pool.num_free_without(block for cache in own for block in cache.blocks_in(at))
            for at, pool in enumerate(self._pools)
            if not pool.is_bounded
        ]
        return min(whole, default=self._capacity)

    def bind(self, binding: ort.IOBinding) -> None:
        """Bind all blocks as inputs, and the same memory as outputs."""
        for pool in self._pools:
            pool.bind(binding)


def _require_memory(size: int) -> None:
    """As builds do: the system would end the process when a long prompt fills the blocks."""
    memory = physical_memory_bytes()
    if size > memory:
        raise LimitError(
            f"a full KV cache takes {_gb(size)} of memory, this machine has {_gb(memory)}: "
            f"{_gb(size - memory)} are missing",
            hint="build the engine here, with a smaller --maxKVCacheCapacity or --maxBatchSize; "
            "edgellm rm MODEL and edgellm run MODEL make a stored one anew",
        )


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


def _untouched(shape: tuple[int, ...], dtype: np.dtype[Any], *, is_shared: bool) -> NDArray[Any]:
    """Zeros that take no memory until they are written.

    In numpy arrays the system clears a huge page of 2 MB in every layer when a sequence writes to
    a new block: 0.4 s for SmolLM2, while other sequences decode. With a single sequence this
    happens once, and huge pages make reads 4 % faster.
    """
    size = math.prod(shape) * dtype.itemsize
    try:
        if not is_shared or not hasattr(mmap, "MADV_NOHUGEPAGE"):
            return np.zeros(shape, dtype)
        memory = mmap.mmap(-1, size)
    except (MemoryError, OSError, ValueError):  # ValueError: beyond what an array can have
        raise LimitError(
            f"the KV cache takes {size / 1e9:.1f} GB, more than this machine has",
            hint="build the engine with a smaller --maxKVCacheCapacity or --maxBatchSize",
        ) from None
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)


class _Pool:
    """Blocks of layers with one window size, with reference counts."""

    def __init__(
        self, *, kv: KVCacheSpec, window: int, layers: Sequence[int], capacity: int, tables: int
    ) -> None:
        assert kv.pages is not None
        self.window, self.block_size = window, kv.pages.rows
        self.table_blocks = table_pages(kv.pages, 0, capacity)
        self.is_bounded = table_pages(kv.pages, window, capacity) < self.table_blocks
        count = pool_pages(kv.pages, window, capacity, tables)
        self.parts = [(layer, part) for layer in layers for part in ("key", "value")]
        self.heads = kv.array_heads(layers[0])
        assert {*map(kv.array_heads, layers)} == {self.heads}  # of a window's layers
        shape = (len(self.parts), count, self.heads[0], self.block_size, self.heads[1])
        # ONNX Runtime does not keep the array alive.
        self.blocks = _untouched(shape, np.dtype(kv.array_dtype), is_shared=tables > 1)
        self._values = [ort.OrtValue.ortvalue_from_numpy(blocks) for blocks in self.blocks]
        self._uses = [0] * count
        self._free = list(range(count - 1, -1, -1))  # LIFO: recently freed blocks first

    def bind(self, binding: ort.IOBinding) -> None:
        for (layer, part), value in zip(self.parts, self._values, strict=True):
            binding.bind_ortvalue_input(graph_io.past_name(layer, part), value)
            binding.bind_ortvalue_output(graph_io.present_name(layer, part), value)

    @property
    def num_free(self) -> int:
        return len(self._free) * self.block_size

    def num_free_without(self, blocks: Iterable[int]) -> int:
        freed = sum(self._uses[block] == count for block, count in Counter(blocks).items())
        return self.num_free + freed * self.block_size

    def first_block(self, position: int, spare: int = 0) -> int:
        """The first block in the window of `position`, or of `spare` before the window."""
        if not self.is_bounded:
            return 0
        return max(position - self.window - spare, 0) // self.block_size

    def allocate(self) -> int:
        if not self._free:
            raise LimitError(
                f"no block of the KV cache is free, of {len(self._uses)} with {self.block_size} "
                "positions",
                hint="send fewer requests at a time, or build with a larger --maxKVCacheCapacity",
            )
        block = self._free.pop()
        self._uses[block] = 1
        return block

    def own(self, block: int) -> int:
        """The block, or a copy if it is shared."""
        if self._uses[block] == 1:
            return block
        copy = self.allocate()
        self.blocks[:, copy] = self.blocks[:, block]
        self._uses[block] -= 1
        return copy

    def share(self, block: int) -> int:
        self._uses[block] += 1
        return block

    def free(self, block: int) -> None:
        self._uses[block] -= 1
        if not self._uses[block]:
            self._free.append(block)


class _Table:
    """The block table of a sequence in a pool."""

    def __init__(self, pool: _Pool) -> None:
        self.pool = pool
        self.first = 0  # index of the first allocated block; blocks before it are freed
        self.blocks: list[int] = []  # allocated blocks, from `first` on
        # The table for graphs; written in place, since passes bind it
        self.row = np.full(pool.table_blocks, _NOWHERE)

    @property
    def first_position(self) -> int:
        """The first position with a block."""
        return self.first * self.pool.block_size

    @property
    def min_length(self) -> int:
        """The minimum length, other than 0, at which a pass may write."""
        return self.first_position + self.pool.window if self.first else 0

    def allocate(self, begin: int, end: int) -> None:
        """Allocate exclusive blocks for the positions [begin, end); free all later ones.

        Blocks before the window are freed too.
        """
        if begin == 0 < self.first:
            self.free()
        if begin < self.min_length:
            raise ValueError(f"positions that position {begin} attends to were freed")
        self._allocate(begin, end)

    def renew(self, length: int, min_length: int) -> None:
        """Allocate new blocks for `length` positions, to be written; see `min_length`."""
        self.free()
        self.first = self.pool.first_block(min_length)
        self._allocate(length, length)

    def free(self) -> None:
        """Free all blocks."""
        self._free_after(self.first)
        self.first = 0

    def _allocate(self, begin: int, end: int) -> None:
        rows = self.pool.block_size
        first, count = self.pool.first_block(begin, SPARE_ROWS), -(-end // rows)
        while self.blocks and self.first < first:
            self.pool.free(self.blocks.pop(0))
            self.row[self.first] = _NOWHERE
            self.first += 1
        if not self.blocks:
            self.first = max(self.first, first)
        self._free_after(count)
        for at in range(max(begin // rows, self.first), self.first + len(self.blocks)):
            block = self.pool.own(self.blocks[at - self.first])
            self.row[at] = self.blocks[at - self.first] = block
        for at in range(self.first + len(self.blocks), count):
            self.row[at] = block = self.pool.allocate()
            self.blocks.append(block)

    def _free_after(self, count: int) -> None:
        """Free the blocks after the sequence's first `count`."""
        while self.blocks and self.first + len(self.blocks) > count:
            self.pool.free(self.blocks.pop())
            self.row[self.first + len(self.blocks)] = _NOWHERE

    def fork(self) -> _Table:
        """A copy that shares the blocks."""
        new = _Table(self.pool)
        new.first, new.blocks = self.first, [self.pool.share(block) for block in self.blocks]
        new.row[:] = self.row
        return new

    def read(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        """Keys and values of n positions, [2 * layers, num_kv_heads, n, head_dim]."""
        return self.pool.blocks[self._places(positions)].transpose(1, 2, 0, 3)

    def padded(self, length: int) -> NDArray[Any]:
        """As `read`, of all positions below `length`; zeros for those that were freed."""
        shape = (len(self.pool.parts), self.pool.heads[0], length, self.pool.heads[1])
        found = np.zeros(shape, self.pool.blocks.dtype)
        there = np.arange(self.first_position, length)
        found[:, :, self.first_position :] = self.read(there)
        return found

    def write(self, positions: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Write keys and values, shaped as in `read`."""
        self.pool.blocks[self._places(positions)] = values.transpose(2, 0, 1, 3)

    def _places(self, positions: NDArray[np.int64]) -> tuple[Any, ...]:
        blocks = self.row[positions // self.pool.block_size]
        return slice(None), blocks, slice(None), positions % self.pool.block_size


class BlockKVCache:
    """See `KVCache`: the block tables of one sequence."""

    def __init__(self, tables: list[_Table], kv: KVCacheSpec) -> None:
        self._tables, self._kv = tables, kv
        # Block tables [1, P] by graph I/O name.
        self.tables = {
            graph_io.page_table_name(table.pool.window): table.row[None] for table in tables
        }

    def allocate(self, length: int, count: int) -> None:
        """See `KVCache`."""
        for table in self._tables:
            table.allocate(length, length + count)

    def fork(self) -> BlockKVCache:
        """A copy-on-write copy."""
        return BlockKVCache([table.fork() for table in self._tables], self._kv)

    def blocks_in(self, pool: int) -> list[int]:
        """Blocks in one of the pools."""
        return self._tables[pool].blocks

    def free(self) -> None:
        """Free all blocks."""
        for table in self._tables:
            table.free()

    @property
    def min_length(self) -> int:
        """The minimum length, other than 0, at which a pass may write."""
        return max(table.min_length for table in self._tables)

    def compact(self, length: int, rows: NDArray[np.int64]) -> None:
        """See `KVCache`."""
        if rows[-1] + 1 > len(rows):  # otherwise they are in place already
            for table in self._tables:
                table.write(np.arange(length, length + len(rows)), table.read(length + rows))

    def read(self, length: int) -> NDArray[Any]:
        """See `KVCache`; zeros for positions that were freed."""
        if self._is_joined:
            return joined_rows([rows for table in self._tables for rows in table.padded(length)])
        shape = (2 * self._kv.num_layers, 1, self._kv.num_kv_heads, length, self._kv.head_dim)
        found = np.zeros(shape, self._kv.array_dtype)  # unwritten zeros take no memory
        for table in self._tables:
            there = np.arange(table.first_position, length)
            found[_places(table), 0, :, table.first_position :] = table.read(there)
        return found

    def write(self, values: NDArray[Any], min_length: int = 0) -> None:
        """See `KVCache`; blocks before the window of `min_length` are not allocated."""
        count, parts = values.shape[-2], self._parts(values)
        for table, own in zip(self._tables, parts, strict=True):
            table.renew(count, min_length)
            there = np.arange(table.first_position, count)
            table.write(there, own[:, :, table.first_position :])

    @property
    def _is_joined(self) -> bool:
        """Whether positions have other sizes in some layers."""
        return bool(self._kv.heads) or self._kv.dtype == INT4

    def _parts(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """Of each table [2 * layers, num_kv_heads, length, head_dim]."""
        if not self._is_joined:
            return [values[_places(table), 0] for table in self._tables]
        pools = [table.pool for table in self._tables]
        found = split_rows(values, [pool.heads for pool in pools for _ in pool.parts])
        return [np.stack([found.pop(0) for _ in pool.parts]) for pool in pools]


def _places(table: _Table) -> list[int]:
    """Indices of a pool's keys and values among those of all layers."""
    return [2 * layer + (part == "value") for layer, part in table.pool.parts]


def block_kv_cache(cache: KVCache) -> BlockKVCache:
    """Cast a cache of a runner with blocks."""
    assert isinstance(cache, BlockKVCache)
    return cache


def in_pages(
    rows: NDArray[Any], shape: Sequence[int | str], dtype: type, num_windows: int
) -> NDArray[Any]:
    """Keys or values of audio in pages of a graph's shape [pages, heads, rows, D].

    Args:
        rows: [1, heads, A, D]; or pages of a window, as the engine's own encoder gives them.
        shape: of the input.
        dtype: of the input.
        num_windows: zeros follow for the others.
    """
    heads, page_rows, head_dim = (int(size) for size in shape[1:])
    pages = rows if rows.shape[2] == page_rows else _paged(rows[0], page_rows)
    if num_windows == 1:
        return np.asarray(pages, dtype)
    found = np.zeros((num_windows * len(pages), heads, page_rows, head_dim), dtype)
    found[: len(pages)] = pages
    return found


def _paged(rows: NDArray[Any], page_rows: int) -> NDArray[Any]:
    """Rows [heads, A, D] in pages, filled with zeros."""
    heads, count, head_dim = rows.shape
    pages = -(-count // page_rows)
    stored = np.zeros((heads, pages * page_rows, head_dim), rows.dtype)
    stored[:, :count] = rows
    return stored.reshape(heads, pages, page_rows, head_dim).swapaxes(0, 1)
