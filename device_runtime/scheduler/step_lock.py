"""Threads that share an engine: whoever waits for a step computes one, for all who are in line.

There is no thread of the engine's own: nothing is computed that nobody waits for, but for a few
steps ahead of those whose answers share the pass.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.arrays import LoadedAdapter
from edgellm.device_runtime.engine.sequence import Step
from edgellm.device_runtime.scheduler.running_batch import Batch, RunningRequest

PATIENCE_S = 30.0  # nobody waits longer for an answer that is not iterated over


@dataclass(frozen=True, slots=True, eq=False)
class TaskReader:
    """A task of an event loop, which reads one output."""

    loop: asyncio.AbstractEventLoop


class StepLock:
    """The line before an engine.

    An answer that pauses between two passes keeps its place, until the thread that iterates
    over it turns to another, or, if others wait, until it has paused for `PATIENCE_S`. So no
    thread waits for ever. An answer that was overtaken goes on when its turn comes again.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._lock = threading.RLock()
        self._changed, self._num_waiting = threading.Condition(self._lock), 0
        self._readers: dict[RunningRequest, object] = {}
        self._computes = 0  # the thread that does; 0: none
        self._visitors: set[int] = set()  # threads that wait for the end of a pass
        self._closed = False

    def on_pass(self, told: Callable[[int, int], object]) -> None:
        """See `Batch.on_pass`."""
        self._batch.on_pass = told

    def enter(self, entry: RunningRequest, reader: object = None) -> None:
        """An answer is about to be read; without `reader` by this thread."""
        with self._lock:
            self._drop_unread()
            self._readers[entry] = threading.get_ident() if reader is None else reader
            self._batch.add(entry)

    def leave(self, entry: RunningRequest) -> None:
        """Nobody reads on; from any thread, also while a pass runs."""
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
        """The new steps of one reader's answers, as soon as there are any of one of them.

        Args:
            entries: in the works, none of which has ended and been read.

        Returns:
            What came of each that goes on, or has ended; its `failure` says why it failed. Nothing,
            if the reader has left meanwhile.

        Raises:
            EdgeLLMError: the engine was closed.
        """
        self._ask(entries)
        while True:
            with self._lock:
                if self._closed:
                    self.require_open()
                if found := self._read(entries):
                    return found
                if self._readers.keys().isdisjoint(entries):
                    return []
            self._compute_or_wait()

    def poll(self, entries: Sequence[RunningRequest]) -> list[tuple[RunningRequest, list[Step]]]:
        """As `next`, but for a pass at most, after which there may be nothing new.

        Raises:
            EdgeLLMError: the engine was closed.
        """
        self._ask(entries)
        found = self._news(entries)
        if not found:
            self._compute_or_wait()
            found = self._news(entries)
        return found

    def _news(self, entries: Sequence[RunningRequest]) -> list[tuple[RunningRequest, list[Step]]]:
        with self._lock:
            self.require_open()
            return self._read(entries)

    @contextmanager
    def visiting(self) -> Iterator[None]:
        """Compute something between two passes, whosever turn it is; raises if it was closed."""
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
        """Answers in the works that are computed with an adapter."""
        found = [entry.sequence for entry in self._batch.entries]
        return sum(not one.is_over and one.prompt.adapter is adapter for one in found)

    def close(self) -> None:
        """Wait for the end of a pass and let nobody compute again."""
        with self._lock:
            while not self._is_free():
                self._wait()
            if not self._closed:
                self._closed = True
                self._batch.close()
            self._changed.notify_all()

    def require_open(self) -> None:
        """Raises `EdgeLLMError` behind `close`."""
        if self._closed:
            raise EdgeLLMError("the LLM was closed", hint="load the engine again")

    def _ask(self, entries: Sequence[RunningRequest]) -> None:
        """A reader waits for these, and so for no other answer of its own."""
        with self._lock:
            for entry in entries:
                entry.is_wanted, entry.is_turned_away = True, False
            if len(self._readers) == len(entries):
                return
            readers = {self._readers.get(entry) for entry in entries}
            for entry, reader in self._readers.items():
                if reader in readers and entry not in entries:
                    entry.is_turned_away = True
            self._changed.notify_all()

    def _read(self, entries: Sequence[RunningRequest]) -> list[tuple[RunningRequest, list[Step]]]:
        found = [(entry, [*entry.steps]) for entry in entries if entry.steps or entry.is_done]
        if found:
            now_s = time.monotonic()
            for entry, _ in found:
                entry.steps.clear()
            for entry in entries:
                entry.is_wanted, entry.paused_s = False, now_s
        return found

    def _compute_or_wait(self) -> None:
        """Compute a pass for all who wait, or wait until something has changed."""
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
        """Let others have the lock until something has changed."""
        self._num_waiting += 1
        try:
            self._changed.wait(max_seconds)
        finally:
            self._num_waiting -= 1

    def _patience_s(self) -> float:
        """Until somebody's may be over."""
        paused = [
            entry.paused_s for entry in self._batch.entries
            if entry.is_admitted and not entry.is_wanted
        ]  # fmt: skip
        return max(min(paused, default=time.monotonic()) + PATIENCE_S - time.monotonic(), 0.01)

    def _may_compute(self) -> bool:
        return self._is_free() and self._visitors <= {threading.get_ident()}

    def _is_free(self) -> bool:
        """Whether the calling thread may compute; an interrupt may have cut a pass of its own."""
        return self._computes in (0, threading.get_ident())

    def _end_of_pass(self) -> None:
        """Of the calling thread, if it has begun one."""
        thread = threading.get_ident()
        with self._lock:
            self._visitors.discard(thread)
            if self._computes == thread:
                self._computes = 0
                if self._num_waiting:  # most often nobody does
                    self._changed.notify_all()
