"""Returns memory to the system while an engine is compiled.

TensorRT copies all weights into one block. Pages of the weight file that it has read stay mapped,
and malloc keeps memory that lowering and compiling freed: at 1 GB of weights another 1 GB and
350 MB.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from edgellm.core.resources import trim

_PERIOD_S = 0.02  # in which some 30 MB are read
_ROUNDS_A_TRIM = 10  # malloc's locks are held for some milliseconds


class MappedFile:
    """A memory-mapped file of weights."""

    def __init__(self, path: Path) -> None:
        """Map it; raises `OSError` if it cannot be read."""
        with path.open("rb") as stream:
            self._pages = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self.address = np.frombuffer(self._pages, np.uint8).ctypes.data

    def release_pages(self) -> None:
        """Drop the mapped pages; later reads map them again."""
        self._pages.madvise(mmap.MADV_DONTNEED)


@contextmanager
def memory_returned(weights: MappedFile | None = None) -> Iterator[None]:
    """Return malloc's free memory and pages of `weights` periodically during the block."""
    done = threading.Event()

    def work() -> None:
        rounds = 0
        while not done.wait(_PERIOD_S):
            if weights is not None:
                weights.release_pages()
            if rounds % _ROUNDS_A_TRIM == 0:
                trim()
            rounds += 1

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
