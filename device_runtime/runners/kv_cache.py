"""Protocols of KV caches: the cache of one sequence, and the pool that its memory comes from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


def joined_rows(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Keys or values [num_kv_heads, length, head_dim] of layers as [1, 1, 1, length, numbers]."""
    flat = [part.transpose(1, 0, 2).reshape(part.shape[1], -1) for part in parts]
    return np.concatenate(flat, axis=-1)[None, None, None]


def split_rows(values: NDArray[Any], heads: Sequence[Sequence[int]]) -> list[NDArray[Any]]:
    """What `joined_rows` joined; `heads`: num_kv_heads and head_dim of each part."""
    ends = np.cumsum([count * size for count, size in heads])
    flat = np.split(values[0, 0, 0], ends[:-1], axis=-1)
    return [
        part.reshape(len(part), count, size).transpose(1, 0, 2)
        for part, (count, size) in zip(flat, heads, strict=True)
    ]


class KVCache(Protocol):
    """The KV cache of one sequence in the memory of a runner."""

    @property
    def min_length(self) -> int:
        """The minimum length, other than 0, to which it can be truncated; 0: any length.

        Blocks before all sliding windows are freed.
        """
        ...

    def allocate(self, length: int, count: int) -> None:
        """Truncate to `length` positions, and allocate `count` more for a pass.

        Raises:
            LimitError: the pool has too few free blocks.
        """
        ...

    def compact(self, length: int, rows: NDArray[np.int64]) -> None:
        """Move the positions `length + rows`, ascending, to `length`, `length + 1`, ..."""
        ...

    def read(self, length: int) -> NDArray[Any]:
        """A copy of the first `length` positions, in the cache's dtype.

        Returns:
            [2 * num_layers, 1, num_kv_heads, length, head_dim]; zeros for freed positions. If heads
            of layers differ: [1, 1, 1, length, numbers of all layers], see `joined_rows`.
        """
        ...

    def write(self, values: NDArray[Any], min_length: int = 0) -> None:
        """Replace the content by values that `read` returned, from position 0 on.

        Later the cache cannot be truncated below `min_length`.

        Raises:
            LimitError: as `allocate`.
        """
        ...

    def fork(self) -> KVCache:
        """A copy-on-write copy."""
        ...

    def free(self) -> None:
        """Return all memory to the pool."""
        ...


class KVPool(Protocol):
    """Memory for the KV caches of a runner, in blocks.

    Attributes:
        block_size: positions of a block.
        max_pass_tokens: maximum tokens of a sequence in a pass, if sliding windows bound its
            blocks; 0: unlimited.
        swaps_first: swap out other sequences before finished ones are evicted, since the memory
            holds a single sequence.
    """

    block_size: int
    max_pass_tokens: int
    swaps_first: bool

    def new_cache(self) -> KVCache:
        """The empty cache of a sequence."""
        ...

    @property
    def num_free(self) -> int:
        """Positions in free blocks."""
        ...

    def num_free_without(self, caches: Iterable[KVCache]) -> int:
        """`num_free` if these caches were freed."""
        ...
