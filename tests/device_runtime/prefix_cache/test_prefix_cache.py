"""Prefix cache: outputs are unchanged, and the expected number of positions is reused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from edgellm.device_runtime import LLM, SamplingParams
from edgellm.device_runtime.engine.profile import Profile
from edgellm.device_runtime.engine.prompt import Prompt
from edgellm.device_runtime.prefix_cache.pinned_prefixes import (
    PinnedKV,
    PinnedPrefix,
    PinnedPrefixes,
)
from edgellm.device_runtime.request_files.request_file import Options
from edgellm.device_runtime.request_files.responses import run_request
from edgellm.device_runtime.speculate.options import SpecOptions

GREEDY = SamplingParams(temperature=0)
FIXED = SpecOptions(network="eagle", tree="fixed")
Messages = list[dict[str, str]]


def ask(model: LLM, prompt: str | Messages, length: int = 6, **options: Any):
    options = {"sampling": GREEDY, **options}
    answer = model.generate(prompt, max_generate_length=length, **options)
    list(answer)
    return answer


def reused(answer) -> int:
    return answer.timings()["reused_tokens"]


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.fixture(scope="module")
def plain(tiny_engine) -> LLM:
    return LLM(tiny_engine)


@pytest.fixture
def reusing(tiny_engine) -> LLM:
    return LLM(tiny_engine, context_reuse=True)


def test_turns_of_a_conversation_reuse_the_prefix(reusing, plain):
    messages, known = [], 0
    for question in ("w20 w21 w22", "w23", "w24 w25"):
        messages.append(say("user", question))
        answer = ask(reusing, messages)
        assert answer.token_ids == ask(plain, messages).token_ids
        assert reused(answer) == known
        known = answer.prompt_token_count + len(answer.token_ids) - 1
        messages.append(say("assistant", answer.text))


def test_without_the_flag_nothing_is_reused(plain):
    for _ in range(2):
        assert reused(ask(plain, "w20 w21 w22")) == 0


def test_rates_count_only_computed_tokens(reusing):
    first, second = (ask(reusing, "w20 w21 w22 w23") for _ in range(2))
    assert [reused(first), reused(second)] == [0, 3]
    profile = Profile()
    for answer, computed in ((first, 4), (second, 1)):
        timings = answer.timings()
        rate = timings["prefill_tokens_per_second"] * timings["prefill_ms"] / 1e3
        assert rate == pytest.approx(computed)
        profile.add(answer.profile)
    report = profile.as_json()["prefill"]
    assert (report["reused_tokens"], report["computed_tokens"]) == (3, 5)
    assert report["tokens_per_second"] * profile.total_ms("llm_prefill") / 1e3 == pytest.approx(5)


def test_abandoned_outputs_are_reused(reusing, plain):
    prompt = "w30 w31 w32 w33"
    steps = iter(reusing.generate(prompt, sampling=GREEDY, max_generate_length=9))
    begun = [token for _ in range(3) for token in next(steps).token_ids]
    answer = ask(reusing, f"{prompt} w34")
    assert reused(answer) == 4
    assert answer.token_ids == ask(plain, f"{prompt} w34").token_ids
    goes_on = f"{prompt} {reusing.tokenizer.decode(begun)}"
    assert ask(reusing, goes_on).token_ids == ask(plain, goes_on).token_ids


def test_passes_outside_of_requests_leave_the_cache_intact(reusing, plain):
    """`--prove` computes prompts without a request."""
    from edgellm.device_runtime.engine.step import prefill_chunk

    ask(reusing, "w30 w31 w32 w33")
    prefill_chunk(reusing.base, reusing.base.new_kv(), Prompt([30, 31, 50, 51]), 0, 64)
    answer = ask(reusing, "w30 w31 w32 w33")
    assert reused(answer) == 3
    assert answer.token_ids == ask(plain, "w30 w31 w32 w33").token_ids


def test_plain_and_speculative_requests_alternate(eagle_pair):
    """After plain requests the base recomputes the hidden states that the draft has missed."""
    model = LLM(eagle_pair.engine, spec=FIXED, context_reuse=True)
    fresh = LLM(eagle_pair.engine)
    text, rounds, in_base, in_draft = "w20 w21 w22 w23", 0, 0, 0
    sampled = SamplingParams(
        temperature=1.0, top_p=1.0, top_k=0, seed=7
    )  # has a drafter of its own
    for at, (speculative, sampling) in enumerate(
        [(True, GREEDY), (True, sampled), (False, GREEDY), (False, sampled), (True, GREEDY),
         (True, GREEDY), (False, GREEDY), (True, sampled)]
    ):  # fmt: skip
        answer = ask(model, text, 5, speculative=speculative, sampling=sampling)
        assert answer.token_ids == ask(fresh, text, 5, sampling=sampling).token_ids
        rounds += len(answer.profile.rounds)
        assert reused(answer) == (min(in_base, in_draft) if speculative else in_base)
        in_base = answer.prompt_token_count + len(answer.token_ids) - 1
        if speculative:  # its last row holds the end token, which the text does not
            in_draft = in_base - (answer.finish_reason == "stop")
        text = f"{text} {answer.text} w{40 + at}"
    assert rounds


def request(*messages: dict[str, str], saves: bool = False, **options: Any) -> dict[str, Any]:
    fields = {"messages": list(messages), "temperature": 0, "max_generate_length": 5, **options}
    return {**fields, "save_system_prompt_kv_cache": saves}


def respond(model: LLM, raw: dict[str, Any]) -> dict[str, Any]:
    return run_request(model, Options(), raw, 0, Profile(), lambda *_: None)


SYSTEM = say("system", "w50 w51 w52 w53")
LENGTH = len(["system", ":", "w50", "w51", "w52", "w53", "."])


@pytest.mark.parametrize("eagle", [None, FIXED], ids=["plain", "eagle"])
def test_a_saved_system_prompt_outlasts_other_prompts(eagle_pair, eagle):
    model, fresh = LLM(eagle_pair.engine, spec=eagle), LLM(eagle_pair.engine)
    first = respond(model, request(SYSTEM, say("user", "w20"), saves=True))
    assert "warnings" not in first
    found = [first]
    for raw in (
        request(say("user", "w60 w61 w62 w63 w64 w65 w66 w67")),
        request(SYSTEM, say("user", "w21 w22")),
        request(say("system", "w50 w51 w52 w99"), say("user", "w21")),
        request(say("user", "w60")),
        request(SYSTEM, say("user", "w21 w23"), saves=True),
        request(SYSTEM, say("user", "w24"), disable_spec_decode=True),
    ):
        found.append(respond(model, raw))
        assert found[-1]["output_text"] == respond(fresh, raw)["output_text"]
    common = 5 if eagle is None else 4  # of system prompts that differ at the end
    assert [one["timings"]["reused_tokens"] for one in found] == [
        0, 0, LENGTH, common, 0, LENGTH, LENGTH,
    ]  # fmt: skip


def test_the_longer_of_cached_and_pinned_prefix_is_used(tiny_engine, plain):
    model = LLM(tiny_engine, context_reuse=True)
    turn = request(SYSTEM, say("user", "w20 w21 w22"), saves=True)
    respond(model, turn)
    assert respond(model, turn)["timings"]["reused_tokens"] == LENGTH + 7
    respond(model, request(say("user", "w60 w61")))
    answer = respond(model, turn)
    assert answer["timings"]["reused_tokens"] == LENGTH
    assert answer["output_text"] == respond(plain, turn)["output_text"]


def test_prefixes_that_cannot_be_pinned_give_a_warning(tiny_engine):
    model = LLM(tiny_engine)
    answer = respond(model, request(say("user", "w20"), saves=True))
    assert answer["warnings"] == ["nothing was pinned: the prompt has no separate system prompt"]
    model.kv_cache_manager.pinned = PinnedPrefixes(limit_bytes=LENGTH)
    answer = respond(model, request(SYSTEM, say("user", "w20"), saves=True))
    assert answer["warnings"] == [f"the system prompt takes more than {LENGTH} bytes: not kept"]
    respond(model, request(say("user", "w60 w61")))
    answer = respond(model, request(SYSTEM, say("user", "w20")))
    assert answer["timings"]["reused_tokens"] == 0


def test_the_flag_and_the_profile(command, tiny_engine, tmp_path):
    source, output, profile = (tmp_path / name for name in ("in.json", "out.json", "p.json"))
    turns = [request(SYSTEM, say("user", text)) for text in ("w20", "w20 w21")]
    source.write_text(json.dumps({"requests": turns}))
    responses = {}
    for more in ((), ("--enableContextReuse",)):
        result = command(
            "llm_inference", "--engineDir", tiny_engine, "--inputFile", source,
            "--outputFile", output, "--profileOutputFile", profile, *more,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        responses[more] = json.loads(output.read_text())["responses"]
    without, reusing = responses.values()
    assert [one["output_text"] for one in without] == [one["output_text"] for one in reusing]
    known = LENGTH + len(["user", ":", "w20"])
    assert [one["timings"]["reused_tokens"] for one in (*without, *reusing)] == [0, 0, 0, known]
    assert f"{known} prompt tokens reused" in result.stdout
    prefill = json.loads(profile.read_text())["prefill"]
    total = sum(one["prompt_token_count"] for one in reusing)
    assert (prefill["reused_tokens"], prefill["computed_tokens"]) == (known, total - known)


def test_a_pinned_hidden_state_fits_any_next_token():
    """Files of older versions have none, but one more KV position of the draft."""
    base, wide, narrow = (np.zeros((2, rows, 4), np.float32) for rows in (3, 3, 2))
    feature = np.zeros((1, 9), np.float32)
    older = PinnedPrefix((5, 6, 7, 8), (PinnedKV(values=base), PinnedKV(values=wide)))
    newer = PinnedPrefix(
        (5, 6, 7, 8), (PinnedKV(values=base), PinnedKV(values=narrow, feature=feature))
    )
    assert older.length == newer.length == 3
    for keys, with_row, with_feature in (
        ((5, 6, 7, 8, 9), 3, 3),
        ((5, 6, 7, 9), 2, 3),
        ((5, 6, 9), 1, 1),
        ((5,), 0, 0),
        ((9, 6), 0, 0),
    ):
        assert (older.usable(keys, 2), newer.usable(keys, 2)) == (with_row, with_feature)
        assert older.usable(keys, 1) == newer.usable(keys, 1) >= with_feature
