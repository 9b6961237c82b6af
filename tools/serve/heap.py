"""The heap of the server's process: memory of large requests goes back to the system.

No grammar is cached, but one of 1 MB takes up to 40 MB while its answer is computed. Under glibc
each thread has a heap of its own, which keeps what is freed: 300 MB with 3 answers at a time.
"""

from __future__ import annotations

import ctypes
import gc
import sys

LARGE_FORM = 1 << 16  # characters of a grammar or schema that leaves holes worth returning
_M_ARENA_MAX = -8  # of malloc.h


def use_one_heap() -> None:
    """Let all threads that begin later allocate from one heap; elsewhere than on Linux nothing."""
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_ARENA_MAX, 1)


def return_memory() -> None:
    """Give memory that nothing uses back to the system."""
    gc.collect()  # errors and their frames refer to each other, and to the request
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None
