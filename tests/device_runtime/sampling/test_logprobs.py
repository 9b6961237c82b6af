"""Log-probabilities of plain and speculative outputs, and texts of single tokens."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm.core.errors import RequestError
from edgellm.device_runtime import LLM, SamplingParams
from edgellm.device_runtime.sampling.logprobs import token_logprobs
from edgellm.device_runtime.speculate.acceptance import Typical
from edgellm.device_runtime.speculate.options import SpecOptions


def test_logprobs_equal_log_softmax():
    logits = np.array([0.5, 3.0, -1.0, 3.0, 2.0], np.float32)
    expected = np.log(np.exp(logits) / np.exp(logits).sum())
    found = token_logprobs(logits, 2, 3)
    assert found.logprob == pytest.approx(expected[2], abs=1e-6)
    assert [token_id for token_id, _ in found.top] == [1, 3, 4]  # ties by id
    assert [value for _, value in found.top] == pytest.approx(expected[[1, 3, 4]].tolist())


@pytest.mark.parametrize("count", [0, 1, 5, 99])
def test_number_of_top_logprobs(count):
    logits = np.random.default_rng(0).normal(size=5).astype(np.float32)
    assert len(token_logprobs(logits, 0, count).top) == min(count, 5)


def test_infinite_logits_are_supported():
    logits = np.array([0.0, -np.inf, 1.0], np.float32)
    assert token_logprobs(logits, 2, 3).top[2] == (1, -np.inf)


def test_a_negative_count_is_rejected():
    with pytest.raises(RequestError, match="num_logprobs -1"):
        SamplingParams(num_logprobs=-1)


def _answer(llm, sampling):
    answer = llm.generate("w20 w30 w40", sampling=sampling, max_generate_length=20)
    steps = list(answer)
    return answer, [entry for step in steps for entry in step.logprobs], steps


@pytest.mark.parametrize("typical", [None, Typical(0.3)])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_speculative_outputs_have_logprobs_of_every_token(eagle_pair, temperature, typical):
    options = SpecOptions(top_k=4, steps=3, verify_size=12, tree="fixed", typical=typical)
    llm = LLM(eagle_pair.engine, spec=options)
    sampling = SamplingParams(temperature=temperature, num_logprobs=2, seed=42)
    answer, entries, steps = _answer(llm, sampling)
    assert [entry.token_id for entry in entries] == answer.token_ids
    assert any(len(step.token_ids) > 1 for step in steps) or typical is None
    assert all("".join(step.pieces) == step.text for step in steps if step.token_ids)
    # A pass over the output's tokens gives the same log-probabilities.
    ids = [*answer.prompt.token_ids, *answer.token_ids[:-1]]
    rows = np.arange(len(answer.prompt.token_ids) - 1, len(ids))
    result = llm.base.run(np.asarray(ids), 0, rows)
    for logits, entry in zip(result.logits, entries, strict=True):
        expected = token_logprobs(logits, entry.token_id, 2)
        assert entry.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx(
            [value for _, value in expected.top], abs=1e-4
        )


def test_logprobs_only_on_request(tiny_engine):
    llm = LLM(tiny_engine)
    answer, entries, _ = _answer(llm, SamplingParams(temperature=0, num_logprobs=1))
    assert [entry.token_id for entry in entries] == answer.token_ids
    assert [entry.top[0][0] for entry in entries] == answer.token_ids  # greedy
    assert _answer(llm, SamplingParams(temperature=0))[1] == []
