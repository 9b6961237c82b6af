"""Drafts of bases with recurrent layers: turns, diverging prompts, limits, several requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgellm.device_runtime import LLM, SamplingParams, SpecOptions
from edgellm.device_runtime.engine.kv_snapshot import SnapshotFolder
from edgellm.device_runtime.networks import sequence_kv
from edgellm.device_runtime.request_files.lossless_check import prove
from edgellm.device_runtime.request_files.request_file import Options

GREEDY = SamplingParams(temperature=0)
WITH_TEXT = SpecOptions(lookups=("ngram", "suffix"), tree="fixed", verify_size=12)


def words(*numbers: int) -> str:
    return " ".join(f"w{number}" for number in numbers)


def ask(model: LLM, prompt: str, length: int = 9):
    answer = model.generate(prompt, max_generate_length=length, sampling=GREEDY)
    list(answer)
    return answer


@pytest.fixture(params=["mtp", "hybrid"])
def engine(request, eagle_pairs) -> Path:
    return eagle_pairs(request.param).engine


@pytest.fixture
def models(engine, monkeypatch) -> tuple[LLM, LLM]:
    """An LLM with a draft and a prefix cache, and a plain one."""
    monkeypatch.setattr(sequence_kv, "CHECKPOINT_ROWS", 16)
    return LLM(engine, spec=WITH_TEXT, context_reuse=True), LLM(engine)


def test_a_conversation_is_prefilled_once(models):
    """Diverging prompts start at the last shared checkpoint, in base and draft."""
    model, plain = models
    text, known = words(20, 21, 22), 0
    for turn in range(3):
        answer = ask(model, text)
        assert answer.token_ids == ask(plain, text).token_ids
        assert answer.timings()["reused_tokens"] == known
        assert any(counts.tree_size > 1 for counts in answer.profile.rounds)
        known = answer.prompt_token_count + len(answer.token_ids) - 1
        text = f"{text} {answer.text} {words(60 + turn, 61)}"
    prompt = [*range(20, 60)]
    for changed, expected in (
        (prompt, 2),
        (prompt, 39),
        ([*prompt[:37], 70], 32),
        ([*prompt[:20], 70, 71, 72], 16),
    ):
        answer = ask(model, words(*changed))
        assert answer.token_ids == ask(plain, words(*changed)).token_ids
        assert answer.timings()["reused_tokens"] == expected


def test_saved_kv_cache_continues_with_any_token(engine, models, tmp_path):
    """As if the next prompt lacks the stop token, also after a restart."""
    model, plain = models
    folder = SnapshotFolder(tmp_path, {"base": "hash"})
    text = words(*range(20, 32))
    answer = ask(model, text)
    known = answer.prompt_token_count + len(answer.token_ids) - 1
    folder.save(model.kv_cache_manager.all_prefixes())
    again, fresh = (LLM(engine, spec=WITH_TEXT, context_reuse=True) for _ in range(2))
    for kept in folder.load(again.kv_cache_manager.num_networks).contexts:
        again.kv_cache_manager.pinned.add(kept)
    turn = " ".join([text, *answer.text.split()[: len(answer.token_ids) - 1], words(60, 61)])
    expected = ask(plain, turn).token_ids
    assert ask(fresh, turn).token_ids == expected
    for one in (again, model):
        found = ask(one, turn)
        assert found.timings()["reused_tokens"] == known
        assert found.token_ids == expected
        np.testing.assert_allclose(_rows_of_draft(one), _rows_of_draft(fresh), atol=1e-5)


def _rows_of_draft(model: LLM):
    return model.kv_cache_manager.all_prefixes()[-1].parts[1].values


def test_limits_and_consecutive_requests(models):
    model, plain = models
    full = words(*range(10, 70))  # fills the prompt; the output ends at the cache's last position
    whole = ask(plain, full, 200).token_ids
    for length in (1, 2, 5, 200):
        assert ask(model, full, length).token_ids == whole[:length]
    prompts = [words(20, 21, 20, 21, 20), words(20, 21, 20, 33), words(50, 51)]
    answers = [model.generate(each, max_generate_length=12, sampling=GREEDY) for each in prompts]
    for _ in model.together(answers, 3):
        pass
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == ask(plain, prompt, 12).token_ids
    requests = [{"messages": [{"role": "user", "content": prompt}]} for prompt in prompts]
    for comparison in prove(model, Options(max_generate_length=20), requests):
        assert comparison.has_equal_bits, comparison.line()
