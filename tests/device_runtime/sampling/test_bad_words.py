"""Bad words: by tokens, after the output and along a path of a draft tree."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from edgellm.core.errors import RequestError
from edgellm.device_runtime import SamplingParams
from edgellm.device_runtime.sampling.bad_words import BadWords
from edgellm.device_runtime.sampling.sampler import Sampler

LOGITS = np.arange(6, dtype=np.float32)


def _allowed(words, taken, path=()):
    bad = BadWords(words)
    for token_id in taken:
        bad.take([token_id])
    return [*np.flatnonzero(bad.apply(LOGITS, path) > -np.inf)]


@pytest.mark.parametrize(
    ("words", "taken", "path", "allowed"),
    [
        ([[3]], [], (), [0, 1, 2, 4, 5]),
        ([[1, 3]], [], (), [0, 1, 2, 3, 4, 5]),
        ([[1, 3]], [2, 1], (), [0, 1, 2, 4, 5]),
        ([[1, 3]], [2], (1,), [0, 1, 2, 4, 5]),
        ([[1, 3]], [1], (2,), [0, 1, 2, 3, 4, 5]),
        ([[1, 2, 3], [2, 4], [9]], [1], (2,), [0, 1, 2, 5]),
        ([[0], [1], [2], [3], [4], [5]], [], (), [0, 1, 2, 3, 4, 5]),  # nothing else is left
    ],
)
def test_the_last_token_of_a_word_is_forbidden_after_its_first(words, taken, path, allowed):
    assert _allowed(words, taken, path) == allowed


def test_a_sampler_never_completes_a_word():
    params = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, seed=1)
    sampler = Sampler(params=params, bad_words=[[5, 5], [4]])
    assert sampler.needs_logits
    found = [sampler.choose(LOGITS, 5) for _ in range(300)]
    assert 4 not in found
    assert 5 in found
    assert all(pair != (5, 5) for pair in pairwise(found))
    assert LOGITS[4] == 4  # the engine's logits stay


@pytest.mark.parametrize("words", [("",), (" ",), (5,), ("a",) * 1025])
def test_faulty_bad_words_are_rejected(words):
    with pytest.raises(RequestError, match="bad_words"):
        SamplingParams(bad_words=words)
