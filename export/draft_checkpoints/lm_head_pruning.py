"""Some rows of a head: a draft may predict fewer tokens than its base knows (arXiv 2502.14856)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.checkpoint import TensorInfo, TensorSource

_FLOATS = ("F32", "F16", "BF16")


class HeadRows:
    """A source with a tensor `head`: some rows of the tensor `name`, in ascending order."""

    def __init__(
        self, *, source: TensorSource, name: str, rows: NDArray[np.int64], head: str
    ) -> None:
        """Raise `UnsupportedModelError` if the rows are not floats; read no data.

        Args:
            source: of the whole head.
            name: its name there.
            rows: int64 [R], ascending.
            head: the name here.
        """
        info = source.infos().get(name)
        if info is None or info.dtype not in _FLOATS:
            raise UnsupportedModelError(
                f"--draft_vocab_size: {name} of the base is quantized, its rows cannot be chosen",
                hint="leave --draft_vocab_size out, or give the base that it was rounded from",
            )
        self._source, self._name, self._head = source, name, head
        self._info, self._row_bytes = info, info.num_bytes // info.shape[0]
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        self._runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(rows, breaks)]
        self._count = len(rows)

    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by name."""
        return {self._head: replace(self._info, shape=(self._count, *self._info.shape[1:]))}

    def stream(self, name: str) -> Iterator[memoryview]:
        """See `TensorSource`."""
        assert name == self._head
        position, runs = 0, iter(self._runs)
        begin, end = self._bytes(next(runs))
        for piece in self._source.stream(self._name):
            while begin < position + len(piece):
                yield piece[max(begin - position, 0) : end - position]
                if end > position + len(piece):
                    break
                if (run := next(runs, None)) is None:
                    return
                begin, end = self._bytes(run)
            position += len(piece)

    def _bytes(self, run: tuple[int, int]) -> tuple[int, int]:
        return run[0] * self._row_bytes, run[1] * self._row_bytes


def commonest(size: int, vocab_size: int, ends: Iterable[object]) -> NDArray[np.int64]:
    """Int64 [size], ascending: end-of-sequence tokens, and those of the lowest ids.

    BPE vocabularies are in order of frequency. Raises `UnsupportedModelError` if there are fewer
    tokens.
    """
    kept = sorted({end for end in ends if isinstance(end, int) and 0 <= end < vocab_size})
    if not len(kept) < size <= vocab_size:
        raise UnsupportedModelError(
            f"--draft_vocab_size {size}: give {len(kept) + 1} to {vocab_size}, the base's tokens"
        )
    others = np.setdiff1d(np.arange(vocab_size), kept)[: size - len(kept)]
    return np.sort(np.concatenate([others, np.array(kept, np.int64)]))
