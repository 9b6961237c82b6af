"""The worker of a language model: one thread for each sequence of its batch."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgellm.device_runtime.api.llm import LLM, RequestOutput, Step
from edgellm.device_runtime.api.pooler import EmbeddingInput, RerankInput
from edgellm.tools.serve.engines.ask import EngineRequest, start
from edgellm.tools.serve.engines.events import Finished, Started
from edgellm.tools.serve.engines.metrics import Metrics
from edgellm.tools.serve.engines.worker import Job, Worker

_EMBEDDING_JOBS = 8  # of an engine that embeds: their texts share passes


class LLMWorker(Worker):
    """Runs jobs concurrently: one thread starts each job, one thread computes the batch."""

    def __init__(
        self, *, llm: LLM, metrics: Metrics, queue_size: int, request_timeout_s: float
    ) -> None:
        super().__init__(
            engine=llm,
            metrics=metrics,
            queue_size=queue_size,
            request_timeout_s=request_timeout_s,
            num_threads=max(llm.batch_size, _EMBEDDING_JOBS if llm.embeds else 1),
        )
        self.llm, self._driver = llm, llm.driver()
        metrics.watch_batch(llm)

    @property
    def adapters(self) -> dict[str, Path]:
        """See `Worker`."""
        return self.llm.adapters

    @property
    def is_alive(self) -> bool:
        """See `Worker`."""
        return self._driver.is_alive and super().is_alive

    def start(self) -> None:
        """See `Worker`."""
        self._driver.start()
        super().start()

    def join(self) -> None:
        """See `Worker`."""
        super().join()
        self._driver.end()
        self._driver.join(30)

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
