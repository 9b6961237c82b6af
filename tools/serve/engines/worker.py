"""The queue of an engine, and one thread for each sequence of its batch."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edgellm.core.errors import (
    EdgeLLMError,
    UnexpectedError,
)
from edgellm.device_runtime.api.llm import LLM, RequestOutput, Step
from edgellm.device_runtime.api.pooler import EmbeddingInput, RerankInput
from edgellm.device_runtime.request_faults import as_failure
from edgellm.device_runtime.scheduler.running_batch import OutOfTimeError
from edgellm.device_runtime.scheduler.scheduler import AGING_S
from edgellm.tools.serve import heap
from edgellm.tools.serve.engines.ask import Ask, EngineRequest, start
from edgellm.tools.serve.engines.events import Event, Failed, Finished, OutputSwitch, Started
from edgellm.tools.serve.engines.metrics import Metrics
from edgellm.tools.serve.http.errors import ApiError

_log = logging.getLogger(__name__)
_EMBEDDING_JOBS = 8  # of an engine that embeds: their texts share passes


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


class Worker:
    """Runs jobs concurrently: one thread starts each job, one thread computes the batch."""

    def __init__(
        self, *, llm: LLM, metrics: Metrics, queue_size: int, request_timeout_s: float
    ) -> None:
        self.llm, self._metrics = llm, metrics
        self._size, self._request_timeout_s = queue_size, request_timeout_s
        self._waiting: list[Job] = []
        self._changed = threading.Condition()
        self.running: list[Job] = []
        self._draining = self._stopping = False
        self._mean_s = 1.0  # moving average of a request's time
        self._threads = [
            threading.Thread(target=self._work, name=f"answer-{number}", daemon=True)
            for number in range(max(llm.batch_size, _EMBEDDING_JOBS if llm.embeds else 1))
        ]
        self._driver = llm.driver()
        metrics.watch(lambda: len(self.running), lambda: len(self._waiting), llm)

    @property
    def is_alive(self) -> bool:
        """Whether the threads run."""
        return self._driver.is_alive and all(thread.is_alive() for thread in self._threads)

    @property
    def is_ready(self) -> bool:
        """Whether the worker accepts jobs while the queue has room."""
        return self.is_alive and not self._draining

    def start(self) -> None:
        """Start the threads."""
        self._driver.start()
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
        self._driver.end()
        self._driver.join(30)

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
            raise too_late(f"no token was computed within {limit}: shorten the prompt")

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

    def _run(self, job: Job, began: float) -> None:
        self._check(job)
        # A faulty prompt fails before the first sequence is computed.
        asks = [ask for ask in job.asks if isinstance(ask, EngineRequest)]
        answers = [start(self.llm, ask) for ask in asks]
        for at, answer in enumerate(answers):
            answer.before_pass = functools.partial(self._check, job, answers)
            job.notify(at, self._started(asks[at], answer))
        if answers:
            self._generate(job, answers, began)
        texts = [ask for ask in job.asks if isinstance(ask, EmbeddingInput | RerankInput)]
        if texts:
            self._embed(job, texts, began)

    def _started(self, ask: EngineRequest, answer: RequestOutput) -> Started:
        if ask.prompt_logprobs is None:
            return Started(answer.prompt_token_count)
        ids = answer.prompt.token_ids
        before_pass = answer.before_pass or _no_check
        found = self.llm.read_logprobs(ids, ask.prompt_logprobs, before_pass, ask.lora)
        return Started(len(ids), tuple(ids), tuple(found))

    def _embed(self, job: Job, asks: Sequence[EmbeddingInput | RerankInput], began: float) -> None:
        """Compute all texts of a job, with short ones of other jobs, and post their vectors."""
        found = self.llm.embed_inputs(asks, functools.partial(self._check, job))
        queue_ms, now = (began - job.arrived) * 1e3, time.monotonic()
        for embedding in found:
            finished = Finished(
                finish_reason="stop",
                prompt_tokens=embedding.prompt_tokens,
                cached_tokens=0,
                completion_tokens=0,
                rounds=(),
                queue_ms=queue_ms,
                first_token_ms=(now - job.arrived) * 1e3,
                generation_ms=0.0,
                embedding=embedding.vector,
            )
            self._metrics.finished(finished, now - job.arrived)
            job.post(finished)

    def _generate(self, job: Job, answers: list[RequestOutput], began: float) -> None:
        """Generate the sequences of a job concurrently, and post their events."""
        times = {answer: _StepTimes(at=at) for at, answer in enumerate(answers)}

        def on_steps(answer: RequestOutput, steps: tuple[Step, ...]) -> None:
            one = times[answer]
            for step in steps:
                self._record_step(job, one, answer)
                job.notify(one.at, step)
            if answer.is_complete:
                self._count_tokens(one, answer)  # an end token has no step of its own
                finished = _figures(answer, job, began, one.first or time.monotonic())
                self._metrics.finished(finished, time.monotonic() - job.arrived)
                job.notify(one.at, finished)

        try:
            self._driver.grow(answers, self.llm.batch_size, on_steps)
        finally:
            for answer, one in times.items():
                self._count_tokens(one, answer)

    def _count_tokens(self, one: _StepTimes, answer: RequestOutput) -> None:
        self._metrics.generated.inc(len(answer.token_ids) - one.counted)
        one.counted = len(answer.token_ids)

    def _record_step(self, job: Job, one: _StepTimes, answer: RequestOutput) -> None:
        self._count_tokens(one, answer)
        now = time.monotonic()
        if not one.first:
            one.first = now
            self._metrics.first_token(now - job.arrived, answer.prompt_token_count)
        else:
            self._metrics.next_tokens(now - one.latest)
        one.latest = now


@dataclass(slots=True, kw_only=True)
class _StepTimes:
    """Times of the first and the latest step of a sequence, and its counted tokens."""

    at: int  # index among the sequences of its request
    counted: int = 0  # tokens
    first: float = 0.0  # 0: none yet
    latest: float = 0.0


def _no_check() -> None:
    """Never raises."""


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


def _figures(answer: RequestOutput, job: Job, began: float, first: float) -> Finished:
    assert answer.finish_reason is not None  # it is complete
    return Finished(
        finish_reason=answer.finish_reason,
        prompt_tokens=answer.prompt_token_count,
        cached_tokens=sum(answer.profile.reused_tokens),
        completion_tokens=len(answer.token_ids),
        rounds=tuple(counts for counts in answer.profile.rounds if counts.tree_size > 1),
        queue_ms=(began - job.arrived) * 1e3,
        first_token_ms=(first - job.arrived) * 1e3,
        generation_ms=(time.monotonic() - first) * 1e3,
        stop_string=answer.stop_string,
        seed=answer.seed,
    )
