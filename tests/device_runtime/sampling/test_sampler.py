from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.core.errors import RequestError
from edgellm.device_runtime.sampling.sampler import Sampler, SamplingParams, processed_distribution

LOGITS = np.array([1.0, 4.0, 2.0, 3.0, -5.0], np.float32)


def _reference(logits, params):
    """The definition, one token at a time: temperature, then top-k, then top-p."""
    p = np.exp((logits.astype(np.float64) - logits.max()) / params.temperature)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: -p[i])
    if params.top_k:
        order = order[: params.top_k]
    total, kept, seen = sum(p[i] for i in order), [], 0.0
    for i in order:
        if kept and seen >= params.top_p - 1e-12 and params.top_p < 1:
            break
        kept.append(i)
        seen += p[i] / total
    mass = sum(p[i] for i in kept)
    return {i: p[i] / mass for i in kept}


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(-64, 64).map(lambda n: n / 8), min_size=2, max_size=12, unique=True),
    st.integers(2, 30).map(lambda n: n / 10),
    st.integers(5, 100).map(lambda n: n / 100),
    st.integers(0, 14),
)
def test_distribution_follows_its_definition(logits, temperature, top_p, top_k):
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=42)
    array = np.array(logits, np.float32)
    token_ids, probabilities = processed_distribution(array, params)
    expected = _reference(array, params)
    assert probabilities.sum() == pytest.approx(1)
    assert np.all(np.diff(token_ids) > 0)
    if len(token_ids) == len(expected):  # a tie of top_p with the running sum may go either way
        assert {
            int(t): pytest.approx(p) for t, p in zip(token_ids, probabilities, strict=True)
        } == (expected)
    else:
        assert abs(len(token_ids) - len(expected)) == 1


def test_greedy_takes_the_argmax():
    for params in (SamplingParams(temperature=0), SamplingParams(top_k=1)):
        assert Sampler(params=params).choose(LOGITS, 1) == 1


def test_draws_follow_the_distribution():
    params = SamplingParams(temperature=1.5, top_p=1, top_k=0, seed=1)
    sampler, draws = Sampler(params=params), 20000
    counts = np.bincount([sampler.choose(LOGITS, 1) for _ in range(draws)], minlength=5)
    token_ids, probabilities = processed_distribution(LOGITS, params)
    expected = np.zeros(5)
    expected[token_ids] = probabilities * draws
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 18.5  # 4 degrees of freedom, p = 0.001
    biased = np.roll(expected, 1)
    assert ((counts - biased) ** 2 / biased).sum() > 18.5


def test_seeds_repeat_and_differ():
    def draw(seed):
        sampler = Sampler(params=SamplingParams(temperature=2, top_p=1, top_k=0, seed=seed))
        return [sampler.choose(LOGITS, 1) for _ in range(30)]

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


def test_penalties_count_prompt_and_output():
    params = SamplingParams(
        temperature=0,
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={2: 3.0},
    )
    sampler = Sampler(params=params, prompt=[4, 999])  # an image embedding is no token
    np.testing.assert_allclose(sampler.adjusted(LOGITS), [1, 4, 5, 3, -10])
    assert sampler.choose(LOGITS, 1) == 2  # biased
    np.testing.assert_allclose(sampler.adjusted(LOGITS), [1, 4, 2.5 - 0.75, 3, -10])
    np.testing.assert_allclose(sampler.adjusted(LOGITS, [2, 1]), [1, 2 - 0.75, 2.5 - 1, 3, -10])
    np.testing.assert_array_equal(LOGITS, [1, 4, 2, 3, -5])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_p": 1.1}, "min_p 1.1 is out of range"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0 is out of range"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty 1e-300 is out of range"),
        ({"repetition_penalty": 101.0}, "repetition_penalty 101.0 is out of range"),
        ({"frequency_penalty": -3.0}, "frequency_penalty -3.0 is out of range"),
        ({"logit_bias": {3: 101.0}}, "logit_bias 101.0 of token 3 is out of range"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias 0.0 of token -1 is out of range"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "names 1025 tokens"),
    ],
)
def test_invalid_sampling_values_are_rejected(given, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**given)
