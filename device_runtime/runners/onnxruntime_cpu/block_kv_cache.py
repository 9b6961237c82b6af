"""KV cache in blocks: sequences allocate blocks from shared pools, with copy-on-write."""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.errors import LimitError
from edgellm.core.kv_cache_size import SPARE_ROWS, pool_pages, table_pages
from edgellm.core.model_spec import KVCacheSpec

_NOWHERE = -1  # in block tables, for no block


class BlockPool:
    """The blocks of a network's KV cache, with one pool for each window size."""

    def __init__(self, kv: KVCacheSpec, capacity: int, num_sequences: int = 1) -> None:
        """Allocate blocks for `num_sequences` of `capacity` positions."""
        assert kv.pages is not None
        self.num_sequences, self.page_rows, self._capacity = num_sequences, kv.pages.rows, capacity
        layers: dict[int, list[int]] = {}
        for layer, window in enumerate(kv.pages.windows):
            layers.setdefault(window, []).append(layer)
        self._pools = [_Pool(kv, *kind, capacity, num_sequences) for kind in layers.items()]
        self._num_layers, self.pass_rows = kv.num_layers, kv.pages.pass_rows

    def new_cache(self) -> BlockKVCache:
        """The empty cache of a sequence; it has no blocks yet."""
        return BlockKVCache([_Table(pool) for pool in self._pools], self._num_layers)

    @property
    def free_rows(self) -> int:
        """Positions in free blocks; pools bounded by windows have blocks for all sequences."""
        whole = [pool.free_rows for pool in self._pools if not pool.is_bounded]
        return min(whole, default=self.num_sequences * self._capacity)

    def free_rows_without(self, caches: Sequence[BlockKVCache]) -> int:
        """`free_rows` if these caches were freed."""
        whole = [
            pool.free_rows_without(page for cache in caches for page in cache.pages_in(at))
            for at, pool in enumerate(self._pools) if not pool.is_bounded
        ]  # fmt: skip
        return min(whole, default=self.num_sequences * self._capacity)

    def bind(self, binding: ort.IOBinding) -> None:
        """Bind all blocks as inputs, and the same memory as outputs."""
        for pool in self._pools:
            pool.bind(binding)


def _untouched(shape: tuple[int, ...], dtype: np.dtype[Any], *, is_shared: bool) -> NDArray[Any]:
    """Zeros that take no memory until they are written.

    In numpy arrays the system clears a huge page of 2 MB in every layer when a sequence writes to
    a new block: 0.4 s for SmolLM2, while other sequences decode. With a single sequence this
    happens once, and huge pages make reads 4 % faster.
    """
    if not is_shared or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return np.zeros(shape, dtype)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)


class _Pool:
    """Blocks of layers with one window size, with reference counts."""

    def __init__(
        self, kv: KVCacheSpec, window: int, layers: Sequence[int], capacity: int, tables: int
    ) -> None:
        assert kv.pages is not None
        self.window, self.page_rows = window, kv.pages.rows
        self.table_pages = table_pages(kv.pages, 0, capacity)
        self.is_bounded = table_pages(kv.pages, window, capacity) < self.table_pages
        count = pool_pages(kv.pages, window, capacity, tables)
        self.parts = [(layer, part) for layer in layers for part in ("key", "value")]
        shape = (len(self.parts), count, kv.num_kv_heads, self.page_rows, kv.head_dim)
        # ONNX Runtime does not keep the array alive.
        self.pages = _untouched(shape, np.dtype(kv.dtype), is_shared=tables > 1)
        self._values = [ort.OrtValue.ortvalue_from_numpy(pages) for pages in self.pages]
        self._uses = [0] * count
        self._free = list(range(count - 1, -1, -1))  # LIFO: recently freed blocks first

    def bind(self, binding: ort.IOBinding) -> None:
        for (layer, part), value in zip(self.parts, self._values, strict=True):
            binding.bind_ortvalue_input(graph_io.past_name(layer, part), value)
            binding.bind_ortvalue_output(graph_io.present_name(layer, part), value)

    @property
    def free_rows(self) -> int:
        return len(self._free) * self.page_rows

    def free_rows_without(self, pages: Iterable[int]) -> int:
        freed = sum(self._uses[page] == count for page, count in Counter(pages).items())
        return self.free_rows + freed * self.page_rows

    def first_page(self, row: int, spare_rows: int = 0) -> int:
        """The first block in the window of position `row`, or of `spare_rows` before the window."""
        if not self.is_bounded:
            return 0
        return max(row - self.window - spare_rows, 0) // self.page_rows

    def allocate(self) -> int:
        if not self._free:
            raise LimitError(
                f"no block of the KV cache is free, of {len(self._uses)} with {self.page_rows} "
                "positions",
                hint="send fewer requests at a time, or build with a larger --maxKVCacheCapacity",
            )
        page = self._free.pop()
        self._uses[page] = 1
        return page

    def own(self, page: int) -> int:
        """The block, or a copy if it is shared."""
        if self._uses[page] == 1:
            return page
        copy = self.allocate()
        self.pages[:, copy] = self.pages[:, page]
        self._uses[page] -= 1
        return copy

    def share(self, page: int) -> int:
        self._uses[page] += 1
        return page

    def free(self, page: int) -> None:
        self._uses[page] -= 1
        if not self._uses[page]:
            self._free.append(page)


