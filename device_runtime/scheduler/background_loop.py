"""A background thread that computes for many waiting threads.

A waiting thread sleeps until its requests have finished. If each thread iterated over its own
output, every pass would wake them all for one token each, and delay the next pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from edgellm.device_runtime.engine.sequence import Step
from edgellm.device_runtime.scheduler.concurrent import ConcurrentRequests
from edgellm.device_runtime.scheduler.request_output import RequestOutput
from edgellm.device_runtime.scheduler.running_batch import RunningRequest
from edgellm.device_runtime.scheduler.step_lock import StepLock

Listener = Callable[[RequestOutput, tuple[Step, ...]], object]


class _Job:
    """Requests of one waiting thread."""

    def __init__(self, requests: ConcurrentRequests, on_steps: Listener) -> None:
        self.requests, self._on_steps = requests, on_steps
        self.ended, self.failure = threading.Event(), None

    failure: BaseException | None

    def fill(self) -> None:
        """Start requests while the batch has space; finish if none are left."""
        try:
            if not self.ended.is_set() and not self.requests.fill():
                self.ended.set()
        except BaseException as error:  # noqa: BLE001 - the driver outlives every job
            self.fail(error)

    def take(self, entry: RunningRequest, steps: Sequence[Step]) -> None:
        """Notify the listener of new steps of a request; an error ends the whole job."""
        if self.ended.is_set():  # another of its requests failed in the same pass
            return
        try:
            self._on_steps(*self.requests.take(entry, steps))
        except BaseException as error:  # noqa: BLE001 - the driver outlives every job
            self.fail(error)
            return
        if entry.failure is not None and entry not in self.requests.entries:
            self.fail(entry.failure)

    def fail(self, error: BaseException) -> None:
        """Drop the remaining requests."""
        self.requests.drop()
        self.failure = error
        self.ended.set()


class BackgroundLoop:
    """Runs passes in its own thread; `end` stops it when all requests have finished."""

    def __init__(self, step_lock: StepLock) -> None:
        self._step_lock = step_lock
        self._changed = threading.Condition()
        self._new: list[_Job] = []
        self._is_ending = False
        self._thread = threading.Thread(target=self._drive, name="passes", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """Stop the thread once no request is left."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()

    def join(self, max_seconds: float) -> None:
        """Wait for the thread's end."""
        if self._thread.is_alive():
            self._thread.join(max_seconds)

    def grow(self, answers: Iterable[RequestOutput], maximum: int, on_steps: Listener) -> None:
        """Compute requests to their ends; callable from any thread.

        Args:
            answers: started one by one, in the loop's thread.
            maximum: requests at a time.
            on_steps: takes an output and its new steps, in the loop's thread.

        Raises:
            Exception: a request failed; the others are dropped.
        """
        job = _Job(ConcurrentRequests(self._step_lock, answers, maximum), on_steps)
        with self._changed:
            self._new.append(job)
            self._changed.notify()
        job.ended.wait()
        if job.failure is not None:
            raise job.failure

    def _drive(self) -> None:
        jobs: list[_Job] = []
        while True:
            jobs = [one for one in jobs if not one.ended.is_set()]
            with self._changed:
                if not jobs:
                    self._changed.wait_for(lambda: self._new or self._is_ending)
                jobs += self._new
                self._new = []
            if not jobs:
                return
            for one in jobs:
                one.fill()
            self._pass(jobs)

    def _pass(self, jobs: list[_Job]) -> None:
        job_of = {entry: one for one in jobs for entry in one.requests.entries}
        if not job_of:
            return
        try:
            new_steps = self._step_lock.poll([*job_of])
        except BaseException as error:  # noqa: BLE001 - the engine was closed, or an interrupt
            for one in jobs:
                one.fail(error)
            return
        for entry, steps in new_steps:
            job_of[entry].take(entry, steps)
