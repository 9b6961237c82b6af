"""Threads that share an engine: a thread that waits for a step computes one for the batch.

The engine has no thread of its own. Nothing is computed unless a thread waits for it, except a
few steps of other requests in the same batch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.arrays import LoadedAdapter
from edgellm.device_runtime.engine.sequence import Step
from edgellm.device_runtime.scheduler.running_batch import Batch, RunningRequest

if TYPE_CHECKING:
    import asyncio

PATIENCE_S = 30.0  # longest time that a paused request keeps its place while others wait


@dataclass(frozen=True, slots=True, eq=False)
class TaskReader:
    """A task of an event loop, which reads one output."""

    loop: asyncio.AbstractEventLoop


class StepLock:
    """The lock and queue of an engine.

    A request that pauses between two passes keeps its place, until its thread waits for another
    request, or, if others wait, until it has paused for `PATIENCE_S`. So no thread waits for
    ever. A request that lost its place continues when it is admitted again.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._lock = threading.RLock()
        self._changed, self._num_waiting = threading.Condition(self._lock), 0
        self._readers: dict[RunningRequest, object] = {}
        self._computes = 0  # the computing thread; 0: none
        self._visitors: set[int] = set()  # threads that wait for the end of a pass
        self._closed = False

    def on_pass(self, callback: Callable[[int, int], object]) -> None:
        """See `Batch.on_pass`."""
        self._batch.on_pass = callback

    def enter(self, entry: RunningRequest, reader: object = None) -> None:
        """Add a request with its reader, by default the calling thread."""
        with self._lock:
            self._drop_unread()
            self._readers[entry] = threading.get_ident() if reader is None else reader
            self._batch.add(entry)

    def leave(self, entry: RunningRequest) -> None:
        """Remove an abandoned request; from any thread, also while a pass runs."""
        with self._lock:
            self._readers.pop(entry, None)
            self._batch.remove(entry)
            self._changed.notify_all()

    def _drop_unread(self) -> bool:
        """Drop outputs whose event loop was closed: their tasks never go on, nor end."""
        unread = [
            entry
            for entry, reader in self._readers.items()
            if isinstance(reader, TaskReader) and reader.loop.is_closed()
        ]
        for entry in unread:
            self.leave(entry)
        return bool(unread)

    def next(self, entries: Sequence[RunningRequest]) -> list[tuple[RunningRequest, list[Step]]]:
        """Wait for new steps of a reader's requests; return as soon as any has some.

        Args:
            entries: running requests that have not been read to their ends.

        Returns:
            New steps of each request that has some or has ended; `failure` holds its error. Empty
            if the reader has left meanwhile.

        Raises:
            EdgeLLMError: the engine was closed.
        """
        self._request(entries)
        while True:
            with self._lock:
                if self._closed:
                    self.require_open()
                if found := self._take_steps(entries):
                    return found
                if self._readers.keys().isdisjoint(entries):
                    return []
            self._compute_or_wait()

    def poll(self, entries: Sequence[RunningRequest]) -> list[tuple[RunningRequest, list[Step]]]:
        """As `next`, but for one pass at most, after which there may be no new steps.

        Raises:
            EdgeLLMError: the engine was closed.
        """
        self._request(entries)
        found = self._new_steps(entries)
        if not found:
            self._compute_or_wait()
            found = self._new_steps(entries)
        return found

    def _new_steps(
        self, entries: Sequence[RunningRequest]
    ) -> list[tuple[RunningRequest, list[Step]]]:
        with self._lock:
            self.require_open()
            return self._take_steps(entries)

    @contextmanager
    def visiting(self) -> Iterator[None]:
        """Hold the engine between two passes, for other computations; raises if it was closed."""
        thread = threading.get_ident()
        try:
            with self._lock:
                self._visitors.add(thread)
                while not self._is_free():
                    self._wait()
                self.require_open()
                self._computes = thread
            yield
        finally:
            self._end_of_pass()

    def count_using(self, adapter: LoadedAdapter) -> int:
        """Number of running requests that use an adapter."""
        found = [entry.sequence for entry in self._batch.entries]
        return sum(not one.is_over and one.prompt.adapter is adapter for one in found)

    def close(self) -> None:
        """Wait for the end of a pass, then fail all further computations."""
        with self._lock:
            while not self._is_free():
                self._wait()
            if not self._closed:
                self._closed = True
                self._batch.close()
            self._changed.notify_all()

    def require_open(self) -> None:
        """Raise `EdgeLLMError` after `close`."""
        if self._closed:
            raise EdgeLLMError("the LLM was closed", hint="load the engine again")

    def _request(self, entries: Sequence[RunningRequest]) -> None:
        """Mark these as wanted; the reader's other requests lose their claim."""
        with self._lock:
            for entry in entries:
                entry.is_wanted, entry.is_unclaimed = True, False
            if len(self._readers) == len(entries):
                return
            readers = {self._readers.get(entry) for entry in entries}
            for entry, reader in self._readers.items():
                if reader in readers and entry not in entries:
                    entry.is_unclaimed = True
            self._changed.notify_all()

    def _take_steps(
        self, entries: Sequence[RunningRequest]
    ) -> list[tuple[RunningRequest, list[Step]]]:
        found = [(entry, [*entry.steps]) for entry in entries if entry.steps or entry.is_done]
        if found:
            now_s = time.monotonic()
            for entry, _ in found:
                entry.steps.clear()
            for entry in entries:
                entry.is_wanted, entry.paused_s = False, now_s
        return found

    def _compute_or_wait(self) -> None:
        """Compute a pass for all that wait, or wait for a change."""
        stepping: list[RunningRequest] = []
        found: list[tuple[Step, ...]] = []
        try:
            with self._lock:
                if self._may_compute():
                    if self._batch.sweep():
                        self._changed.notify_all()
                        return
                    stepping = self._batch.begin(PATIENCE_S)
                if not stepping:
                    if not self._drop_unread():
                        self._wait(self._patience_s())
                    return
                self._computes = threading.get_ident()
            found = self._batch.run(stepping)
        finally:
            with self._lock:
                if stepping:
                    self._batch.end(stepping, found)
                self._end_of_pass()

    def _wait(self, max_seconds: float | None = None) -> None:
        """Release the lock until something has changed."""
        self._num_waiting += 1
        try:
            self._changed.wait(max_seconds)
        finally:
            self._num_waiting -= 1

    def _patience_s(self) -> float:
        """Time until a paused request may lose its place."""
        paused = [
            entry.paused_s for entry in self._batch.entries
            if entry.is_admitted and not entry.is_wanted
        ]  # fmt: skip
        return max(min(paused, default=time.monotonic()) + PATIENCE_S - time.monotonic(), 0.01)

    def _may_compute(self) -> bool:
        return self._is_free() and self._visitors <= {threading.get_ident()}

    def _is_free(self) -> bool:
        """Whether the calling thread may compute; an interrupt may have aborted its own pass."""
        return self._computes in (0, threading.get_ident())

    def _end_of_pass(self) -> None:
        """Release the engine, if the calling thread holds it."""
        thread = threading.get_ident()
        with self._lock:
            self._visitors.discard(thread)
            if self._computes == thread:
                self._computes = 0
                if self._num_waiting:  # usually none
                    self._changed.notify_all()
