"""The thread that owns the engine: how soon it stops, and what it survives."""

from __future__ import annotations

import logging
import queue
import time

import pytest

from edgellm.contract import EdgeLLMError, RequestError
from edgellm.device_runtime import LLM, SamplingParams
from edgellm.device_runtime.engine.llm import Step
from edgellm.tools.serve.asks import Ask
from edgellm.tools.serve.errors import ApiError
from edgellm.tools.serve.events import Failed, Finished, Started
from edgellm.tools.serve.metrics import Metrics
from edgellm.tools.serve.worker import Job, Worker

GREEDY = SamplingParams(temperature=0)


class _Passes:
    """A session in which something may happen at a pass."""

    def __init__(self, session):
        self.session, self.capacity, self.count = session, session.capacity, 0
        self.at, self.happens, self.before_pass = None, None, None

    def run(self, *arguments, **options):
        if self.before_pass is not None:
            self.before_pass()
        self.count += 1
        if self.count == self.at:
            self.happens()
        return self.session.run(*arguments, **options)

    def __getattr__(self, name):
        return getattr(self.session, name)


@pytest.fixture
def worker(roomy_engine):
    llm = LLM(roomy_engine)
    llm.session = passes = _Passes(llm.session)
    found = Worker(llm, Metrics("m"), queue_size=2, request_timeout_s=60)
    found.passes = passes
    found.start()
    yield found
    found.end()
    found.join()
    assert not found.is_alive


def _submit(worker, prompt="w20 w30", tokens=12):
    events = queue.Queue()
    job = Job((Ask(prompt, GREEDY, tokens),), events.put, time.monotonic() + 60)
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
    worker.passes.at, worker.passes.happens = 5, lambda: worker.abandon(worker._running)
    _, events = _submit(worker, tokens=3000)
    assert [type(events.get(timeout=60)) for _ in range(5)] == [Started, *[Step] * 4]
    _, after = _submit(worker)
    assert isinstance(_all(after)[-1], Finished)
    assert worker.passes.count == 5 + 12


def test_a_long_prompt_is_left_between_its_pieces(worker):
    prompt = " ".join(f"w{20 + index % 60}" for index in range(1000))
    pieces = -(-1000 // worker.llm.manifest.prefill_rows)
    assert pieces > 1
    worker.passes.at, worker.passes.happens = 1, lambda: worker.abandon(worker._running)
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
def test_whatever_fails_the_next_answer_is_right(worker, error, caplog):
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


def test_a_full_queue_and_the_end(worker):
    _submit(worker, tokens=3000)
    while worker._running is None:
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
