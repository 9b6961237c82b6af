"""Drafts of several requests share forward passes; their trees equal those of each alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scripted_rounds import Setup
from scripted_sessions import DRAFTS, StrictBase, StrictDraft
from stepping import learned_of

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.runners.batch_costs import SharedCosts
from edgellm.device_runtime.speculate.draft_cache import DraftKVCaches
from edgellm.device_runtime.speculate.drafters.eagle import EagleDrafter
from edgellm.device_runtime.speculate.policy.costs import Costs, shared
from edgellm.device_runtime.speculate.policy.tree_policy import FixedTree, TreeLimits
from edgellm.device_runtime.speculate.shared_passes import Wanted, run, run_all

LIMITS = TreeLimits(top_k=3, steps=4, verify_size=12)
COSTS = Costs.of({"1": 10, "64": 60}, {"1": 1.0, "64": 64.0}, {"1": 2.0, "64": 65.0})
LEVELS = SharedCosts({count: {"1": 6.0, "64": 6.0} for count in (1, 2)})
TEXTS = [(3, 1, 4), (1, 5, 9, 2, 6), (5, 3), (5, 8, 9, 7)]


class Answers:
    """Drafters of one draft network, each with its own text."""

    def __init__(self, max_batch_size: int, costs: Costs = COSTS) -> None:
        self.session = StrictDraft(96, DRAFTS["half_right"], max_batch_size)
        caches = DraftKVCaches(network=self.session, round_rows=LIMITS.steps + 1)
        self.drafters: list[EagleDrafter] = []
        for text in TEXTS:
            drafter = EagleDrafter(
                caches=caches,
                learned=learned_of(FixedTree(LIMITS)),
                limits=LIMITS,
                costs=costs,
                max_tree_rows=12,
            )
            features = StrictBase(96).run(np.array(text[:-1]), 0, np.array([0])).taps
            drafter.begin(text[:1])
            drafter.observe(np.array(text[1:]), features)
            self.drafters.append(drafter)

    def catch_up(self):
        return [drafter.catch_up() for drafter in self.drafters]

    def propose(self):
        pairs = zip(self.drafters, TEXTS, strict=True)
        return [drafter.propose(text[-1], 99, 99) for drafter, text in pairs]


def _facts(trees):
    return [(tree.token_ids.tolist(), tree.parents.tolist()) for tree in trees]


@pytest.mark.parametrize(
    ("max_batch_size", "sizes"), [(4, [4] * 4), (3, [3, 1] * 4), (1, [1] * 16)]
)
def test_batched_trees_equal_single_ones(max_batch_size, sizes):
    """An extension, and a pass for each of three levels after the first."""
    alone = Answers(1)
    for passes in alone.catch_up():
        run(passes)
    expected = [run(passes) for passes in alone.propose()]
    answers = Answers(max_batch_size)
    assert run_all(answers.catch_up()) == [None] * 4
    assert _facts(run_all(answers.propose())) == _facts(expected)
    assert sorted(answers.session.sizes) == sorted(sizes)
    for drafter, other in zip(answers.drafters, alone.drafters, strict=True):
        assert (drafter._spent_ms < other._spent_ms) == (
            max_batch_size > 1 and drafter._sharing > 1
        )


def test_sequences_are_charged_a_share_of_batched_passes():
    table = COSTS.step  # a row is a millisecond
    assert shared(table, 1) is table
    assert shared(table, 4)[1:4] == pytest.approx([1.0, 2.0, 3.0])
    flat = Costs.of({"1": 8.0, "64": 8.0}).verify
    assert shared(flat, 4)[1:4] == pytest.approx([2.0, 2.0, 2.0])


def _drive(passes, answers: int) -> None:
    """Draft as if this many sequences shared every pass."""
    try:
        wanted = next(passes)
        while True:
            wanted.answers = answers
            wanted = passes.send(wanted.network.run_batch([wanted.part])[0])
    except StopIteration:
        return


@pytest.mark.parametrize("is_model", [False, True])
@pytest.mark.parametrize(("levels", "row_ms"), [(None, 1.0), (LEVELS, 3.0)])
def test_batched_levels_are_charged_by_measured_costs(is_model, levels, row_ms, monkeypatch):
    """A single draft takes a millisecond a token; two in a batch take 6 ms in any case."""
    costs, charged = dataclasses.replace(COSTS, levels=levels), []
    if is_model:
        setup = Setup(LIMITS, is_model=True)
        setup.costs = costs
        drafter = setup.start()
        drafter.remember([*TEXTS[0]])
    else:
        drafter = Answers(1, costs).drafters[0]
    policy = drafter._policy
    frontier = policy.frontier
    monkeypatch.setattr(
        policy,
        "frontier",
        lambda pool, newest, prices: charged.append(prices) or frontier(pool, newest, prices),
    )
    _drive(drafter.catch_up(), 2)
    _drive(drafter.propose(TEXTS[0][-1], 99, 99), 2)
    assert len(charged) == LIMITS.steps - 1
    assert charged[0][0] == row_ms
    assert all((prices == row_ms).all() == (levels is LEVELS) for prices in charged)


class _Failing:
    """A session that fails for one of the parts."""

    max_batch_size = 9

    def run_batch(self, parts):
        if "bad" in parts:
            raise EdgeLLMError("refused")
        return [part.upper() for part in parts]


def test_failed_drafter_does_not_affect_others():
    session, ended = _Failing(), []

    def work(*parts):
        found = []
        try:
            for part in parts:
                found.append((yield Wanted(network=session, part=part)))
            return found
        finally:
            ended.append(parts)

    good, bad, own = run_all([work("a", "b", "c"), work("a", "bad", "c"), _raises()])
    assert good == ["A", "B", "C"]
    assert str(bad) == "refused"
    assert str(own) == "its own"
    assert len(ended) == 2
    (bad,) = run_all([work("bad")])
    assert str(bad) == "refused"


def _raises():
    raise EdgeLLMError("its own")
    yield
