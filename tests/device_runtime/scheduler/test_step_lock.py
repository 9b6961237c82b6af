"""Threads that share one LLM: served in order, with correct tokens, and not after `close`."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

import pytest

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime import LLM, SamplingParams
from edgellm.device_runtime.api.generation_request import GenerationRequest
from edgellm.device_runtime.scheduler import step_lock
from edgellm.device_runtime.speculate.options import SpecOptions

GREEDY = SamplingParams(temperature=0)
SYSTEM = "w50 w51 w52 w53"
Ask = Callable[[LLM], list[int]]


@pytest.fixture(autouse=True)
def _hurried_threads():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def _ids(answer) -> list[int]:
    for _ in answer:
        pass
    return answer.token_ids


def _asks() -> list[Ask]:
    """One output of every interface, with its own seed and prompt."""

    def by_entry(seed: int) -> list[Ask]:
        prompt, sampling = (
            f"w{20 + seed} w30 w{40 + seed}",
            SamplingParams(temperature=1.0, top_p=1.0, top_k=0, seed=seed),
        )
        message = {"role": "user", "content": prompt}
        fixed = {"sampling": sampling, "max_generate_length": 10}
        text = {"add_special_tokens": False, "stop": [], "system_prompt": SYSTEM}
        return [
            lambda llm: _ids(llm.generate(prompt, **fixed)),
            lambda llm: _ids(llm.generate([message], **{**fixed, "sampling": GREEDY})),
            lambda llm: _ids(llm.generate(prompt, speculative=False, **fixed)),
            lambda llm: _ids(
                llm.generate_text(GenerationRequest(text=f"{SYSTEM} {prompt}", **text, **fixed))
            ),
        ]

    return [ask for seed in range(6) for ask in by_entry(seed)]


WAYS = {
    "plain": {},
    "reuse": {"context_reuse": True},
    "eagle": {"spec": SpecOptions(lookups=("ngram",), tree="fixed"), "context_reuse": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_threads_get_the_outputs_of_single_requests(eagle_pair, way):
    llm, asks = LLM(eagle_pair.engine, **WAYS[way]), _asks()
    alone = [ask(llm) for ask in asks]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda ask: ask(llm), asks * 2))
    assert together == alone * 2


@pytest.mark.parametrize("way", WAYS)
def test_threads_with_two_requests_each(eagle_pair, way):
    """Every step waits for those of the others."""
    llm, prompts = LLM(eagle_pair.engine, **WAYS[way]), [f"w{at} w30" for at in range(20, 28)]

    def answers(some: list[str]) -> list[list[int]]:
        begun = [llm.generate(p, sampling=GREEDY, max_generate_length=8) for p in some]
        for _ in zip_longest(*begun):
            pass
        return [answer.token_ids for answer in begun]

    alone = [answers([prompt])[0] for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(answers, [prompts[at : at + 2] for at in range(0, 8, 2)])
        assert [ids for two in found for ids in two] == alone


def _begun(llm: LLM):
    steps = iter(llm.generate("w20 w30", sampling=GREEDY, max_generate_length=8))
    next(steps)
    return steps


def _rest(steps) -> list[int]:
    return [token for step in steps for token in step.token_ids]


def test_requests_wait_for_a_streaming_one(tiny_engine):
    """The next request starts after the last pass of the first, even if its output is unread."""
    llm, first_was_done = LLM(tiny_engine), []
    steps = _begun(llm)

    def ask():
        _ids(llm.generate("w40", sampling=GREEDY, max_generate_length=2))
        first_was_done.append(all(entry.is_done for entry in llm._turns._batch.entries))

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask)
        time.sleep(0.05)
        assert not first_was_done
        for _ in steps:
            time.sleep(0.005)
        waiting.result(10)
    assert first_was_done == [True]


def test_closing_an_iterator_admits_the_next_request(tiny_engine):
    llm = LLM(tiny_engine)
    answer = llm.generate("w20 w30", sampling=GREEDY, max_generate_length=8)
    for _ in answer:
        break
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(_asks()[0], llm).result(10)
    assert len(answer.token_ids) == 1


def test_a_long_paused_request_is_displaced(tiny_engine, monkeypatch):
    """A thread that waits for another with a paused request does not wait for ever."""
    monkeypatch.setattr(step_lock, "PATIENCE_S", 0.1)
    llm = LLM(tiny_engine)
    steps = _begun(llm)
    with ThreadPoolExecutor(2) as pool:
        asks = [pool.submit(ask, llm) for ask in _asks()[:2]]
        assert all(ask.result(10) for ask in asks)
    assert _rest(steps) == _rest(_begun(llm))


def test_a_thread_that_waits_for_another_request_frees_its_place(tiny_engine):
    """One thread waits already when the thread of the paused request starts another."""
    llm = LLM(tiny_engine)
    steps = _begun(llm)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(_asks()[0], llm)
        time.sleep(0.05)
        assert _asks()[1](llm)
        assert waiting.result(10)
    assert _rest(steps) == _rest(_begun(llm))


def test_a_closed_llm_raises(tiny_engine):
    with LLM(tiny_engine) as llm:
        steps = _begun(llm)
        unread, session = llm.generate("w20"), weakref.ref(llm.base)
    assert session() is None  # its memory is freed at once
    for use in (lambda: next(steps), lambda: _ids(unread), lambda: llm.generate("w20"),
                lambda: llm.base, lambda: llm.__enter__()):  # fmt: skip
        with pytest.raises(EdgeLLMError, match="the LLM was closed"):
            use()
    llm.close()


def test_close_ends_waiting_threads(tiny_engine):
    llm = LLM(tiny_engine)
    steps = _begun(llm)
    failures: list[str] = []

    def ask():
        with pytest.raises(EdgeLLMError) as found:
            _asks()[0](llm)
        failures.append(str(found.value))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    llm.close()
    for thread in threads:
        thread.join(60)
    assert failures == ["the LLM was closed"] * 3
    with pytest.raises(EdgeLLMError, match="the LLM was closed"):
        next(steps)
