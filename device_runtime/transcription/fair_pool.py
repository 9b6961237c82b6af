"""Items that threads get in the order in which they wait for one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Item = TypeVar("Item")


class _Place(Generic[Item]):
    """A thread in the queue."""

    def __init__(self) -> None:
        self.is_served = threading.Event()
        self.items: list[Item] = []


class FairPool(Generic[Item]):
    """A thread that gives an item back and wants one again waits after all others."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._lock, self._free = threading.Lock(), deque(items)
        self._queue = deque[_Place[Item]]()

    @contextmanager
    def taken(self) -> Iterator[Item]:
        """An item, which no other thread has until the end."""
        place = _Place[Item]()
        with self._lock:
            if self._free:
                place.items.append(self._free.popleft())
                place.is_served.set()
            else:
                self._queue.append(place)
        try:
            place.is_served.wait()
            yield place.items[0]
        finally:  # an interrupt may end the wait
            with self._lock:
                self._leave(place)

    def _leave(self, place: _Place[Item]) -> None:
        if not place.items:
            self._queue.remove(place)
        elif self._queue:
            following = self._queue.popleft()
            following.items.append(place.items[0])
            following.is_served.set()
        else:
            self._free.append(place.items[0])
