"""Outputs of an LLM that speculates: ends inside an accepted path, pauses of the caller, text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from scripted_sessions import StrictBase, StrictDraft, oracle, recorded
from stepping import by_cost, learned_of

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime import LLM, SamplingParams
from edgellm.device_runtime.engine.kv_cache_manager import KVCacheManager
from edgellm.device_runtime.scheduler.running_batch import Batch
from edgellm.device_runtime.scheduler.scheduler import Bounds
from edgellm.device_runtime.scheduler.step_lock import StepLock
from edgellm.device_runtime.speculate.draft_cache import DraftKVCaches
from edgellm.device_runtime.speculate.drafters.eagle import EagleDrafter
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.device_runtime.speculate.policy.costs import Costs
from edgellm.device_runtime.speculate.policy.tree_policy import FixedTree, TreeLimits

GREEDY = SamplingParams(temperature=0)
LIMITS = TreeLimits(top_k=2, steps=5, verify_size=11)
FREE = Costs.of({"1": 10, "64": 10.01}, {"1": 0.01, "64": 0.02}, {"1": 0.01, "64": 0.02})
PROMPT = "w20 w21 w22"


@dataclass
class Drafters:
    """As `open_drafter.Drafters`, around a scripted draft."""

    make: Callable[[], EagleDrafter]
    caches: tuple[DraftKVCaches, ...]
    options: SpecOptions

    def start(self, *, greedy: bool) -> EagleDrafter:
        assert greedy
        return self.make()


@pytest.fixture(scope="module")
def llm(tiny_engine) -> LLM:
    return LLM(tiny_engine)


@pytest.fixture(params=["fixed", "cost"])
def scripted(request, llm, monkeypatch):
    """Script the next outputs as a list of words that the draft predicts."""

    def script(*words, capacity=64):
        ids = [llm.tokenizer.encode(word, add_special_tokens=False)[0] for word in words]

        def logits_of(context):
            logits = np.linspace(0, 1, 96, dtype=np.float32)
            logits[ids[min(len(context) - 3, len(ids) - 1)]] = 9
            return logits

        session = StrictDraft(capacity, lambda context: oracle(context, logits_of))
        fixed = request.param == "fixed"
        learned = learned_of(FixedTree(LIMITS)) if fixed else by_cost(LIMITS, FREE)
        rows = DraftKVCaches(network=session, round_rows=LIMITS.steps + 1)

        def make():
            return EagleDrafter(
                caches=rows, learned=learned, limits=LIMITS, costs=FREE, max_tree_rows=10
            )

        base = StrictBase(capacity, logits_of)
        kv_cache_manager = KVCacheManager(
            base=recorded(base), prefill_rows=llm.manifest.prefill_rows, drafts=(rows,)
        )
        monkeypatch.setattr(llm, "_kv_cache_manager", kv_cache_manager)
        monkeypatch.setattr(
            llm,
            "_turns",
            StepLock(
                Batch(
                    kv_cache_manager,
                    Bounds(max_running=1, prefill_rows=kv_cache_manager.prefill_rows, tree_rows=10),
                )
            ),
        )
        monkeypatch.setattr(llm, "_drafters", Drafters(make, (rows,), SpecOptions()))
        return base

    return script


WORDS = [f"w{at}" for at in range(30, 44)]


def _text(length: int) -> str:
    """The first words, which continue the prompt."""
    return "".join(f" {word}" for word in WORDS[:length])


def test_a_step_holds_a_whole_path(scripted, llm):
    scripted(*WORDS)
    answer = llm.generate(PROMPT, sampling=GREEDY, max_generate_length=13)
    steps = list(answer)
    assert [len(step.token_ids) for step in steps] == [1, 6, 6]
    assert answer.text == _text(13)
    assert answer.finish_reason == "length"
    assert answer.timings()["spec_verify_count"] == 2
    assert answer.timings()["spec_acceptance_length"] == 6


@pytest.mark.parametrize("place", range(9))
def test_an_end_token_inside_a_path(scripted, llm, place):
    scripted(*WORDS[:place], "</s>", *WORDS)
    answer = llm.generate(PROMPT, sampling=GREEDY, max_generate_length=40)
    steps = list(answer)
    assert answer.text == _text(place)
    assert answer.finish_reason == "stop"
    assert len(answer.token_ids) == place + 1
    assert answer.token_ids[-1] == 2
    assert sum(counts.emitted for counts in answer.profile.rounds) == place
    assert "".join(step.text for step in steps) == answer.text
    plain = llm.generate(PROMPT, sampling=GREEDY, max_generate_length=40, speculative=False)
    list(plain)
    assert (plain.token_ids, plain.text) == (answer.token_ids, answer.text)


@pytest.mark.parametrize("place", range(8))
def test_a_stop_string_inside_a_path(scripted, llm, place):
    scripted(*WORDS)
    stop = f"{WORDS[place]} {WORDS[place + 1]}"
    answer = llm.generate(PROMPT, sampling=GREEDY, max_generate_length=14, stop=[stop])
    list(answer)
    assert answer.text == _text(place) + " "
    assert answer.finish_reason == "stop"
    assert len(answer.token_ids) == place + 2


@pytest.mark.parametrize("length", range(1, 14))
def test_the_length_ends_inside_a_path(scripted, llm, length):
    scripted(*WORDS)
    answer = llm.generate(PROMPT, sampling=GREEDY, max_generate_length=length)
    list(answer)
    assert answer.text == _text(length)
    assert (len(answer.token_ids), answer.finish_reason) == (length, "length")


def test_next_request_starts_fresh(scripted, llm):
    scripted(*WORDS)
    for stop in (["w33"], [], ["w31"]):
        answer = llm.generate(PROMPT, sampling=GREEDY, max_generate_length=8, stop=stop)
        list(answer)
        expected = _text(8)
        assert answer.text == (expected.split(stop[0])[0] if stop else expected)


def test_concurrent_requests_do_not_mix(scripted, llm):
    scripted(*WORDS)
    first = llm.generate(PROMPT, sampling=GREEDY, max_generate_length=13)
    steps = iter(first)
    next(steps)
    list(llm.generate(PROMPT, sampling=GREEDY, max_generate_length=3))
    assert [len(step.token_ids) for step in steps] == [6, 6]
    assert first.text == _text(13)


def test_nan_logits_end_the_request(scripted, llm):
    session = scripted(*WORDS)
    healthy = session.logits_of
    session.logits_of = lambda context: healthy(context) + (np.nan if len(context) > 8 else 0)
    with pytest.raises(EdgeLLMError, match="computed nan"):
        list(llm.generate(PROMPT, sampling=GREEDY, max_generate_length=13))
