"""Events from engine threads to the event loop, which wakes once for many events.

A forward pass makes an event for each of its requests. Waking the loop for every event would
take a system call each, and delay the next forward pass.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any
from weakref import WeakKeyDictionary


class EventQueue:
    """Thread-safe queue of events for one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._wake = loop.call_soon_threadsafe
        self._held: deque[tuple[asyncio.Queue[Any], Any]] = deque()
        self._is_woken = False

    def post(self, queue: asyncio.Queue[Any], event: Any) -> None:
        """Put an event into a queue of the loop; callable from any thread."""
        self._held.append((queue, event))
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._wake(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False  # first, so that later posts wake the loop again
        while self._held:
            queue, event = self._held.popleft()
            queue.put_nowait(event)


_event_queues: WeakKeyDictionary[asyncio.AbstractEventLoop, EventQueue] = WeakKeyDictionary()


def loop_event_queue() -> EventQueue:
    """The event queue of the running loop."""
    loop = asyncio.get_running_loop()
    if loop not in _event_queues:
        _event_queues[loop] = EventQueue(loop)
    return _event_queues[loop]
