"""Returns the memory of large requests to the system.

Grammars are not cached, but one of 1 MB takes up to 40 MB while its request runs. With glibc
each thread has its own heap, which keeps freed memory: 300 MB with 3 concurrent requests.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import threading
import time

LARGE_BYTES = 1 << 16  # of a request's body; its memory is returned once the request is over
_GROWTH_BYTES = 32 << 20  # of the process: a small request may need as much, as of a picture's file
_REST_S = 0.05  # the last frames of a request end, and requests at the same time are waited for
_REST_TIMES = 9  # as long as a return took: all returns take about 10 % of the time
_LONGEST_REST_S = 1.0
_M_ARENA_MAX = -8  # of malloc.h


class Returner(threading.Thread):
    """Returns memory when large requests are over, in a thread: the event loop does not wait."""

    def __init__(self) -> None:
        super().__init__(name="returns-memory", daemon=True)
        self._is_due = threading.Event()
        self._least = private_bytes()

    def after(self, num_bytes: int) -> None:
        """Return memory soon if a request of this size, or the growth since, was large."""
        if num_bytes > LARGE_BYTES or private_bytes() > self._least + _GROWTH_BYTES:
            self._is_due.set()

    def run(self) -> None:
        """See threading.Thread."""
        while self._is_due.wait():
            time.sleep(_REST_S)
            self._is_due.clear()
            began = time.monotonic()
            return_memory()
            self._least = private_bytes()
            time.sleep(min(_REST_TIMES * (time.monotonic() - began), _LONGEST_REST_S))


_returner: Returner | None = None


def manage() -> None:
    """Let threads that begin later share one heap, and return memory `after_request`."""
    global _returner
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_ARENA_MAX, 1)
    _returner = Returner()
    _returner.start()


def after_request(num_bytes: int) -> None:
    """Return memory soon if the request was large; from any thread, does nothing without `manage`.

    Args:
        num_bytes: size of the request's body.
    """
    if _returner is not None:
        _returner.after(num_bytes)


def return_memory() -> None:
    """Return unused memory to the system."""
    gc.collect()  # errors and their frames refer to each other, and to the request
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def private_bytes() -> int:
    """Resident memory that is not a file's; 0 elsewhere than on Linux."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm", "rb") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * mmap.PAGESIZE


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None
