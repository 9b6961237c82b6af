"""Trees that grow on the device are those that the host grows (`Pool`, `FixedTree`, `Tree`)."""

from __future__ import annotations

import numpy as np
import pytest
from interpreted import run_both

from edgellm.device_runtime.kernels.triton import growth
from edgellm.device_runtime.speculate.policy import FixedTree, TreeLimits
from edgellm.device_runtime.speculate.tree import Pool

ROOT, AXES = 7, 2
START = np.array([40, 43])


class Scripted:
    """Candidates of a level; few numbers, so that many scores are equal."""

    def __init__(self, seed: int, top_k: int) -> None:
        self._random, self._top_k = np.random.default_rng(seed), top_k

    def candidates(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        shape = rows, self._top_k
        steps = -np.sort(self._random.integers(0, 5, shape), axis=1) / 2
        return self._random.integers(0, 90, shape), steps.astype(np.float32)


class DevicePool:
    """Buffers of a round; `scored` and `table` as the kernel takes them."""

    def __init__(self, limits: TreeLimits, scored: str = "draft", table=None) -> None:
        self.scored, self.table = scored, np.zeros(22) if table is None else table
        size = limits.pool_size
        self.tokens, self.parents = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.scores, self.own = np.zeros(size), np.zeros(size, np.float32)
        self.tokens[0], self.parents[0] = ROOT, -1
        self.slots = 1 + limits.draft_rows
        self.seen = np.zeros((self.slots, self.slots), np.int8)
        self.seen[0, 0] = 1
        self.count, self.used, self.nodes = 1, 0, np.zeros(1, np.int32)

    def grow(self, level: int, candidates, log_probs, width: int):
        """Candidates stand among others, which are none."""
        rows, top_k = candidates.shape
        spread = np.full((rows, top_k + 3), -9), np.full((rows, top_k + 3), 9, np.float32)
        spread[0][:, :top_k], spread[1][:, :top_k] = candidates, log_probs
        nodes, tokens = np.zeros(width, np.int32), np.zeros(width, np.int64)
        above, positions = np.zeros(width, np.int32), np.zeros((AXES, width), np.int64)
        slot, mask = np.zeros(1, np.int64), np.full((width, self.used + width), -1, np.int8)
        run_both(
            growth.grow_level, *spread, self.nodes, START, self.table, self.tokens, self.parents,
            self.scores, self.own, self.seen, top_k + 3, self.count, rows, top_k, self.used, width,
            self.slots, level, AXES, nodes, tokens, above, positions, slot, mask,
            SIZE=128, COLUMNS=8, BLOCK=8, SCORED=self.scored,
        )  # fmt: skip
        assert slot == START[0] + self.used
        assert (positions == START[1] + level).all()
        self.count, self.used, self.nodes = self.count + rows * top_k, self.used + width, nodes
        return tokens, above, mask.astype(bool)


@pytest.mark.parametrize(
    ("top_k", "steps", "room"), [(10, 6, 59), (4, 3, 59), (1, 4, 3), (8, 2, 1)]
)
def test_trees_are_the_hosts(top_k, steps, room):
    limits = TreeLimits(top_k, steps, room + 1)
    policy = FixedTree(limits)
    for seed in range(3):
        script, device = Scripted(seed, top_k), DevicePool(limits)
        pool = Pool(ROOT, limits.pool_size)
        newest, slots = np.zeros(1, np.int64), np.zeros(limits.pool_size, np.int64)
        seen = np.eye(device.slots, dtype=bool)
        for level in range(steps):
            candidates, log_probs = script.candidates(len(newest))
            added = pool.add(newest, candidates, log_probs.astype(np.float64), np.exp(log_probs))
            nodes = policy.frontier(pool, added, np.ones(top_k))
            above = slots[pool.parents[nodes]]
            used = device.used
            own = slots[nodes] = np.arange(used + 1, used + 1 + len(nodes))
            seen[own] |= seen[above]
            found = device.grow(level, candidates, log_probs, len(nodes))
            newest = nodes
            for one, other in zip(
                (*found, device.nodes),
                (pool.token_ids[nodes], above, seen[own, 1 : used + 1 + len(nodes)], nodes),
                strict=True,
            ):
                np.testing.assert_array_equal(one, other)
        _check_selection(policy, pool, device, room)


def _check_selection(policy: FixedTree, pool: Pool, device: DevicePool, room: int) -> None:
    tree, chosen = pool.tree(policy.select(pool, room))
    tokens, parents = np.zeros(room + 1, np.int64), np.zeros(room + 1, np.int64)
    nodes, own = np.zeros(room + 1, np.int32), np.ones(room + 1, np.float32)
    positions = np.zeros((AXES, room + 1), np.int64)
    mask = np.full((room + 1, room + 1), -1, np.int8)
    run_both(
        growth.select_tree, device.tokens, device.parents, device.scores, device.own, pool.count,
        room, tokens, parents, own, nodes, SIZE=512 if pool.count <= 512 else 1024, BLOCK=32,
    )  # fmt: skip
    run_both(growth.lay_out, parents, START, room + 1, AXES, positions, mask, NODES=64)
    size = len(tree)
    np.testing.assert_array_equal(tokens[:size], tree.token_ids)
    np.testing.assert_array_equal(parents[:size], tree.parents)
    np.testing.assert_array_equal(nodes[:size], chosen)
    np.testing.assert_allclose(np.exp(own[:size]), pool.confidences[chosen], rtol=1e-6)
    for missing in (nodes[size:], parents[size:]):
        assert (missing == -1).all()
    expected_depths, expected_mask = tree.layout()
    for axis in positions[:, :size]:
        np.testing.assert_array_equal(axis, START[1] + expected_depths)
    np.testing.assert_array_equal(mask[:size, :size], expected_mask)
    np.testing.assert_array_equal(mask[size:, size:], np.eye(room + 1 - size))


@pytest.mark.parametrize("scored", ["rates", "places"])
def test_scores_by_a_curve_and_by_place(scored):
    limits, random = TreeLimits(6, 4, 20), np.random.default_rng(3)
    table = np.concatenate([np.sort(random.random(11)), np.sort(-random.random(11))])
    if scored == "places":
        table = np.where(random.random(limits.pool_size) < 0.3, -np.inf, 0.0)
    device, script = DevicePool(limits, scored, table), Scripted(5, 6)
    for level, rows in enumerate((1, 6, 6, 6)):
        device.grow(level, *script.candidates(rows), 6)
    count = device.count
    scores = device.scores[1:count]
    if scored == "places":
        np.testing.assert_array_equal(scores, table[1:count])
    else:
        rates = np.interp(np.exp(device.own[1:count].astype(float)), table[:11], table[11:])
        above = device.scores[device.parents[1:count]]
        np.testing.assert_allclose(scores, rates + above, rtol=1e-12)
    tokens, parents = np.zeros(20, np.int64), np.zeros(20, np.int64)
    run_both(
        growth.select_tree, device.tokens, device.parents, device.scores, device.own, count, 19,
        tokens, parents, np.zeros(20, np.float32), np.zeros(20, np.int32), SIZE=512, BLOCK=32,
    )  # fmt: skip
