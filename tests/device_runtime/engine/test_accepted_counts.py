"""Counts of accepted drafts: of an output, not of what follows its end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from edgellm.device_runtime.engine.profile import Profile
from edgellm.device_runtime.engine.prompt import Prompt
from edgellm.device_runtime.engine.sequence import Sequence
from edgellm.device_runtime.engine.stop_detector import StopResult
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.device_runtime.sampling.sampler import Sampler
from edgellm.device_runtime.speculate.acceptance import Round


@pytest.mark.parametrize(("taken", "accepted"), [(0, 0), (1, 1), (2, 2), (3, 3), (4, 3)])
def test_drafts_after_the_end_are_not_counted(taken, accepted):
    """Three drafts of a chain were accepted, and the bonus follows them."""
    chain = type("Chain", (), {"depths": lambda _: [0, 1, 2, 3], "__len__": lambda _: 4})()
    endings = SimpleNamespace(
        stream=SimpleNamespace(is_empty=True),
        take=lambda ids: StopResult(list(ids[:taken]), [], ended=taken < 4),
        rest=lambda: "",
    )
    profile = Profile()
    sequence = Sequence(
        prompt=Prompt([1]),
        sampler=Sampler(params=SamplingParams()),
        max_tokens=9,
        profile=profile,
        endings=endings,
    )
    sequence.take(Round((5, 6, 7, 8), chain, (0, 1, 2, 3), (1.0,) * 4))
    (counts,) = profile.rounds
    assert (counts.emitted, counts.accepted) == (taken, accepted)
