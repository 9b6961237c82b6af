"""KV caches of several sequences in pages of memory that they share."""

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

_NOWHERE = -1  # in tables, behind the last page


class BlockPool:
    """The pages of a network's caches, apart for layers that see other numbers of rows."""

    def __init__(self, kv: KVCacheSpec, capacity: int, num_sequences: int = 1) -> None:
        """Room for so many sequences of `capacity` rows."""
        assert kv.pages is not None
        self.num_sequences, self.page_rows, self._capacity = num_sequences, kv.pages.rows, capacity
        layers: dict[int, list[int]] = {}
        for layer, window in enumerate(kv.pages.windows):
            layers.setdefault(window, []).append(layer)
        self._pools = [_Pool(kv, *kind, capacity, num_sequences) for kind in layers.items()]
        self._num_layers, self.pass_rows = kv.num_layers, kv.pages.pass_rows

    def new_cache(self) -> BlockKVCache:
        """Of a sequence; without rows it takes no memory."""
        return BlockKVCache([_Table(pool) for pool in self._pools], self._num_layers)

    @property
    def free_rows(self) -> int:
        """Rows for which pages are free; windows that bound them have pages for everybody."""
        whole = [pool.free_rows for pool in self._pools if not pool.is_bounded]
        return min(whole, default=self.num_sequences * self._capacity)

    def free_rows_without(self, caches: Sequence[BlockKVCache]) -> int:
        """The same if these gave their pages back."""
        whole = [
            pool.free_rows_without(page for cache in caches for page in cache.pages_in(at))
            for at, pool in enumerate(self._pools) if not pool.is_bounded
        ]  # fmt: skip
        return min(whole, default=self.num_sequences * self._capacity)

    def bind(self, binding: ort.IOBinding) -> None:
        """All pages as inputs, and in the same place as outputs."""
        for pool in self._pools:
            pool.bind(binding)


def _untouched(shape: tuple[int, ...], dtype: np.dtype[Any], *, is_shared: bool) -> NDArray[Any]:
    """Zeros; what nobody has written takes no memory.

    In numpy's arrays the system clears 2 MB (a huge page) in every layer where a sequence begins
    to write in a new place: 0.4 s for SmolLM2, in the middle of others' answers. One sequence
    alone does so once, and reads its rows 4 % faster.
    """
    if not is_shared or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return np.zeros(shape, dtype)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)


class _Pool:
    """Pages of some layers, and in how many tables each is."""

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
        # ONNX Runtime does not keep the array alive that it is given.
        self.pages = _untouched(shape, np.dtype(kv.dtype), is_shared=tables > 1)
        self._values = [ort.OrtValue.ortvalue_from_numpy(pages) for pages in self.pages]
        self._uses = [0] * count
        self._free = list(range(count - 1, -1, -1))  # those used last are taken first

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
        """Of those that a pass sees which writes from `row` on, and of rows before its window."""
        if not self.is_bounded:
            return 0
        return max(row - self.window - spare_rows, 0) // self.page_rows

    def take(self) -> int:
        if not self._free:
            raise LimitError(
                f"no page of the KV cache is free, of {len(self._uses)} with {self.page_rows} rows",
                hint="ask for less at a time, or build with a larger --maxKVCacheCapacity",
            )
        page = self._free.pop()
        self._uses[page] = 1
        return page

    def own(self, page: int) -> int:
        """The page, or a copy if others have it, too."""
        if self._uses[page] == 1:
            return page
        copy = self.take()
        self.pages[:, copy] = self.pages[:, page]
        self._uses[page] -= 1
        return copy

    def share(self, page: int) -> int:
        self._uses[page] += 1
        return page

    def give_back(self, page: int) -> None:
        self._uses[page] -= 1
        if not self._uses[page]:
            self._free.append(page)


