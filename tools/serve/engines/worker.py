"""The queue of an engine, and the threads that run its requests."""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgellm.core.errors import EdgeLLMError, UnexpectedError
from edgellm.device_runtime.api.llm import LLM, RequestOutput
from edgellm.device_runtime.request_faults import as_failure
from edgellm.device_runtime.scheduler.running_batch import OutOfTimeError
from edgellm.device_runtime.scheduler.scheduler import AGING_S
from edgellm.device_runtime.transcription.transcriber import Transcriber
from edgellm.tools.serve import heap
from edgellm.tools.serve.engines.ask import Ask
from edgellm.tools.serve.engines.events import Event, Failed, OutputSwitch
from edgellm.tools.serve.engines.metrics import Metrics
from edgellm.tools.serve.http.errors import ApiError

_log = logging.getLogger(__name__)


class AbandonedError(Exception):
    """The client has disconnected; the request is dropped."""


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One request in the queue or the batch of a worker."""

    asks: tuple[Ask, ...]
    post: Callable[[Event], object]  # sends an event to the client's task; thread-safe
    deadline: float  # of time.monotonic()
    priority: int = 0  # smaller goes first
    num_bytes: int = 0  # of the request's body
    arrived: float = field(default_factory=time.monotonic)
    until: float = math.inf  # deadline of the engine's work; set at its start
    abandoned: bool = False
    notified_of: int = 0  # sequence of the last event

    def notify(self, at: int, event: Event) -> None:
        """Post an event of sequence `at`."""
        if at != self.notified_of:
            self.notified_of = at
            self.post(OutputSwitch(at))
        self.post(event)

    def priority_key(self, now: float) -> float:
        """Smaller goes first; waiting makes up for priority."""
        return self.priority - (now - self.arrived) // AGING_S


class Worker(ABC):
    """Runs jobs concurrently, each in a thread."""

    too_late = "no token was computed within {limit}: shorten the prompt"

    def __init__(
        self,
        *,
        engine: LLM | Transcriber,
        metrics: Metrics,
        queue_size: int,
        request_timeout_s: float,
        num_threads: int,
    ) -> None:
        self.engine, self._metrics = engine, metrics
        self._size, self._request_timeout_s = queue_size, request_timeout_s
        self._waiting: list[Job] = []
        self._changed = threading.Condition()
        self.running: list[Job] = []
        self._draining = self._stopping = False
        self._mean_s = 1.0  # moving average of a request's time
        self._threads = [
            threading.Thread(target=self._work, name=f"answer-{number}", daemon=True)
            for number in range(num_threads)
        ]
        metrics.watch(lambda: len(self.running), lambda: len(self._waiting))

    @property
    def adapters(self) -> dict[str, Path]:
        """Folders of the engine's LoRA adapters, by name."""
        return {}

    @property
    def is_alive(self) -> bool:
        """Whether the threads run."""
        return all(thread.is_alive() for thread in self._threads)

    @property
    def is_ready(self) -> bool:
        """Whether the worker accepts jobs while the queue has room."""
        return self.is_alive and not self._draining

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def require_room(self) -> None:
        """Raise `ApiError` 503 after `drain`, 429 while the queue is full."""
        if not self.is_ready:
            raise stopping()
        if len(self._waiting) >= self._size:
            self._metrics.rejected.inc()
            raise full(self._size, round(self._mean_s / len(self._threads)))

    def submit(self, job: Job) -> None:
        """Put a job into the queue; raises as `require_room`."""
        with self._changed:
            self.require_room()
            self._waiting.append(job)
            self._changed.notify()

    def abandon(self, job: Job) -> None:
        """Remove a job from the queue, or end it before its next forward pass."""
        job.abandoned = True
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)

    def is_waiting(self, job: Job) -> bool:
        """Whether a job is in the queue; thread-safe."""
        return job in self._waiting

    def drain(self) -> None:
        """Accept no more jobs; accepted jobs finish."""
        self._draining = True

    def end(self) -> None:
        """End the threads before the next forward pass; remaining jobs fail with 503."""
        with self._changed:
            self._draining = self._stopping = True
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the threads, which `end` stops."""
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=30)

    def _check(self, job: Job, answers: Sequence[RequestOutput] = ()) -> None:
        """Check before a forward pass that a job may continue.

        Raises:
            AbandonedError: its client has disconnected.
            OutOfTimeError: it timed out; the generated text is its output.
            ApiError: it timed out before the first token, or the server stops.
        """
        if job.abandoned:
            raise AbandonedError
        if self._stopping:
            raise _stopped()
        if time.monotonic() > job.until:
            if any(answer.token_ids for answer in answers):
                raise OutOfTimeError
            limit = f"--requestTimeout {self._request_timeout_s:g} s"
            if job.until == job.deadline:
                limit = "--totalTimeout, waiting included"
            raise too_late(self.too_late.format(limit=limit))

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopping)
            if self._stopping:
                left, self._waiting = self._waiting, []
                for job in left:
                    job.post(Failed(_stopped()))
                return None
            now = time.monotonic()
            job = min(self._waiting, key=lambda one: one.priority_key(now))
            self._waiting.remove(job)
            self.running.append(job)
            return job

    def _work(self) -> None:
        while (job := self._next()) is not None:
            num_bytes = job.num_bytes
            self._end(job)
            del job  # the next one may come late
            heap.after_request(num_bytes)

    def _end(self, job: Job) -> None:
        """Run a job until it is over, however it ends."""
        began = time.monotonic()
        job.until = min(job.deadline, began + self._request_timeout_s)
        failure: Exception | None = None
        try:
            self._run(job, began)
        except AbandonedError:
            self._metrics.ended("abort")
        except BaseException as error:  # noqa: BLE001 - the engine outlives every request
            self._metrics.ended("error")
            failure = _reported(error)
            if not isinstance(failure, (ApiError, EdgeLLMError)):
                _log.exception("a request failed")
        with self._changed:
            self.running.remove(job)
            self._mean_s += 0.2 * (time.monotonic() - began - self._mean_s)
        if failure is not None:  # the place is free before the client learns of it
            job.post(Failed(failure))
        del failure  # the error's frames refer to this one

    @abstractmethod
    def _run(self, job: Job, began: float) -> None:
        """Compute a job, post its events, and call `_check` before each forward pass.

        Args:
            job: from the queue.
            began: when it left the queue, of time.monotonic().
        """


def _stopped() -> ApiError:
    return ApiError(503, "the server was stopped", retry_after_s=10)


def _reported(error: BaseException) -> Exception:
    """The error that the client's task gets: the cause of an unexpected one."""
    cause = error.__cause__ if isinstance(error, UnexpectedError) else error
    return cause if isinstance(cause, Exception) else as_failure(error)


def too_late(reason: str) -> ApiError:
    """Error of a request that timed out before its first token.

    The status is 422: clients retry after 408 and 504, and would compute the request in vain.
    """
    return ApiError(422, f"{reason}, or start the server with a longer time", code="timeout")


def stopping() -> ApiError:
    """Error of a request that arrives while the server stops."""
    return ApiError(503, "the server is about to stop", retry_after_s=10)


def full(size: int, wait_s: int) -> ApiError:
    """Error of a request that finds a full queue."""
    return ApiError(
        429,
        f"{size} requests are waiting already",
        code="queue_full",
        retry_after_s=min(max(wait_s, 1), 60),
    )
