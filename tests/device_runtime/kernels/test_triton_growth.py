"""Trees expanded on the device equal those of the host (`CandidatePool`, `FixedTree`, `Tree`)."""

from __future__ import annotations

import numpy as np
import pytest
from interpreted import run_both

from edgellm.device_runtime.kernels.triton import growth
from edgellm.device_runtime.speculate.policy.tree_policy import FixedTree, TreeLimits
from edgellm.device_runtime.speculate.tree import CandidatePool

ROOT, AXES, MANY = 7, 2, 32
START = np.array([[40, 43, 1000, 99, ROOT]])  # of one sequence, whose tree has all levels


class Scripted:
    """Candidates of a level; few numbers, so that many scores are equal."""

    def __init__(self, seed: int, top_k: int) -> None:
        self._random, self._top_k = np.random.default_rng(seed), top_k

    def candidates(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        shape = rows, self._top_k
        steps = -np.sort(self._random.integers(0, 5, shape), axis=1) / 2
        return self._random.integers(0, 90, shape), steps.astype(np.float32)


class DevicePools:
    """Buffers of a round; `scored` and `table` as the kernel takes them, `start` by sequence."""

    def __init__(self, limits: TreeLimits, start=START, scored: str = "draft", table=None) -> None:
        self.start, self.scored = start, scored
        self.table = np.zeros(22) if table is None else table
        several, size = len(start), limits.pool_size
        self.many = MANY if several > 1 else 0
        self.tokens = np.full((several, size), -5)
        self.parents = np.full((several, size), -1)
        self.scores, self.own = np.zeros((several, size)), np.zeros((several, size), np.float32)
        self.slots = 1 + limits.draft_rows
        self.seen = np.zeros((several, self.slots, self.slots), np.int8)
        self.seen[:, 0, 0] = 1
        self.count, self.used, self.nodes = 1, 0, np.zeros((several, 1), np.int32)

    def grow(self, level: int, candidates, log_probs, width: int):
        """Run the kernel; candidates [B, R, K] lie among values that it must ignore."""
        several, rows, top_k = candidates.shape
        spread = np.full((several, rows, top_k + 3), -9), np.full((several, rows, top_k + 3), 9.0)
        spread = spread[0], spread[1].astype(np.float32)
        spread[0][..., :top_k], spread[1][..., :top_k] = candidates, log_probs
        nodes, tokens = (np.zeros((several, width), kind) for kind in (np.int32, np.int64))
        above, positions = np.zeros_like(nodes), np.zeros((AXES, several, width), np.int64)
        slot = np.full((MANY, 5), -1)
        mask = np.full((several, width, self.used + width), -1, np.int8)
        run_both(
            growth.grow_level, *spread, self.nodes, self.start, self.table, self.tokens,
            self.parents, self.scores, self.own, self.seen, top_k + 3, self.count, rows, top_k,
            self.used, width, self.slots, level, AXES, self.tokens.shape[1], self.many,
            nodes, tokens, above, positions, slot, mask,
            grid=(several,), SIZE=128, COLUMNS=8, BLOCK=8, SCORED=self.scored,
        )  # fmt: skip
        goes_on = level + 1 < self.start[:, 3]
        self._check_slot(slot, np.where(goes_on, width, 0), width)
        assert (positions == (self.start[:, 1] + level)[:, None]).all()
        assert (tokens[~goes_on] == 0).all()
        above -= several * (self.used - rows + 1) + rows * np.arange(several)[:, None]
        self.count, self.used, self.nodes = self.count + rows * top_k, self.used + width, nodes
        return tokens, above + self.used - width - rows + 1, mask.astype(bool)

    def _check_slot(self, slot, rows, width: int) -> None:
        there = self.start[:, 0] + self.used
        if not self.many:
            assert slot[0, 0] == there[0]
            assert (slot.ravel()[1:] == -1).all()
            return
        columns = np.where(rows, self.used + rows, 0)
        firsts = width * np.arange(len(rows))
        expected = np.stack([firsts, rows, self.start[:, 2], there, columns], axis=1)
        np.testing.assert_array_equal(slot[: len(rows)], expected)
        assert (slot[len(rows) :] == 0).all()


@pytest.mark.each_change("4-3-59-3", "8-2-1-2", "1-4-3-1")
@pytest.mark.parametrize(
    ("top_k", "steps", "room", "several"),
    [(10, 6, 59, 3), (4, 3, 59, 3), (1, 4, 3, 1), (8, 2, 1, 2)],
)
def test_trees_equal_the_host(top_k, steps, room, several):
    """A batch of sequences with trees of different sizes; empty places follow them."""
    limits = TreeLimits(top_k=top_k, steps=steps, verify_size=room + 1)
    policy = FixedTree(limits)
    has_empty, numbers = several == 3, np.arange(several)
    starts = 40 + 9 * numbers, 43 + 7 * numbers, 100 * numbers
    start = np.stack([*starts, np.maximum(steps - numbers, 1), ROOT + numbers], axis=1)
    start = np.concatenate([start, np.zeros((int(has_empty), 5), np.int64)])
    device, hosts = DevicePools(limits, start), [Host(limits, policy, at) for at in range(several)]
    for level in range(steps):
        added = [host.candidates(level) for host in hosts]
        empty = [tuple(np.zeros_like(each) for each in added[0])] * (len(start) - several)
        candidates, log_probs = (np.stack(each) for each in zip(*added, *empty, strict=True))
        width = top_k
        tokens, above, mask = device.grow(level, candidates, log_probs, width)
        for at, host in enumerate(hosts):
            nodes = host.take(added[at], is_own=level < start[at, 3])
            if level + 1 < start[at, 3]:
                np.testing.assert_array_equal(tokens[at], host.pool.token_ids[nodes])
                np.testing.assert_array_equal(above[at], host.above)
                np.testing.assert_array_equal(mask[at], host.mask)
                np.testing.assert_array_equal(device.nodes[at], nodes)
    sizes = start.copy()
    sizes[:, 3] = [max(room + 1 - 20 * at, 2) for at in range(several)] + [0] * has_empty
    _check_selection(hosts, policy, device, sizes, room)


class Host:
    """The same tree on the host."""

    def __init__(self, limits: TreeLimits, policy: FixedTree, at: int) -> None:
        self.script, self.pool = (
            Scripted(at, limits.top_k),
            CandidatePool(ROOT + at, limits.pool_size),
        )
        self.policy, self.own_count = policy, 1
        self.newest, self.slots = np.zeros(1, np.int64), np.zeros(limits.pool_size, np.int64)
        self.seen, self.used = np.eye(1 + limits.draft_rows, dtype=bool), 0

    def candidates(self, level: int):
        return self.script.candidates(1 if not level else len(self.newest))

    def take(self, candidates, *, is_own: bool):
        """Return the nodes to expand, without those below the tree's levels."""
        if not is_own:
            return self.newest
        ids, log_probs = candidates
        added = self.pool.add(self.newest, ids, log_probs.astype(np.float64), np.exp(log_probs))
        nodes = self.policy.frontier(self.pool, added, np.ones(99))
        self.above = self.slots[self.pool.parents[nodes]]
        own = self.slots[nodes] = np.arange(self.used + 1, self.used + 1 + len(nodes))
        self.seen[own] |= self.seen[self.above]
        self.used += len(nodes)
        self.mask, self.newest = self.seen[own, 1 : self.used + 1], nodes
        return nodes


def _check_selection(hosts, policy: FixedTree, device: DevicePools, start, room: int) -> None:
    several, maximum = len(start), room + 1
    tokens, parents = np.zeros((several, maximum), np.int64), np.zeros((several, maximum), np.int64)
    nodes, own = np.zeros((several, maximum), np.int32), np.ones((several, maximum), np.float32)
    positions, slot = np.zeros((AXES, several, maximum), np.int64), np.full((MANY, 5), -1)
    masks = np.full((several, maximum, maximum), -1, np.int8)
    run_both(
        growth.select_tree, device.tokens, device.parents, device.scores, device.own, start,
        device.count, room, device.tokens.shape[1], tokens, parents, own, nodes,
        grid=(several,), SIZE=512 if device.count <= 512 else 1024, BLOCK=32,
    )  # fmt: skip
    laid_out = parents, start, maximum, AXES, device.many, positions, slot, masks
    run_both(growth.lay_out, *laid_out, grid=(several,), NODES=64)
    device.start, device.used = start, 0
    device._check_slot(slot, start[:, 3], maximum)
    for at, host in enumerate(hosts):
        tree, chosen = host.pool.tree(policy.select(host.pool, int(start[at, 3]) - 1))
        size = len(tree)
        np.testing.assert_array_equal(tokens[at, :size], tree.token_ids)
        np.testing.assert_array_equal(parents[at, :size], tree.parents)
        np.testing.assert_array_equal(nodes[at, :size], chosen)
        np.testing.assert_allclose(
            np.exp(own[at, 1:size]), host.pool.confidences[chosen][1:], rtol=1e-6
        )
        assert (nodes[at, size:] == -1).all()
        assert (parents[at, size:] == -1).all()
        expected_depths, expected_mask = tree.layout()
        for axis in positions[:, at, :size]:
            np.testing.assert_array_equal(axis, start[at, 1] + expected_depths)
        np.testing.assert_array_equal(masks[at, :size, :size], expected_mask)
        np.testing.assert_array_equal(masks[at, size:, size:], np.eye(maximum - size))


@pytest.mark.parametrize("scored", ["rates", "places"])
def test_scores_by_rates_and_by_place(scored):
    limits, random = TreeLimits(top_k=6, steps=4, verify_size=20), np.random.default_rng(3)
    table = np.concatenate([np.sort(random.random(11)), np.sort(-random.random(11))])
    if scored == "places":
        table = np.where(random.random(limits.pool_size) < 0.3, -np.inf, 0.0)
    device, script = DevicePools(limits, START, scored, table), Scripted(5, 6)
    for level, rows in enumerate((1, 6, 6, 6)):
        device.grow(level, *(each[None] for each in script.candidates(rows)), 6)
    count = device.count
    scores, own, above = (each[0] for each in (device.scores, device.own, device.parents))
    if scored == "places":
        np.testing.assert_array_equal(scores[1:count], table[1:count])
    else:
        rates = np.interp(np.exp(own[1:count].astype(float)), table[:11], table[11:])
        np.testing.assert_allclose(scores[1:count], rates + scores[above[1:count]], rtol=1e-12)
    tokens, parents = np.zeros(20, np.int64), np.zeros(20, np.int64)
    run_both(
        growth.select_tree, device.tokens, device.parents, device.scores, device.own, START, count,
        19, count, tokens, parents, np.zeros(20, np.float32), np.zeros(20, np.int32),
        SIZE=512, BLOCK=32,
    )  # fmt: skip
