"""Trees that grow on the device are those that the host grows (`Pool`, `FixedTree`, `Tree`)."""

from __future__ import annotations

import numpy as np
import pytest
from interpreted import launch

from edgellm.device_runtime.kernels.triton import growth
from edgellm.device_runtime.speculate.policy import FixedTree, TreeLimits
from edgellm.device_runtime.speculate.tree import Pool

ROOT = 7


class Scripted:
    """Candidates of a level; few numbers, so that many scores are equal."""

    def __init__(self, seed: int, top_k: int) -> None:
        self._random, self._top_k = np.random.default_rng(seed), top_k

    def candidates(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        shape = rows, self._top_k
        steps = -np.sort(self._random.integers(0, 5, shape), axis=1) / 2
        return self._random.integers(0, 90, shape), steps.astype(np.float32)


class DevicePool:
    """Buffers of a round."""

    def __init__(self, limits: TreeLimits) -> None:
        size = limits.pool_size
        self.tokens, self.parents = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.scores = np.zeros(size)
        self.tokens[0], self.parents[0] = ROOT, -1
        self.slots = 1 + limits.draft_rows
        self.seen = np.zeros((self.slots, self.slots), np.int8)
        self.seen[0, 0] = 1
        self.count, self.used, self.nodes = 1, 0, np.zeros(1, np.int32)

    def grow(self, level: int, candidates, log_probs, width: int):
        rows, top_k = candidates.shape
        nodes, tokens = np.zeros(width, np.int32), np.zeros(width, np.int64)
        above, positions = np.zeros(width, np.int32), np.zeros(width, np.int64)
        mask = np.full((width, self.used + width), -1, np.int8)
        launch(
            growth.grow_level, (1,), candidates, log_probs, self.nodes, self.tokens, self.parents,
            self.scores, self.seen, self.count, rows, top_k, self.used, width, self.slots, level,
            nodes, tokens, above, positions, mask, SIZE=128, COLUMNS=8,
        )  # fmt: skip
        self.count, self.used, self.nodes = self.count + rows * top_k, self.used + width, nodes
        return tokens, above, positions, mask.astype(bool)


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
                (pool.token_ids[nodes], above, np.full(len(nodes), level),
                 seen[own, 1 : used + 1 + len(nodes)], nodes), strict=True,
            ):  # fmt: skip
                np.testing.assert_array_equal(one, other)
        _check_selection(policy, pool, device, room)


def _check_selection(policy: FixedTree, pool: Pool, device: DevicePool, room: int) -> None:
    tree, chosen = pool.tree(policy.select(pool, room))
    size = len(tree)
    tokens, parents = np.zeros(size, np.int64), np.zeros(size, np.int64)
    nodes, depths = np.zeros(size, np.int32), np.zeros(size, np.int64)
    mask = np.full((size, size), -1, np.int8)
    launch(
        growth.select_tree, (1,), device.tokens, device.parents, device.scores, pool.count, room,
        tokens, parents, nodes, SIZE=512 if pool.count <= 512 else 1024, BLOCK=32,
    )  # fmt: skip
    launch(growth.lay_out, (1,), parents, size, depths, mask, NODES=64)
    np.testing.assert_array_equal(tokens, tree.token_ids)
    np.testing.assert_array_equal(parents, tree.parents)
    np.testing.assert_array_equal(nodes, chosen)
    expected_depths, expected_mask = tree.layout()
    np.testing.assert_array_equal(depths, expected_depths)
    np.testing.assert_array_equal(mask, expected_mask)
