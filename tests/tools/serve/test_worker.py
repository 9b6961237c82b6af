"""The worker of an engine: cancellation, failures, priorities."""

from __future__ import annotations

import logging
import queue
import re
import time

import pytest

from edgellm.core.errors import (
    EdgeLLMError,
    RequestError,
)
from edgellm.device_runtime import LLM, SamplingParams
from edgellm.device_runtime.api.llm import Step
from edgellm.tools.serve.engines.ask import EngineRequest
from edgellm.tools.serve.engines.events import Failed, Finished, Started
from edgellm.tools.serve.engines.llm_worker import LLMWorker
from edgellm.tools.serve.engines.metrics import Metrics
from edgellm.tools.serve.engines.worker import Job
from edgellm.tools.serve.http.errors import ApiError

GREEDY = SamplingParams(temperature=0)


class _Passes:
    """A session with a hook for each forward pass."""

    def __init__(self, session):
        self.session, self.capacity, self.count = session, session.capacity, 0
        self.at, self.happens = None, None

    def run_batch(self, parts):
        self.count += 1
        if self.count == self.at:
            self.happens()
        return self.session.run_batch(parts)

    def __getattr__(self, name):
        return getattr(self.session, name)


def _working(llm, queue_size):
    llm.base = passes = _Passes(llm.base)
    found = LLMWorker(llm=llm, metrics=Metrics("m"), queue_size=queue_size, request_timeout_s=60)
    found.passes = passes
    found.start()
    yield found
    found.end()
    found.join()
    assert not found.is_alive


@pytest.fixture
def worker(roomy_engine):
    yield from _working(LLM(roomy_engine), 2)


def _submit(worker, prompt="w20 w30", tokens=12):
    events = queue.Queue()
    job = Job(
        asks=(EngineRequest(prompt=prompt, sampling=GREEDY, max_tokens=tokens),),
        post=events.put,
        deadline=time.monotonic() + 60,
    )
    worker.submit(job)
    return job, events


def _all(events):
    found = [events.get(timeout=60)]
    while not isinstance(found[-1], (Finished, Failed)):
        found.append(events.get(timeout=60))
    return found


def test_events_come_in_order(worker):
    _, events = _submit(worker)
    first, *steps, last = _all(events)
    assert first == Started(2)
    assert all(isinstance(step, Step) for step in steps)
    assert last.completion_tokens == sum(len(step.token_ids) for step in steps) == 12


def test_an_abandoned_answer_costs_no_further_pass(worker):
    worker.passes.at, worker.passes.happens = 5, lambda: worker.abandon(*worker.running)
    _, events = _submit(worker, tokens=3000)
    assert [type(events.get(timeout=60)) for _ in range(5)] == [Started, *[Step] * 4]
    _, after = _submit(worker)
    assert isinstance(_all(after)[-1], Finished)
    assert worker.passes.count == 5 + 12


def test_a_long_prompt_is_left_between_its_pieces(worker):
    prompt = " ".join(f"w{20 + index % 60}" for index in range(1000))
    worker.llm.kv_cache_manager.prefill_rows = 256  # whatever the build measured
    worker.passes.at, worker.passes.happens = 1, lambda: worker.abandon(*worker.running)
    _submit(worker, prompt)
    _, after = _submit(worker)
    assert isinstance(_all(after)[-1], Finished)
    assert worker.passes.count == 1 + 12


def _raising(error):
    def raises():
        raise error

    return raises


@pytest.mark.parametrize(
    "error",
    [RuntimeError("the kernel broke"), MemoryError(), EdgeLLMError("not a number"),
     RequestError("odd")],
)  # fmt: skip
def test_requests_after_a_failure_are_correct(worker, error, caplog):
    _, before = _submit(worker)
    expected = [step.text for step in _all(before)[1:-1]]
    worker.passes.at, worker.passes.happens = worker.passes.count + 4, _raising(error)
    _, failed = _submit(worker)
    _, after = _submit(worker)
    with caplog.at_level(logging.ERROR):
        assert _all(failed)[-1] == Failed(error)
    assert [step.text for step in _all(after)[1:-1]] == expected
    is_unexpected = not isinstance(error, EdgeLLMError)
    assert bool(caplog.records) == is_unexpected  # the log has the traceback of these alone


