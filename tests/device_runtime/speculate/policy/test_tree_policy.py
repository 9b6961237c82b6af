"""Sizes of trees: limits, costs, learned rates; and the tree of EAGLE-2 by naive loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_sessions import StrictBase, StrictDraft, guesser, half_right
from stepping import by_cost, learned_of

from edgellm.device_runtime.speculate.draft_cache import DraftKVCaches
from edgellm.device_runtime.speculate.drafter import SpecState
from edgellm.device_runtime.speculate.drafters.eagle import EagleDrafter
from edgellm.device_runtime.speculate.drafters.ngram import NgramLookup
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.device_runtime.speculate.policy.acceptance_rates import Calibration
from edgellm.device_runtime.speculate.policy.costs import ALONE, BatchLoad, Costs, price
from edgellm.device_runtime.speculate.policy.static_tree import NAMED, StaticTree
from edgellm.device_runtime.speculate.policy.tree_policy import FixedTree, TreeLimits
from edgellm.device_runtime.speculate.shared_passes import run
from edgellm.device_runtime.speculate.text_lookup import Continuation
from edgellm.device_runtime.speculate.tree import CandidatePool, Tree

FREE = Costs.of({"1": 10, "64": 10.001}, {"1": 0.001, "64": 0.002}, {"1": 0, "64": 0})
DEAR = Costs.of({"1": 10, "2": 30, "64": 900}, {"1": 8, "64": 50}, {"1": 8, "64": 50})
NONE = np.zeros(0)


def proposed(learned, limits, draft, context=(3, 1, 4), capacity=100, **options) -> Tree:
    """The tree that a drafter proposes for a context; `learned` may be a policy alone."""
    if not isinstance(learned, SpecState):
        learned = learned_of(learned)
    features = StrictBase(100).run(np.array(context[:-1]), 0, np.array([0])).taps
    session = StrictDraft(capacity, draft)
    rows = options.pop("max_tree_rows", limits.top_k * limits.steps)
    committed = DraftKVCaches(network=session, round_rows=limits.steps + 1)
    drafter = EagleDrafter(
        caches=committed, learned=learned, limits=limits, costs=FREE, max_tree_rows=rows
    )
    drafter.begin(context[:1])
    drafter.observe(np.array(context[1:]), features)
    run(drafter.catch_up())
    tree = run(drafter.propose(context[-1], options.get("room", 99), options.get("levels", 99)))
    assert sum(session.growth) <= rows
    return tree


def paths(tree: Tree) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        found.append((*found[parent], token) if parent >= 0 else ())
    return set(found)


def naive_eagle2(draft, context, limits) -> set[tuple[int, ...]]:
    """Paths of the tree: expand the best `top_k` of every level, then take the best of all."""
    pool: list[tuple[float, tuple[int, ...]]] = []
    frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(limits.steps):
        level = []
        for score, path in frontier:
            ids, chances = draft((*context, *path))
            for token, chance in list(zip(ids, chances, strict=True))[: limits.top_k]:
                log_prob = float(np.log(chance).astype(np.float32))
                level.append((score + log_prob, (*path, token)))
        pool += level
        frontier = sorted(level, key=lambda node: -node[0])[: limits.top_k]
    pool.sort(key=lambda node: -node[0])
    return {()} | {path for _, path in pool[: limits.verify_size - 1]}


@pytest.mark.parametrize("draft", [guesser, half_right])
@pytest.mark.parametrize(
    "limits",
    [
        TreeLimits(),
        TreeLimits(top_k=1, steps=6, verify_size=60),
        TreeLimits(top_k=10, steps=1, verify_size=60),
        TreeLimits(top_k=4, steps=3, verify_size=9),
        TreeLimits(top_k=3, steps=5, verify_size=400),
        TreeLimits(top_k=2, steps=2, verify_size=1),
    ],
    ids=str,
)
def test_fixed_trees_are_those_of_eagle2(limits, draft):
    for last in range(8):
        context = (3, 1, last)
        tree = proposed(FixedTree(limits), limits, draft, context)
        assert paths(tree) == naive_eagle2(draft, context, limits)


def naive_static(draft, context, choices) -> set[tuple[int, ...]]:
    """Every choice as the tokens of its ranks."""
    found = {()}
    for choice in choices:
        path: tuple[int, ...] = ()
        for rank in choice:
            path += (draft((*context, *path))[0][rank],)
        found.add(path)
    return found


SMALL_TREE = ((0,), (0, 0), (0, 2), (3,), (3, 1), (3, 1, 0), (3, 1, 0, 0), (1,))


@pytest.mark.parametrize("choices", [SMALL_TREE, SMALL_TREE[::-1], NAMED["mc_sim_7b_63"], ((2,),)])
def test_static_trees_have_their_choices(choices):
    limits = SpecOptions(choices=choices).limits(64)
    for last in range(5):
        context = (3, 1, last)
        policy = StaticTree(choices)
        tree = proposed(policy, limits, half_right, context, max_tree_rows=limits.draft_rows)
        assert paths(tree) == naive_static(half_right, context, choices)
        assert len(tree) == len(choices) + 1


@pytest.mark.parametrize("options", [{"room": 3}, {"levels": 2}, {"capacity": 5}], ids=str)
def test_static_trees_that_are_cut_are_trees(options):
    limits = SpecOptions(choices=SMALL_TREE).limits(64)
    tree = proposed(
        StaticTree(SMALL_TREE), limits, half_right, max_tree_rows=limits.draft_rows, **options
    )
    assert paths(tree) < naive_static(half_right, (3, 1, 4), SMALL_TREE)
    assert 3 < len(tree) < len(SMALL_TREE) + 1


def test_the_named_tree_is_the_published_one():
    """Its first and last choices in the order of their estimated worth, and its levels."""
    tree = set(NAMED["mc_sim_7b_63"])
    for path in [(0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0), (0, 0, 0, 1), (1, 6), (0, 7, 0)]:
        assert path in tree
    assert [sum(len(path) == level for path in tree) for level in (1, 2, 3, 4)] == [10, 28, 23, 2]
    assert not {(10,), (1, 7), (2, 3), (0, 8, 0), (2, 1, 0)} & tree


@settings(max_examples=60)
@given(
    limits=st.builds(
        TreeLimits,
        top_k=st.integers(1, 12),
        steps=st.integers(1, 7),
        verify_size=st.integers(1, 64),
    ),
    room=st.integers(0, 70),
    levels=st.integers(0, 8),
    capacity=st.integers(2, 40),
    rows=st.integers(1, 84),
    is_fixed=st.booleans(),
)
def test_trees_keep_all_limits(limits, room, levels, capacity, rows, is_fixed):
    policy = FixedTree(limits) if is_fixed else by_cost(limits, FREE)
    tree = proposed(
        policy, limits, half_right, room=room, levels=levels, capacity=capacity, max_tree_rows=rows
    )
    assert len(tree) <= min(limits.verify_size, room + 1)
    depths, _ = tree.layout()
    assert depths.max() <= min(limits.steps, levels)
    below = np.bincount(tree.parents[1:], minlength=1)
    assert below.max() <= limits.top_k
    assert not room or not levels or limits.verify_size == 1 or not is_fixed or len(tree) > 1


def pool_of(confidences, policy) -> CandidatePool:
    pool = CandidatePool(0, 1 + len(confidences))
    row = np.array([confidences])
    pool.add(np.zeros(1, np.int64), np.arange(row.size)[None], policy.scores(np.log(row)), row)
    return pool


def test_expensive_verification_disables_drafting():
    limits = TreeLimits()
    learned = by_cost(limits, DEAR)
    assert len(proposed(learned, limits, half_right)) == 1
    policy = learned.policy
    pool = pool_of([0.9, 0.05], policy)
    prices = price(DEAR.step, np.arange(1, 51))
    assert len(policy.frontier(pool, np.array([1, 2]), prices)) == 0
    assert len(policy.select(pool, 50)) == 0


def test_free_verification_gives_large_trees():
    limits = TreeLimits(top_k=10, steps=6, verify_size=60)
    assert len(proposed(by_cost(limits, FREE), limits, half_right)) == 60


def test_tree_size_follows_the_price():
    """One more token costs 2 ms of a pass of 10 ms: a node pays at 0.2 expected tokens."""
    costs = Costs.of({"1": 10, "11": 30}, {"1": 1, "11": 1}, {"1": 1, "11": 1})
    learned = by_cost(TreeLimits(), costs)
    learned.controller.pace.tokens, policy = 1.0, learned.policy
    pool = pool_of([0.9, 0.7, 0.34, 0.12, 0.05, 0.01], policy)
    chances = np.exp(pool.scores[1:])
    assert policy.select(pool, 10).tolist() == (np.flatnonzero(chances > 0.2) + 1).tolist()
    assert policy.select(pool, 2).tolist() == [1, 2]
    assert policy.select(pool, 0).tolist() == []


def test_a_share_of_a_pass_by_hand():
    """Four sequences: each is charged a quarter of the pass of four tokens; more tokens in full."""
    verify = np.array([10.0, 10, 11, 12, 13, 14, 15, 16, 17])
    assert BatchLoad(4, 3).share(verify)[1:6].tolist() == [
        13 / 4,
        13 / 4 + 1,
        21 / 4,
        25 / 4,
        29 / 4,
    ]
    assert BatchLoad(2, 9).share(verify)[1:3].tolist() == [19 / 2, 19 / 2 + 1]  # not measured
    assert ALONE.share(verify) is verify


def test_trees_shrink_with_batch_size():
    costs = Costs.of({"1": 20, "2": 20.5, "64": 51.5}, {"1": 0.1, "64": 0.2}, {"1": 0.1})
    sizes = []
    for answers in (1, 2, 4, 8, 16, 32):
        learned = by_cost(TreeLimits(), costs)
        learned.controller.set_batch_load(BatchLoad(answers, answers - 1))
        pool = pool_of([0.9, 0.7, 0.5, 0.34, 0.12, 0.05, 0.03, 0.01], learned.policy)
        sizes.append(len(learned.policy.select(pool, 50)))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 5
    learned.controller.set_batch_load(BatchLoad(60, 300))
    assert len(learned.policy.select(pool_of([0.5, 0.3], learned.policy), 50)) == 0


def test_lookups_must_pay_for_host_time_in_batches():
    """A chain of two gives 1.2 tokens; its lookup takes half a pass of four tokens."""
    costs = Costs.of({"1": 10, "64": 10.1}, host_ms=5.0)
    learned, chain = by_cost(TreeLimits(), costs), (0.8, 0.4)
    assert learned.policy.pays(chain)
    learned.controller.set_batch_load(BatchLoad(4, 3))
    assert not learned.policy.pays(chain)


def test_each_batch_size_has_its_own_throughput():
    """Losses in a batch of sixteen do not stop drafting of a single sequence."""
    costs = Costs.of({"1": 10, "64": 73}, {"1": 0, "64": 0}, {"1": 0})
    controller = by_cost(TreeLimits(), costs).controller
    controller.set_batch_load(BatchLoad(16, 15))
    for _ in range(100):
        controller.end_round(1, 0.0, 8, networked=True)
    assert controller.is_pausing
    rate = controller.rate
    assert rate == pytest.approx(16 / 25)  # of the whole batch, a token each
    controller.set_batch_load(BatchLoad(17, 16))
    assert controller.is_pausing  # nor is it tried in larger batches
    controller.set_batch_load(ALONE)
    assert not controller.is_pausing
    assert controller.rate < rate


def test_no_tree_has_more_rows_than_were_measured():
    costs = Costs.of({"1": 10, "4": 10}, {"1": 0, "4": 0}, {"1": 0})
    policy = by_cost(TreeLimits(), costs).policy
    pool = pool_of([0.9] * 10, policy)
    assert len(policy.select(pool, 50)) == 3
    assert len(policy.frontier(pool, np.arange(1, 11), np.zeros(4))) == 4


def test_calibration_starts_with_the_drafts_probabilities():
    confidences = np.array([0.02, 0.2, 0.5, 0.62, 0.9])
    rates = np.exp(Calibration().log_rates(confidences))
    np.testing.assert_allclose(rates, confidences, atol=0.03)


def test_calibration_learns_rates():
    calibration = Calibration()
    random = np.random.default_rng(0)
    for _ in range(3000):
        confidences = random.choice([0.2, 0.62, 0.9], 4)
        truth = np.select([confidences < 0.3, confidences < 0.7], [0.5, 0.55], 0.97)
        calibration.learn(confidences, (random.random(4) < truth).astype(np.int64))
    rates = np.exp(calibration.log_rates(np.array([0.2, 0.62, 0.9])))
    np.testing.assert_allclose(rates, [0.5, 0.55, 0.97], atol=0.06)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 1)), max_size=200),
    st.lists(st.floats(0, 1), min_size=2, max_size=20),
)
def test_calibration_is_monotone_and_negative(observed, asked):
    calibration = Calibration(prior_weight=1.0, memory=20)
    for confidence, accepted in observed:
        calibration.learn(np.array([confidence]), np.array([accepted]))
    rates = calibration.log_rates(np.sort(asked))
    assert (np.diff(rates) >= 0).all()
    assert (rates < 0).all()  # a child's score is below its parent's
    assert np.isfinite(rates).all()


def test_calibration_of_nothing():
    calibration = Calibration()
    before = calibration.log_rates(np.array([0.1, 0.9]))
    calibration.learn(NONE, NONE.astype(np.int64))
    np.testing.assert_allclose(calibration.log_rates(np.array([0.1, 0.9])), before, rtol=1e-9)


def test_costs_are_interpolated_and_monotone():
    costs = Costs.of({"1": 10, "4": 16, "8": 12}, {"2": 3, "1": 2}, {"1": 1})
    np.testing.assert_allclose(costs.verify, [10, 10, 10 + 2 / 3, 10 + 4 / 3, 12, 12, 12, 12, 12])
    np.testing.assert_allclose(costs.step, [2, 2, 3])
    np.testing.assert_allclose(costs.extend, [1, 1])
    assert [price(costs.verify, rows) for rows in (1, 5, 8, 9, 17)] == [10, 12, 12, 24, 36]
    np.testing.assert_allclose(price(costs.step, np.arange(1, 6)), [2, 3, 6, 6, 9])
    np.testing.assert_allclose(Costs.of({"1": 10}).step, [0, 0])


def naive_lookup(tokens: list[int], shortest: int, longest: int, maximum: int):
    """What followed the last earlier place where the text ended like this."""
    for size in range(longest, shortest - 1, -1):
        ending = tokens[-size:] if len(tokens) >= size else None
        for end in range(len(tokens) - 1, size - 1, -1):
            if ending is not None and tokens[end - size : end] == ending:
                return tokens[end : end + maximum], size
    return [], 0


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=14), st.integers(1, 8))
def test_lookup_equals_a_search(pieces, maximum):
    lookup = NgramLookup(maximum=maximum)
    tokens: list[int] = []
    for piece in pieces:
        lookup.extend(piece)
        tokens += piece
        followed, size = naive_lookup(tokens, 2, 4, maximum)
        (found,) = lookup.continuations() or [Continuation([], [])]
        assert found.token_ids == followed
        assert size == 0 or list(found.confidences) == [{2: 0.2, 3: 0.35, 4: 0.6}[size]] * len(
            followed
        )
