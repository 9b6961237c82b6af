"""Concurrent requests by all interfaces of `LLM`: outputs equal those of single requests."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from edgellm.core.errors import (
    EdgeLLMError,
    RequestError,
)
from edgellm.device_runtime import LLM, SamplingParams, SpecOptions
from edgellm.device_runtime.networks.decoder import PassResult

GREEDY = SamplingParams(temperature=0)
KINDS = [
    GREEDY,
    SamplingParams(temperature=1.0, top_p=1.0, top_k=0, seed=7),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20, seed=5, num_logprobs=2),
]
PROMPTS = [f"w{20 + at} w30 w{40 + at}" for at in range(7)]
SAMPLINGS = [KINDS[at % 3] for at in range(7)]
WAYS = {
    "plain": {},
    "eagle": {"spec": SpecOptions(tree="fixed")},
    "eagle_by_cost": {"spec": SpecOptions(lookups=("ngram",)), "context_reuse": True},
    "auto": {"spec": SpecOptions(network="auto")},
}


@pytest.fixture
def _shared(monkeypatch):
    """Engines with batch size 3."""
    monkeypatch.setattr(LLM, "batch_size", 3)


def _facts(answer):
    logprobs = answer._entry.sequence.sampler.logprobs
    return answer.token_ids, answer.text, answer.finish_reason, [one.token_id for one in logprobs]


def _alone(llm, **options):
    found = []
    for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True):
        answer = llm.generate(prompt, sampling=sampling, **options)
        for _ in answer:
            pass
        found.append(_facts(answer))
    return found


@pytest.mark.parametrize("way", WAYS)
def test_batch_outputs_equal_single_outputs(shared_engine, way):
    llm = LLM(shared_engine, **WAYS[way])
    options = {"max_generate_length": 17, "stop": ["w77"]}
    expected = _alone(llm, speculative=False, **options)
    sizes = []
    llm.on_pass(lambda answers, _: sizes.append(answers))
    answers = llm.generate_batch(PROMPTS, sampling=SAMPLINGS, **options)
    assert [_facts(answer) for answer in answers] == expected
    assert max(sizes) == 3
    with ThreadPoolExecutor(5) as pool:  # and of threads
        asks = [
            pool.submit(llm.generate_batch, PROMPTS[at:], sampling=SAMPLINGS[at:], **options)
            for at in range(5)
        ]
        for at, ask in enumerate(asks):
            assert [_facts(answer) for answer in ask.result(60)] == expected[at:]


@pytest.mark.usefixtures("_shared")
def test_threads_share_passes(tiny_engine):
    llm, sizes = LLM(tiny_engine), []
    expected = _alone(llm, max_generate_length=40)
    llm.on_pass(lambda answers, _: sizes.append(answers))

    def ask(at):
        answer = llm.generate(PROMPTS[at], sampling=SAMPLINGS[at], max_generate_length=40)
        text = "".join(step.text for step in answer)
        assert text == answer.text
        return _facts(answer)

    with ThreadPoolExecutor(7) as pool:
        with llm._turns.visiting():  # until all of them wait
            asks = [pool.submit(ask, at) for at in range(7)]
            while len(llm._turns._batch.entries) < 7:
                time.sleep(0.001)
        assert [one.result(60) for one in asks] == expected
    assert max(sizes) == 3
    assert sum(sizes) / len(sizes) > 1.5


@pytest.mark.usefixtures("_shared")
def test_async_outputs_equal_plain_ones(tiny_engine):
    llm = LLM(tiny_engine)
    expected = _alone(llm, max_generate_length=12)

    async def ask(at):
        answer = llm.generate(PROMPTS[at], sampling=SAMPLINGS[at], max_generate_length=12)
        text = ""
        async for step in answer:
            text += step.text
        assert text == answer.text
        return _facts(answer)

    async def all_of_them():
        return await asyncio.gather(*map(ask, range(7)))

    assert asyncio.run(all_of_them()) == expected


class _Spoiling:
    """A session whose pass over one prompt gives NaN, or raises."""

    def __init__(self, session, happens):
        self.session, self.happens, self.capacity = session, happens, session.capacity

    def run_batch(self, parts):
        results, (part,) = self.session.run_batch(parts), parts
        if len(part.token_ids) == 3 and part.token_ids[0] == self.spoilt:
            return [self.happens(result) for result in results]
        return results

    def __getattr__(self, name):
        return getattr(self.session, name)


def _nan(result):
    return PassResult({"logits": np.full_like(result.logits, np.nan)[None]}, 3)


def _breaks(_):
    raise RuntimeError("the kernel broke")


@pytest.mark.usefixtures("_shared")
@pytest.mark.parametrize(
    ("happens", "reason"), [(_nan, "computed nan"), (_breaks, "RuntimeError: the kernel broke")]
)
def test_a_failed_request_does_not_affect_the_batch(tiny_engine, happens, reason):
    llm = LLM(tiny_engine)
    expected = _alone(llm, max_generate_length=12)
    llm.base = spoiling = _Spoiling(llm.base, happens)
    spoiling.spoilt = 23  # the first word of the fourth

    def ask(at):
        answer = llm.generate(PROMPTS[at], sampling=SAMPLINGS[at], max_generate_length=12)
        for _ in answer:
            pass
        return _facts(answer)

    with ThreadPoolExecutor(7) as pool:
        asks = [pool.submit(ask, at) for at in range(7)]
        with pytest.raises(EdgeLLMError, match=reason):
            asks.pop(3).result(30)
        assert [one.result(30) for one in asks] == expected[:3] + expected[4:]


@pytest.mark.usefixtures("_shared")
def test_before_pass_can_end_a_request(tiny_engine):
    """From any thread, queued or between two steps; other requests are not delayed."""
    llm = LLM(tiny_engine)
    expected = _alone(llm, max_generate_length=12)
    ends = threading.Event()

    def check():
        if ends.is_set():
            raise TimeoutError

    answers = [
        llm.generate(PROMPTS[at], sampling=SAMPLINGS[at], max_generate_length=12) for at in range(7)
    ]
    answers[0].before_pass = answers[5].before_pass = check
    steps = iter(answers[0])
    next(steps)
    ends.set()
    for failed in (steps, iter(answers[5])):
        with pytest.raises(TimeoutError):
            list(failed)
    rest = [answer for at, answer in enumerate(answers) if at not in (0, 5)]
    for _ in llm.together(rest):
        pass
    assert [_facts(answer) for answer in rest] == [*expected[1:5], expected[6]]
    assert len(answers[0].token_ids) == 1


@pytest.mark.usefixtures("_shared")
def test_an_interrupt_ends_only_its_pass(tiny_engine):
    llm = LLM(tiny_engine)
    expected = _alone(llm, max_generate_length=8)
    session, llm.base = llm.base, _Spoiling(llm.base, _interrupted)
    llm.base.spoilt = 23  # the first word of the fourth
    with pytest.raises(KeyboardInterrupt):
        llm.generate_batch(PROMPTS, sampling=SAMPLINGS, max_generate_length=8)
    llm.base = session
    answers = llm.generate_batch(PROMPTS, sampling=SAMPLINGS, max_generate_length=8)
    assert [_facts(answer) for answer in answers] == expected


def _interrupted(_):
    raise KeyboardInterrupt


def test_abandoned_requests_do_not_affect_others(tiny_engine):
    llm = LLM(tiny_engine)
    expected = _alone(llm, max_generate_length=8)
    answers = [
        llm.generate(prompt, sampling=how, max_generate_length=8)
        for prompt, how in zip(PROMPTS, SAMPLINGS, strict=True)
    ]
    for answer, _ in llm.together(iter(answers), 2):
        if answer is answers[1] and answer.is_complete:
            break
    assert _facts(answers[1]) == expected[1]
    assert not answers[6].is_complete
    again = llm.generate_batch(PROMPTS[:1], sampling=SAMPLINGS[:1], max_generate_length=8)
    assert _facts(again[0]) == expected[0]


@pytest.mark.parametrize(
    ("prompts", "options", "reason"),
    [
        ("w20", {}, "prompts 'w20' are not a list"),
        (["w20"], {"sampling": [GREEDY, GREEDY]}, "2 samplings for 1 prompts"),
        (["w20"], {"batch_size": 0}, "batch_size 0 is less than 1"),
        (["w20", 3], {}, "the prompt 3 is neither"),
    ],
)
def test_invalid_batches_are_rejected(tiny_engine, prompts, options, reason):
    with pytest.raises(RequestError, match=reason):
        LLM(tiny_engine).generate_batch(prompts, **options)


@pytest.mark.parametrize("bound", [0, -1, "fast", True, float("nan")])
def test_invalid_stall_bounds_are_rejected(tiny_engine, bound):
    with pytest.raises(RequestError, match=r"max_stall_ms .* is not a number above 0"):
        LLM(tiny_engine, max_stall_ms=bound)


def test_background_loop_confines_errors_to_their_job(shared_engine):
    """Each job gets the outputs of `together`; one with a failing listener delays no others."""
    llm = LLM(shared_engine)
    expected = [ids for ids, *_ in _alone(llm, max_generate_length=8)]
    driver = llm.driver()
    driver.start()

    def grow(at, on_steps):
        answers = [
            llm.generate(PROMPTS[at], sampling=SAMPLINGS[at], max_generate_length=8)
            for _ in range(2)
        ]
        driver.grow(answers, 2, on_steps)
        assert all(one.is_complete for one in answers)
        return [one.token_ids for one in answers]

    def fails(answer, _):
        if len(answer.token_ids) > 2:
            raise ValueError("listener failed")

    with ThreadPoolExecutor(8) as pool:
        bad = pool.submit(grow, 0, fails)
        good = [pool.submit(grow, at, lambda *_: None) for at in range(len(PROMPTS))]
        assert [one.result(60) for one in good] == [[ids, ids] for ids in expected]
        with pytest.raises(ValueError, match="listener failed"):
            bad.result(60)
    driver.end()
    driver.join(60)
    assert not driver.is_alive
    assert llm._turns._batch.entries == []