class _Table:
    """The pages of a sequence in a pool, in the order of its rows."""

    def __init__(self, pool: _Pool) -> None:
        self.pool = pool
        self.first = 0  # page of the sequence; those before were given back, or never taken
        self.pages: list[int] = []  # from it on
        # Of all, as graphs take them; written in place, others look at it
        self.row = np.full(pool.table_pages, _NOWHERE)

    @property
    def first_row(self) -> int:
        """Of those that are there."""
        return self.first * self.pool.page_rows

    @property
    def least_rows(self) -> int:
        """The fewest rows behind which a pass may write, but for none."""
        return self.first_row + self.pool.window if self.first else 0

    def reserve(self, begin: int, end: int) -> None:
        """Pages of its own for the rows [begin, end), none behind, and none before the window."""
        if begin == 0 < self.first:
            self.release()
        if begin < self.least_rows:
            raise ValueError(f"rows that row {begin} sees were given back")
        self._reach(begin, end)

    def renew(self, length: int, least_rows: int) -> None:
        """Other pages, for as many rows, which are to be written; see `least_rows`."""
        self.release()
        self.first = self.pool.first_page(least_rows)
        self._reach(length, length)

    def release(self) -> None:
        """Give all pages back."""
        self._drop_behind(self.first)
        self.first = 0

    def _reach(self, begin: int, end: int) -> None:
        rows = self.pool.page_rows
        first, count = self.pool.first_page(begin, SPARE_ROWS), -(-end // rows)
        while self.pages and self.first < first:
            self.pool.give_back(self.pages.pop(0))
            self.row[self.first] = _NOWHERE
            self.first += 1
        if not self.pages:
            self.first = max(self.first, first)
        self._drop_behind(count)
        for at in range(max(begin // rows, self.first), self.first + len(self.pages)):
            page = self.pool.own(self.pages[at - self.first])
            self.row[at] = self.pages[at - self.first] = page
        for at in range(self.first + len(self.pages), count):
            self.row[at] = page = self.pool.take()
            self.pages.append(page)

    def _drop_behind(self, count: int) -> None:
        """Give those back that are not among the sequence's first `count`."""
        while self.pages and self.first + len(self.pages) > count:
            self.pool.give_back(self.pages.pop())
            self.row[self.first + len(self.pages)] = _NOWHERE

    def fork(self) -> _Table:
        """Another with the same pages."""
        new = _Table(self.pool)
        new.first, new.pages = self.first, [self.pool.share(page) for page in self.pages]
        new.row[:] = self.row
        return new

    def read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Some rows, [2 * layers, num_kv_heads, n, head_dim]."""
        return self.pool.pages[self._places(rows)].transpose(1, 2, 0, 3)

    def write(self, rows: NDArray[np.int64], values: NDArray[Any]) -> None:
        """As `read` gives them."""
        self.pool.pages[self._places(rows)] = values.transpose(2, 0, 1, 3)

    def _places(self, rows: NDArray[np.int64]) -> tuple[Any, ...]:
        pages = self.row[rows // self.pool.page_rows]
        return slice(None), pages, slice(None), rows % self.pool.page_rows


class BlockKVCache:
    """See `runners.Cache`: the rows of one sequence."""

    def __init__(self, tables: list[_Table], num_layers: int) -> None:
        self._tables, self._num_layers = tables, num_layers
        # Page tables [1, P] by their names.
        self.tables = {
            graph_io.page_table_name(table.pool.window): table.row[None] for table in tables
        }

    def reserve(self, write_index: int, rows: int) -> None:
        """Before a pass that writes `rows` rows; raises `LimitError` where no page is free."""
        for table in self._tables:
            table.reserve(write_index, write_index + rows)

    def fork(self) -> BlockKVCache:
        """Another with the same rows, in the same pages until one of them writes there."""
        return BlockKVCache([table.fork() for table in self._tables], self._num_layers)

    def pages_in(self, pool: int) -> list[int]:
        """Of one of the pools."""
        return self._tables[pool].pages

    def release(self) -> None:
        """Give all pages back."""
        for table in self._tables:
            table.release()

    @property
    def least_rows(self) -> int:
        """The fewest rows behind which a pass may write, but for none."""
        return max(table.least_rows for table in self._tables)

    def compact(self, length: int, rows: NDArray[np.int64]) -> None:
        """See `runners.Cache`."""
        if rows[-1] + 1 > len(rows):  # otherwise they stand where they belong
            for table in self._tables:
                table.write(np.arange(length, length + len(rows)), table.read(length + rows))

    def read_rows(self, length: int) -> NDArray[Any]:
        """See `runners.Cache`; zeros for rows that were given back."""
        pages = self._tables[0].pool.pages
        shape = (2 * self._num_layers, 1, pages.shape[2], length, pages.shape[4])
        found = np.zeros(shape, pages.dtype)  # what nobody writes takes no memory
        for table in self._tables:
            there = np.arange(table.first_row, length)
            found[_places(table), 0, :, table.first_row :] = table.read(there)
        return found

    def write_rows(self, rows: NDArray[Any], least_rows: int = 0) -> None:
        """See `runners.Cache`; fewer than `least_rows` are not all there."""
        count = rows.shape[-2]
        for table in self._tables:
            table.renew(count, least_rows)
            there = np.arange(table.first_row, count)
            table.write(there, rows[_places(table), 0, :, table.first_row :])


def _places(table: _Table) -> list[int]:
    """Of a pool's keys and values among those of all layers."""
    return [2 * layer + (part == "value") for layer, part in table.pool.parts]
