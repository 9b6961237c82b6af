"""Host work of a token, in Python function calls: each costs time after a pass."""

from __future__ import annotations

import sys

from edgellm.device_runtime import LLM, SamplingParams, SpecOptions

WORDS = "w1 w2 w3"


def calls_of_steps(answer, skipped: int, counted: int) -> list[int]:
    """Python calls of each of `counted` steps after the first `skipped`."""
    steps, calls = iter(answer), []

    def count(_, event, __):
        calls[-1] += event == "call"

    for _ in range(skipped):
        next(steps)
    before = sys.getprofile()
    try:
        for _ in range(counted):
            calls.append(0)
            sys.setprofile(count)
            next(steps)
            sys.setprofile(before)
    finally:
        sys.setprofile(before)
        steps.close()
    return calls


def test_a_plain_token_needs_few_python_calls(tiny_engine):
    """Little above the measured calls: 204 were 6 % of a token of SmolLM2."""
    with LLM(tiny_engine) as llm:
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        answer = llm.generate(WORDS, sampling=sampling, max_generate_length=24)
        calls = calls_of_steps(answer, 4, 8)
    assert max(calls) < 120


def test_paused_lookups_need_few_more_calls(tree_engine):
    """The draft and lookups of `--spec auto` only count then."""
    with LLM(tree_engine, spec=SpecOptions(network=None, lookups=("suffix", "ngram"))) as llm:
        assert llm._drafters is not None
        drafter = llm._drafters.start(greedy=True)
        drafter._controller.pace.text.pause = 1000
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        answer = llm.generate(WORDS, sampling=sampling, max_generate_length=24)
        calls = calls_of_steps(answer, 4, 8)
    assert max(calls) < 140
