"""Gemma 4's assistants in the runtime: what they draft, turns, several requests."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from eagle_engines import for_several
from gemma4_assistants import HIDDEN, Oracle

from edgellm.device_runtime import LLM, SamplingParams, SpecOptions
from edgellm.device_runtime.networks.draft import DraftNetwork, DraftPart, DraftResult
from edgellm.device_runtime.request_files.lossless_check import prove
from edgellm.device_runtime.request_files.request_file import Options
from edgellm.device_runtime.speculate.policy import spec_budget

NIGHTLY = pytest.mark.nightly
GREEDY = SamplingParams(temperature=0)
FIXED = SpecOptions(tree="fixed", top_k=3, steps=4, verify_size=12)


def words(*numbers: int) -> str:
    return " ".join(f"w{number}" for number in numbers)


def ask(model: LLM, prompt: str, length: int = 24):
    answer = model.generate(prompt, max_generate_length=length, sampling=GREEDY)
    list(answer)
    return answer


@pytest.fixture(
    scope="module", params=["assistant", pytest.param("unified_assistant", marks=NIGHTLY)]
)
def pair(request, eagle_pairs):
    return eagle_pairs(request.param)


@pytest.fixture
def passes(monkeypatch) -> list[tuple[DraftPart, DraftResult, int]]:
    """Every part of the draft's passes, with its result and the batch size."""
    found: list[tuple[DraftPart, DraftResult, int]] = []
    plain = DraftNetwork.run_batch

    def record(network, parts):
        results = plain(network, parts)
        for part, result in zip(parts, results, strict=True):
            found.append((part, result.copy(), len(parts)))
        return results

    monkeypatch.setattr(DraftNetwork, "run_batch", record)
    return found


def check_levels(pair, taps: tuple[int, ...], text: list[int], drafted) -> None:
    """Drafted levels of a text against transformers."""
    oracle = Oracle(pair.base_checkpoint, pair.draft_checkpoint)
    oracle.read(text, taps)
    for part, result, _ in drafted:
        assert (part.position_ids == part.write_index - 1).all()
        for row, token in enumerate(part.token_ids.tolist()):
            above = torch.from_numpy(part.hidden[row, -HIDDEN:].copy())
            step = oracle.step(token, above, part.write_index)
            best = step.log_probs.topk(3)
            np.testing.assert_array_equal(result.token_ids[row], best.indices)
            np.testing.assert_allclose(result.log_probs[row], best.values, atol=5e-4)


def test_drafted_levels_equal_transformers(pair, passes):
    """Every level of every round, over the committed text, which grows longer than the window."""
    model = LLM(pair.engine, spec=FIXED)
    prompt = words(20, 21, 22, 23, 24)
    answer = ask(model, prompt)
    drafted = [each for each in passes if each[0].tree_mask is not None]
    assert len(drafted) > 3
    assert {part.write_index for part, *_ in drafted} & {*range(14, 40)}
    text = [*model.tokenizer.encode(prompt, add_special_tokens=True), *answer.token_ids]
    check_levels(pair, model.manifest.hidden_taps, text, drafted)


def test_a_conversation_and_diverging_prompts_equal_plain_decoding(pair):
    """The draft's cache is truncated to any length, though its layers have windows."""
    model, plain = LLM(pair.engine, spec=FIXED, context_reuse=True), LLM(pair.engine)
    text = words(20, 21, 22)
    for turn in range(3):
        answer = ask(model, text, 9)
        assert answer.token_ids == ask(plain, text, 9).token_ids
        assert any(counts.tree_size > 1 for counts in answer.profile.rounds)
        text = f"{text} {answer.text} {words(60 + turn, 61)}"
    prompt = [*range(20, 60)]
    for changed in (prompt, [*prompt[:37], 70], [*prompt[:5], 70, 71]):
        assert ask(model, words(*changed)).token_ids == ask(plain, words(*changed)).token_ids


def test_several_requests_in_a_batch_equal_plain_decoding(pair, tmp_path, passes, monkeypatch):
    """The trees of all requests share passes, and equal transformers' for each."""
    # By the measured costs a draft as large as its base rests in batches.
    monkeypatch.setattr(spec_budget, "_may_pay", lambda *_: True)
    engine = for_several(pair, tmp_path / "engine", 3)
    model, plain = LLM(engine, spec=FIXED), LLM(engine)
    prompts = [words(20, 21, 20, 21, 20), words(*range(30, 50)), words(50, 51)]
    answers = [model.generate(each, max_generate_length=12, sampling=GREEDY) for each in prompts]
    passes.clear()
    for _ in model.together(answers, 3):
        pass
    assert {count for part, _, count in passes if part.tree_mask is not None} == {3}
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == ask(plain, prompt, 12).token_ids
        assert answer.profile.rounds[0].tree_size == 12
        text = [*model.tokenizer.encode(prompt, add_special_tokens=True), *answer.token_ids]
        own = next(part.kv for part, *_ in passes if begins(part, text))
        drafted = [each for each in passes if each[0].kv is own and each[0].tree_mask is not None]
        assert len(drafted) > 2
        check_levels(pair, model.manifest.hidden_taps, text, drafted[-2:])  # of the last rounds
    requests = [{"messages": [{"role": "user", "content": prompt}]} for prompt in prompts]
    for comparison in prove(model, Options(max_generate_length=12), requests):
        assert comparison.divergence is None, comparison.line()


def begins(part: DraftPart, text: list[int]) -> bool:
    """Whether a pass computes the first positions of a text, each with its next token."""
    token_ids = part.token_ids.tolist()
    return not part.write_index and token_ids == text[1 : 1 + len(token_ids)]
