"""Sizes of trees that a device expands alone, and static trees as scores by position."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm.device_runtime.runners.device_speculation import Growth
from edgellm.device_runtime.speculate.device_rounds import Size
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.device_runtime.speculate.policy.costs import Costs
from edgellm.device_runtime.speculate.policy.device_tree_size import (
    FixedSize,
    WorthwhileSize,
    growth_of,
)
from edgellm.device_runtime.speculate.policy.spec_gate import SpecGate
from edgellm.device_runtime.speculate.policy.tree_policy import TreeLimits
from edgellm.device_runtime.speculate.tree import CandidatePool, Tree

LIMITS = TreeLimits(top_k=4, steps=4, verify_size=40)


def _tree(size: Size, chance: float) -> Tree:
    """A chain, and the rest of the nodes below the root; all with the same chance."""
    chain = np.arange(-1, size.levels)
    parents = np.concatenate([chain, np.zeros(size.nodes - len(chain), np.int64)])
    scores = np.full(size.nodes, np.log(chance))
    pool = CandidatePool.of_tree(np.arange(size.nodes), parents, scores, np.exp(scores))
    return pool.tree(np.arange(1, size.nodes))[0]


def _converged(step_ms: float, row_ms: float, chance: float) -> list[Size]:
    """The last 30 of 100 plans, at a token a millisecond and these costs."""
    costs = Costs(
        verify=1 + row_ms * np.arange(41.0), step=np.full(5, step_ms), extend=np.full(5, step_ms)
    )
    growth = growth_of(SpecOptions(), LIMITS)
    assert growth is not None
    sizes = WorthwhileSize(growth, costs, SpecGate(costs=costs))
    plans = []
    for _ in range(100):
        plans.append(sizes.plan(8))
        sizes.learn(_tree(plans[-1], chance), plans[-1])
    return plans[-30:]


@pytest.mark.parametrize(
    ("step_ms", "row_ms", "chance", "expected"),
    [
        (0.01, 0.0001, 0.7, Size(4, 40)),  # all of it is cheap
        (9.0, 0.0001, 0.7, Size(1, 40)),  # no level pays
        (0.01, 0.5, 0.1, Size(2, 8)),  # nor do rows, and what is likely stands near the root
    ],
)
def test_tree_size_follows_its_gain(step_ms, row_ms, chance, expected):
    plans = _converged(step_ms, row_ms, chance)
    largest = [plan for plan in plans if plan == Size(4, 40)]
    assert {plan for plan in plans if plan not in largest} <= {expected}
    assert plans.count(expected) > 25
    assert largest  # now and then, to measure its gain


def test_a_tree_is_no_deeper_than_asked_for():
    costs = Costs(verify=np.ones(41), step=np.zeros(5), extend=np.zeros(5))
    for options in (SpecOptions(), SpecOptions(tree="fixed")):
        growth = growth_of(options, LIMITS)
        assert growth is not None
        sizes = FixedSize(growth)
        if options.tree == "cost":
            sizes = WorthwhileSize(growth, costs, SpecGate(costs=costs))
        assert [sizes.plan(levels).levels for levels in (1, 3, 9)] == [1, 3, 4]


def test_sizes_of_what_a_device_prepares():
    assert growth_of(SpecOptions(tree="fixed"), LIMITS) == Growth(
        top_k=4, widths=(4, 4, 4), nodes=(40,), scored="draft"
    )
    by_cost = growth_of(SpecOptions(), LIMITS)
    assert by_cost == Growth(top_k=4, widths=(4, 4, 4), nodes=(8, 16, 32, 40), scored="rates")
    assert by_cost.pool_size(1) == 5
    assert by_cost.pool_size(4) == LIMITS.pool_size
    assert growth_of(SpecOptions(lookups=("ngram",)), LIMITS) is None


def test_static_tree_scores_by_place():
    options = SpecOptions(choices=((0,), (2,), (0, 1), (2, 0), (2, 0, 0)))
    growth = growth_of(options, options.limits(60))
    assert growth is not None
    assert (growth.widths, growth.nodes, growth.top_k) == ((2, 1), (6,), 3)
    none = -np.inf
    assert growth.places is not None
    assert growth.places.tolist() == [
        0,
        0,
        none,
        0,  # the root, its children
        none,
        -1,
        none,
        0,
        none,
        none,  # those of (0,) and (2,)
        -1,
        none,
        none,  # those of (2, 0)
    ]