class _Table:
    """The block table of a sequence in a pool."""

    def __init__(self, pool: _Pool) -> None:
        self.pool = pool
        self.first = 0  # index of the first allocated block; blocks before it are freed
        self.pages: list[int] = []  # allocated blocks, from `first` on
        # The table for graphs; written in place, since passes bind it
        self.row = np.full(pool.table_pages, _NOWHERE)

    @property
    def first_row(self) -> int:
        """The first position with a block."""
        return self.first * self.pool.page_rows

    @property
    def least_rows(self) -> int:
        """The minimum length, other than 0, at which a pass may write."""
        return self.first_row + self.pool.window if self.first else 0

    def reserve(self, begin: int, end: int) -> None:
        """Allocate exclusive blocks for the positions [begin, end); free all later ones.

        Blocks before the window are freed too.
        """
        if begin == 0 < self.first:
            self.release()
        if begin < self.least_rows:
            raise ValueError(f"positions that position {begin} attends to were freed")
        self._allocate(begin, end)

    def renew(self, length: int, least_rows: int) -> None:
        """Allocate new blocks for `length` positions, to be written; see `least_rows`."""
        self.release()
        self.first = self.pool.first_page(least_rows)
        self._allocate(length, length)

    def release(self) -> None:
        """Free all blocks."""
        self._free_after(self.first)
        self.first = 0

    def _allocate(self, begin: int, end: int) -> None:
        rows = self.pool.page_rows
        first, count = self.pool.first_page(begin, SPARE_ROWS), -(-end // rows)
        while self.pages and self.first < first:
            self.pool.free(self.pages.pop(0))
            self.row[self.first] = _NOWHERE
            self.first += 1
        if not self.pages:
            self.first = max(self.first, first)
        self._free_after(count)
        for at in range(max(begin // rows, self.first), self.first + len(self.pages)):
            page = self.pool.own(self.pages[at - self.first])
            self.row[at] = self.pages[at - self.first] = page
        for at in range(self.first + len(self.pages), count):
            self.row[at] = page = self.pool.allocate()
            self.pages.append(page)

    def _free_after(self, count: int) -> None:
        """Free the blocks after the sequence's first `count`."""
        while self.pages and self.first + len(self.pages) > count:
            self.pool.free(self.pages.pop())
            self.row[self.first + len(self.pages)] = _NOWHERE

    def fork(self) -> _Table:
        """A copy that shares the blocks."""
        new = _Table(self.pool)
        new.first, new.pages = self.first, [self.pool.share(page) for page in self.pages]
        new.row[:] = self.row
        return new

    def read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Keys and values of n positions, [2 * layers, num_kv_heads, n, head_dim]."""
        return self.pool.pages[self._places(rows)].transpose(1, 2, 0, 3)

    def write(self, rows: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Write keys and values, shaped as in `read`."""
        self.pool.pages[self._places(rows)] = values.transpose(2, 0, 1, 3)

    def _places(self, rows: NDArray[np.int64]) -> tuple[Any, ...]:
        pages = self.row[rows // self.pool.page_rows]
        return slice(None), pages, slice(None), rows % self.pool.page_rows


class BlockKVCache:
    """See `runners.Cache`: the block tables of one sequence."""

    def __init__(self, tables: list[_Table], num_layers: int) -> None:
        self._tables, self._num_layers = tables, num_layers
        # Block tables [1, P] by graph I/O name.
        self.tables = {
            graph_io.page_table_name(table.pool.window): table.row[None] for table in tables
        }

    def reserve(self, write_index: int, rows: int) -> None:
        """Allocate blocks for a pass of `rows` tokens; raises `LimitError` if none is free."""
        for table in self._tables:
            table.reserve(write_index, write_index + rows)

    def fork(self) -> BlockKVCache:
        """A copy-on-write copy."""
        return BlockKVCache([table.fork() for table in self._tables], self._num_layers)

    def pages_in(self, pool: int) -> list[int]:
        """Blocks in one of the pools."""
        return self._tables[pool].pages

    def release(self) -> None:
        """Free all blocks."""
        for table in self._tables:
            table.release()

    @property
    def least_rows(self) -> int:
        """The minimum length, other than 0, at which a pass may write."""
        return max(table.least_rows for table in self._tables)

    def compact(self, length: int, rows: NDArray[np.int64]) -> None:
        """See `runners.Cache`."""
        if rows[-1] + 1 > len(rows):  # otherwise they are in place already
            for table in self._tables:
                table.write(np.arange(length, length + len(rows)), table.read(length + rows))

    def read_rows(self, length: int) -> NDArray[Any]:
        """See `runners.Cache`; zeros for positions that were freed."""
        pages = self._tables[0].pool.pages
        shape = (2 * self._num_layers, 1, pages.shape[2], length, pages.shape[4])
        found = np.zeros(shape, pages.dtype)  # unwritten zeros take no memory
        for table in self._tables:
            there = np.arange(table.first_row, length)
            found[_places(table), 0, :, table.first_row :] = table.read(there)
        return found

    def write_rows(self, rows: NDArray[Any], least_rows: int = 0) -> None:
        """See `runners.Cache`; blocks before the window of `least_rows` are not allocated."""
        count = rows.shape[-2]
        for table in self._tables:
            table.renew(count, least_rows)
            there = np.arange(table.first_row, count)
            table.write(there, rows[_places(table), 0, :, table.first_row :])


def _places(table: _Table) -> list[int]:
    """Indices of a pool's keys and values among those of all layers."""
    return [2 * layer + (part == "value") for layer, part in table.pool.parts]
