"""The one thread that owns the engine, and the queue before it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from edgellm.contract import EdgeLLMError
from edgellm.device_runtime.engine.llm import LLM, Answer
from edgellm.tools.serve.asks import Ask, start
from edgellm.tools.serve.errors import ApiError
from edgellm.tools.serve.events import Event, Failed, Finished, Started
from edgellm.tools.serve.metrics import Metrics

_log = logging.getLogger(__name__)


class AbandonedError(Exception):
    """Nobody waits for the answer any more."""


@dataclass(slots=True, eq=False)
class Job:
    """One request between the task that serves a client and the worker."""

    asks: tuple[Ask, ...]
    post: Callable[[Event], object]  # hands an event to the client's task; from any thread
    deadline: float  # of time.monotonic()
    arrived: float = field(default_factory=time.monotonic)
    abandoned: bool = False


class Worker:
    """Runs jobs one after the other."""

    def __init__(
        self, llm: LLM, metrics: Metrics, queue_size: int, request_timeout_s: float
    ) -> None:
        self.llm, self._metrics = llm, metrics
        self._size, self._request_timeout_s = queue_size, request_timeout_s
        llm.session.before_pass = self._check
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._running: Job | None = None
        self._until = 0.0
        self._draining = self._stopping = False
        self._mean_s = 1.0  # of a request, lately
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        metrics.watch(lambda: self._running is not None, lambda: len(self._waiting), llm.session)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def is_ready(self) -> bool:
        """Whether jobs are taken, if there is room for them."""
        return self._thread.is_alive() and not self._draining

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def require_room(self) -> None:
        """Raises `ApiError` 503 after `drain`, 429 while the queue is full."""
        if not self.is_ready:
            raise ApiError(503, "the server is about to stop", retry_after_s=10)
        if len(self._waiting) >= self._size:
            self._metrics.refused.inc()
            raise ApiError(
                429,
                f"{self._size} requests are waiting already",
                code="queue_full",
                retry_after_s=min(max(round(self._mean_s), 1), 60),
            )

    def submit(self, job: Job) -> None:
        """Put a job into the queue; raises as `require_room`."""
        with self._changed:
            self.require_room()
            self._waiting.append(job)
            self._changed.notify()

    def abandon(self, job: Job) -> None:
        """Take a job out of the queue, or end it before its next pass."""
        job.abandoned = True
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)

    def drain(self) -> None:
        """Take no more jobs; those that are there are finished."""
        self._draining = True

    def end(self) -> None:
        """Let the thread end before its next pass; jobs that are left fail with 503."""
        with self._changed:
            self._draining = self._stopping = True
            self._changed.notify()

    def join(self) -> None:
        """Wait for the thread, which `end` stops."""
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def _check(self) -> None:
        """Raises `AbandonedError`, or `ApiError` 504 when the running job's time is over."""
        job = self._running
        if job is not None and job.abandoned:
            raise AbandonedError
        if self._stopping:
            raise _stopped()
        if job is not None and time.monotonic() > self._until:
            raise ApiError(504, "the answer took too long", code="timeout")

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopping)
            self._running = None if self._stopping else self._waiting.popleft()
            return self._running

    def _work(self) -> None:
        while (job := self._next()) is not None:
            began = time.monotonic()
            self._until = min(job.deadline, began + self._request_timeout_s)
            try:
                self._run(job, began)
            except AbandonedError:
                self._metrics.ended("abort")
            except Exception as error:  # noqa: BLE001 - the engine outlives every request
                self._metrics.ended("error")
                if not isinstance(error, (ApiError, EdgeLLMError)):
                    _log.exception("a request failed")
                self._running = None  # whom the failure reaches finds the engine idle
                job.post(Failed(error))
            self._running = None
            self._mean_s += 0.2 * (time.monotonic() - began - self._mean_s)
        for job in self._waiting:
            job.post(Failed(_stopped()))

    def _run(self, job: Job, began: float) -> None:
        self._check()
        # A faulty prompt is told of before the work on the others begins.
        answers = [start(self.llm, ask) for ask in job.asks]
        for answer in answers:
            self._answer(job, answer, began)

    def _answer(self, job: Job, answer: Answer, began: float) -> None:
        job.post(Started(answer.prompt_token_count))
        first = latest = 0.0
        try:
            for step in answer:
                now = time.monotonic()
                if not first:
                    first = now
                    self._metrics.first_token(now - job.arrived, answer.prompt_token_count)
                else:
                    self._metrics.next_tokens(now - latest)
                latest = now
                job.post(step)
        finally:
            self._metrics.generated.inc(len(answer.token_ids))
        finished = _figures(answer, job, began, first or time.monotonic())
        self._metrics.finished(finished, time.monotonic() - job.arrived)
        job.post(finished)


def _stopped() -> ApiError:
    return ApiError(503, "the server was stopped", retry_after_s=10)


def _figures(answer: Answer, job: Job, began: float, first: float) -> Finished:
    assert answer.finish_reason is not None  # it is complete
    return Finished(
        answer.finish_reason,
        answer.prompt_token_count,
        sum(answer.profile.reused_tokens),
        len(answer.token_ids),
        tuple(counts for counts in answer.profile.rounds if counts.tree_size > 1),
        (began - job.arrived) * 1e3,
        (first - job.arrived) * 1e3,
        (time.monotonic() - first) * 1e3,
    )