def test_a_full_queue_gives_429_and_a_draining_server_503(worker):
    _submit(worker, tokens=3000)
    while not worker.running:
        time.sleep(0.001)
    waiting = [_submit(worker)[1] for _ in range(2)]
    with pytest.raises(ApiError, match="2 requests are waiting") as caught:
        _submit(worker)
    assert caught.value.status == 429
    worker.drain()
    with pytest.raises(ApiError, match="about to stop") as caught:
        _submit(worker)
    assert caught.value.status == 503
    worker.end()
    for events in waiting:
        (failed,) = _all(events)
        assert failed.error.status == 503


def test_a_job_whose_time_is_over_has_what_was_generated(worker):
    _, whole = _submit(worker, tokens=30)
    expected = [step.text for step in _all(whole)[1:-1]]
    worker.passes.at = worker.passes.count + 7

    def time_is_over():
        worker.running[0].until = 0.0

    worker.passes.happens = time_is_over
    _, cut = _submit(worker, tokens=30)
    _, *steps, last = _all(cut)
    assert [step.text for step in steps] == expected[:7]
    assert (last.finish_reason, last.completion_tokens) == ("length", 7)


def test_a_job_without_a_token_says_that_its_time_was_over(worker):
    """The status is one after which OpenAI's clients do not retry."""
    worker._request_timeout_s = 0.0
    before = worker.passes.count
    _, events = _submit(worker)
    error = _all(events)[-1].error
    assert "no token was computed within --requestTimeout 0 s" in str(error)
    assert (error.status, error.code, error.kind) == (422, "timeout", "timeout_error")
    assert worker.passes.count == before


# ------------------------------------------------------------------ several at a time
@pytest.fixture
def shared_worker(roomy_engine, monkeypatch):
    """The worker of an engine with batch size 3."""
    monkeypatch.setattr(LLM, "batch_size", 3)
    yield from _working(LLM(roomy_engine), 20)


def _texts(events):
    return "".join(step.text for step in _all(events)[1:-1])


def test_concurrent_jobs_equal_the_jobs_alone(worker, shared_worker):
    asks = [(f"w{20 + at} w30", 10 + 5 * at) for at in range(8)]
    alone = [_texts(_submit(worker, *ask)[1]) for ask in asks]
    with shared_worker.llm._turns.visiting():  # no pass before all are there
        submitted = [_submit(shared_worker, *ask)[1] for ask in asks]
    assert [_texts(events) for events in submitted] == alone
    figures = shared_worker._metrics.page().decode()
    (passes,) = re.findall(r"batch_size_count\S* (\S+)", figures)
    (answers,) = re.findall(r"batch_size_sum\S* (\S+)", figures)
    assert float(answers) == sum(tokens for _, tokens in asks)
    assert float(passes) < float(answers)


def test_an_abandoned_job_delays_no_other_job(shared_worker):
    """One of three running jobs is abandoned; a fourth takes its place at once."""
    with shared_worker.llm._turns.visiting():
        submitted = [_submit(shared_worker, tokens=500) for _ in range(3)]
        while len(shared_worker.running) < 3:
            time.sleep(0.001)
        _, fourth = _submit(shared_worker, tokens=4)
        (first, gone), *others = submitted
        shared_worker.passes.at = 20
        shared_worker.passes.happens = lambda: shared_worker.abandon(first)
    assert _all(fourth)[-1].completion_tokens == 4
    assert [_all(events)[-1].completion_tokens for _, events in others] == [500, 500]
    assert gone.qsize() < 20  # what came of it before


def test_lower_priority_values_run_first_and_waiting_raises_them(worker):
    ended, worker._size = [], 9
    with worker.llm._turns.visiting():
        _submit(worker, tokens=2)
        while not worker.running:
            time.sleep(0.001)
        for priority, age_s in ((1, 0), (0, 0), (2, 3000), (0, 0)):
            name = f"{priority} {age_s}"
            job, _ = _submit(worker, tokens=2)
            job.priority, job.arrived = priority, job.arrived - age_s
            job.post = lambda event, name=name: isinstance(event, Finished) and ended.append(name)
    while len(ended) < 4:
        time.sleep(0.001)
    assert ended == ["2 3000", "0 0", "0 0", "1 0"]


def test_the_end_reaches_all_who_run_and_wait(shared_worker):
    events = [_submit(shared_worker, tokens=3000)[1] for _ in range(5)]
    while len(shared_worker.running) < 3:
        time.sleep(0.001)
    shared_worker.end()
    assert [_all(one)[-1].error.status for one in events] == [503] * 5
