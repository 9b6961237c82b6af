"""Trees and pools against naive references."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgellm.device_runtime.speculate.tree import CandidatePool, Tree, top


@st.composite
def parent_lists(draw) -> list[int]:
    size = draw(st.integers(1, 40))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]


def tree_of(parents: list[int]) -> Tree:
    size = len(parents)
    return Tree(np.arange(100, 100 + size), np.array(parents), np.ones(size))


@given(parent_lists())
def test_the_mask_shows_ancestors_and_depths_count_them(parents):
    depths, mask = tree_of(parents).layout()
    assert depths.dtype == np.int64
    assert mask.dtype == np.bool_
    for node in range(len(parents)):
        ancestors, above = set(), node
        while above >= 0:
            ancestors.add(above)
            above = parents[above]
        assert set(np.flatnonzero(mask[node]).tolist()) == ancestors
        assert depths[node] == len(ancestors) - 1


@given(parent_lists())
def test_children_are_found_by_parent_and_token(parents):
    children = tree_of(parents).children()
    for node, parent in enumerate(parents):
        assert children[parent, 100 + node] == node
    assert (0, 7) not in children


def test_a_tree_of_the_root_is_plain_decoding():
    tree = Tree.of_root(7)
    depths, mask = tree.layout()
    assert (len(tree), depths.tolist(), mask.tolist()) == (1, [0], [[True]])
    assert tree.children() == {(-1, 7): 0}


@st.composite
def pools(draw) -> CandidatePool:
    """Filled level by level; few distinct scores, zeros among them, so that ties are common."""
    levels, width = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    pool = CandidatePool(5, 1 + width + levels * 3 * width)
    newest = np.zeros(1, np.int64)
    for _ in range(levels):
        steps = [
            [draw(st.sampled_from([0.0, -0.5, -0.5, -1.0])) for _ in range(width)] for _ in newest
        ]
        scores = np.sort(np.array(steps), axis=1)[:, ::-1]
        ids = np.arange(pool.count, pool.count + scores.size).reshape(scores.shape)
        added = pool.add(newest, ids, scores, np.exp(scores))
        newest = added[: draw(st.integers(1, min(3, len(added))))]
    return pool


@given(pools())
def test_ranked_keeps_parents_before_children(pool):
    ranked = pool.ranked()
    assert sorted(ranked.tolist()) == list(range(1, pool.count))
    scores = pool.scores[ranked]
    assert (np.diff(scores) <= 0).all()
    place = {node: at for at, node in enumerate(ranked.tolist())} | {0: -1}
    for node in ranked.tolist():
        assert place[int(pool.parents[node])] < place[node]
    for one, other in itertools.pairwise(ranked):
        assert pool.scores[one] > pool.scores[other] or one < other


@given(pools(), st.integers(0, 40))
def test_trees_of_a_pool(pool, count):
    chosen_nodes = pool.ranked()[:count]
    tree, chosen = pool.tree(chosen_nodes)
    assert chosen.tolist() == [0, *sorted(chosen_nodes.tolist())]
    assert len(tree) == len(chosen)
    assert tree.parents[0] == -1
    for node in range(1, len(tree)):
        assert tree.parents[node] < node
        assert chosen[tree.parents[node]] == pool.parents[chosen[node]]
    np.testing.assert_array_equal(tree.token_ids, pool.token_ids[chosen])
    np.testing.assert_allclose(tree.probabilities, np.exp(pool.scores[chosen]))


@given(pools())
def test_scores_add_up_and_children_are_found(pool):
    for node in range(1, pool.count):
        parent = int(pool.parents[node])
        own = np.log(pool.confidences[node])
        np.testing.assert_allclose(pool.scores[node], pool.scores[parent] + own)
        assert pool.find(parent, int(pool.token_ids[node])) == node
        assert pool.find(parent, 999) is None
    assert pool.find(0, 5) is None  # the root is no child


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), max_size=12), st.integers(0, 14))
def test_top_takes_the_earlier_of_equals(scores, count):
    expected = sorted(range(len(scores)), key=lambda at: (-scores[at], at))[:count]
    assert top(np.array(scores), count).tolist() == expected
