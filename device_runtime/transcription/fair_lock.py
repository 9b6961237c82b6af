"""A lock that threads get in the order in which they wait for it."""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """Context manager; a thread that releases it and wants it again waits after all others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue = deque[threading.Event]()  # the first holds it

    def __enter__(self) -> None:
        turn = threading.Event()
        with self._lock:
            self._queue.append(turn)
            if self._queue[0] is turn:
                return
        try:
            turn.wait()
        except BaseException:  # an interrupt
            self._leave(turn)
            raise

    def __exit__(self, *_: object) -> None:
        self._leave(self._queue[0])

    def _leave(self, turn: threading.Event) -> None:
        with self._lock:
            self._queue.remove(turn)
            if self._queue:
                self._queue[0].set()
