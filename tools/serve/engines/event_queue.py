"""From the threads of an engine to the event loop, which is woken once for many events.

A pass gives an event to each of its answers. To wake the loop for every one takes a system call
each, and lets the loop's work in before the next pass has begun.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any
from weakref import WeakKeyDictionary


class EventQueue:
    """Of one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._wake = loop.call_soon_threadsafe
        self._held: deque[tuple[asyncio.Queue[Any], Any]] = deque()
        self._is_woken = False

    def post(self, queue: asyncio.Queue[Any], event: Any) -> None:
        """Put an event into a queue of the loop; from any thread."""
        self._held.append((queue, event))
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._wake(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False  # first: a later post wakes the loop again
        while self._held:
            queue, event = self._held.popleft()
            queue.put_nowait(event)


_mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, EventQueue] = WeakKeyDictionary()


def mailbox() -> EventQueue:
    """Of the running loop."""
    loop = asyncio.get_running_loop()
    if loop not in _mailboxes:
        _mailboxes[loop] = EventQueue(loop)
    return _mailboxes[loop]
