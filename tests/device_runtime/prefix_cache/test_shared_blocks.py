"""KV blocks shared by the sequences of an engine: computed once, cached, and evicted."""

from __future__ import annotations

import pytest

from edgellm.device_runtime import LLM, SamplingParams, SpecOptions

GREEDY = SamplingParams(temperature=0)
WAYS = {"plain": {}, "eagle": {"spec": SpecOptions(tree="fixed", top_k=2, steps=3, verify_size=8)}}
SYSTEM = " ".join(f"w{20 + at}" for at in range(40))


@pytest.fixture(params=WAYS)
def llm(request, shared_engine) -> LLM:
    return LLM(shared_engine, context_reuse=True, **WAYS[request.param])


@pytest.fixture(scope="module")
def fresh(shared_engine) -> LLM:
    return LLM(shared_engine)


def _ask(llm: LLM, *prompts: str, length: int = 6):
    return llm.generate_batch(list(prompts), sampling=GREEDY, max_generate_length=length)


def _reused(answers) -> list[int]:
    return [answer.timings()["reused_tokens"] for answer in answers]


def _same(answers, others) -> None:
    assert [one.token_ids for one in answers] == [one.token_ids for one in others]


def test_alternating_conversations_keep_their_blocks(llm, fresh):
    prompts = ["w50 w51 w52 w53", "w60 w61 w62", "w70 w71 w72 w73 w74"]
    known = [0, 0, 0]
    for turn in range(3):
        for at, prompt in enumerate(prompts):
            found = _ask(llm, prompt)
            _same(found, _ask(fresh, prompt))
            spared = llm._drafters is not None and found[0].finish_reason == "stop"
            assert known[at] - spared <= _reused(found)[0] <= known[at]
            known[at] = found[0].prompt_token_count + len(found[0].token_ids) - 1
            prompts[at] = f"{prompt} {found[0].text} w{80 + turn}"
    assert min(known) > 16


def test_shared_prefixes_of_a_batch_are_computed_once(llm, fresh):
    """Also during chunked prefill of the first."""
    prompts = [f"{SYSTEM} w{80 + at} w{70 + at}" for at in range(3)]
    found = _ask(llm, *prompts)
    _same(found, _ask(fresh, *prompts))
    assert _reused(found) == [0, 40, 40]
    later = _ask(llm, f"{SYSTEM} w90", f"{SYSTEM} w91")
    # The draft of the first read its own next token with the last shared row: that row is no
    # other's, and where its rows are taken rather than those of the others, one less is reused.
    spared = llm._drafters is not None
    assert all(40 - spared <= reused <= 40 for reused in _reused(later))
    _same(later, _ask(fresh, f"{SYSTEM} w90", f"{SYSTEM} w91"))


def test_finished_sequences_are_evicted_on_demand(llm, fresh):
    """Three times the cache's size; finished sequences are not swapped out."""
    kv_cache_manager, everything = llm.kv_cache_manager, llm.kv_cache_manager.base.num_free
    prompts = [" ".join(f"w{(7 * at + word) % 86 + 9}" for word in range(50)) for at in range(24)]
    found = _ask(llm, *prompts, length=12)
    _same(found, _ask(fresh, *prompts, length=12))
    assert 1 <= len(kv_cache_manager._finished.all) < len(prompts)
    assert kv_cache_manager.num_free == everything
    assert kv_cache_manager.base.num_free < everything
    last = _ask(llm, prompts[-1])
    assert _reused(last)[0] >= 48
    while kv_cache_manager._finished.evict():
        pass
    kv_cache_manager._retire()
    while kv_cache_manager._finished.evict():
        pass
    assert kv_cache_manager.base.num_free == everything


def test_without_the_flag_nothing_is_cached(shared_engine):
    llm = LLM(shared_engine)
    everything = llm.base.num_free
    assert _reused(_ask(llm, *[f"{SYSTEM} w80"] * 3)) == [0, 0, 0]
    assert llm.kv_cache_manager.num_free == everything
    assert llm.base.num_free == everything
