"""Acceptance on the device equals acceptance on the host, tree by tree."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from interpreted import launch, run_both

from edgellm.core.errors import EdgeLLMError
from edgellm.core.graph_io import LOGITS
from edgellm.device_runtime.kernels.triton import acceptance, picks
from edgellm.device_runtime.networks.decoder import PassResult
from edgellm.device_runtime.sampling.sampler import Sampler, SamplingParams
from edgellm.device_runtime.speculate.acceptance import accept_exactly
from edgellm.device_runtime.speculate.tree import Tree

# The interpreter computes with NumPy, which warns of NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

GREEDY_SAFE = SamplingParams(temperature=0.9, top_p=0.9, top_k=2, seed=42)
NODES, VOCAB, TREES = 16, 12, 10_000
GREEDY = SamplingParams(temperature=0)
SAMPLED = [
    SamplingParams(temperature=1.0, top_p=1.0, top_k=0, seed=42),
    SamplingParams(temperature=0.4, top_p=1.0, top_k=5, seed=42),
    SamplingParams(temperature=2.5, top_p=0.8, top_k=0, seed=42),
    SamplingParams(temperature=1.0, top_p=0.6, top_k=3, seed=42),
    SamplingParams(temperature=1.3, top_p=1.0, top_k=2, min_p=0.3, seed=42),
    SamplingParams(temperature=0.8, top_p=0.95, top_k=11, min_p=0.05, seed=42),
    SamplingParams(temperature=0.01, top_p=0.9, top_k=40, seed=42),
]


def random_trees(count: int, seed: int = 0) -> list[Tree]:
    """Of 1 to `NODES` nodes, parents before children; siblings may have equal tokens."""
    random = np.random.default_rng(seed)
    trees = []
    for size in random.integers(1, NODES + 1, count).tolist():
        above = (random.random(size) ** 1.5 * np.maximum(np.arange(size), 1)).astype(np.int64)
        tokens = random.integers(0, VOCAB, size)
        trees.append(Tree(tokens, np.where(np.arange(size), above, -1), np.ones(size)))
    return trees


def random_logits(trees: list[Tree], seed: int = 1) -> np.ndarray:
    """[T, NODES, V]; most nodes like one of their children; many numbers are equal."""
    random = np.random.default_rng(seed)
    logits = np.round(random.normal(size=(len(trees), NODES, VOCAB)), 1).astype(np.float32)
    for row, tree in zip(logits, trees, strict=True):
        row[tree.parents[1:], tree.token_ids[1:]] += np.float32(1.5)
    logits[random.random(logits.shape) < 0.05] = -np.inf
    logits[..., 0] = np.maximum(logits[..., 0], -9)
    return logits


def stacked(trees: list[Tree]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and parents [T, NODES]."""
    tokens = np.full((len(trees), NODES), -1, np.int64)
    parents = np.full((len(trees), NODES), -1, np.int64)
    for tree, own_tokens, own_parents in zip(trees, tokens, parents, strict=True):
        own_tokens[: len(tree)], own_parents[: len(tree)] = tree.token_ids, tree.parents
    return tokens, parents


def picked(logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of the kernels of `picks`, [T, NODES, count] (`test_triton_picks`)."""
    order = np.argsort(-logits, axis=-1, kind="stable")[..., :count]
    values = np.full((*logits.shape[:2], count), -np.inf, np.float32)
    ids = np.full(values.shape, acceptance.NO_TOKEN.value, np.int32)
    values[..., : order.shape[-1]] = np.take_along_axis(logits, order, -1)
    ids[..., : order.shape[-1]] = order
    return values, ids


class Accepted:
    """Buffers of a launch for T trees."""

    def __init__(self, count: int) -> None:
        self.path = np.full((count, NODES), -7, np.int32)
        self.outcome = np.full((count, 3), -7, np.int32)

    def of(self, tree: int) -> tuple[list[int], int, int]:
        length, token, status = self.outcome[tree].tolist()
        assert (self.path[tree, length:] == -1).all()
        return self.path[tree, :length].tolist(), token, status


def greedy(trees: list[Tree], logits: np.ndarray, at_once: int) -> Accepted:
    found, count = Accepted(len(trees)), len(trees)
    launch(
        acceptance.accept_greedy, (-(-count // at_once),), *stacked(trees),
        logits.argmax(-1), logits.max(-1), count, NODES, found.path, found.outcome,
        TREES=at_once, NODES=NODES,
    )  # fmt: skip
    return found


def sampled(trees, logits, params, uniforms, at_once: int, maximum: int = NODES) -> Accepted:
    found, count = Accepted(len(trees)), len(trees)
    rules = np.array([[p.temperature, p.top_k, p.top_p, p.min_p] for p in params], np.float64)
    launch(
        acceptance.accept_sampled, (-(-count // at_once),), *stacked(trees),
        *picked(logits, maximum), rules, uniforms, count, NODES, VOCAB, found.path, found.outcome,
        TREES=at_once, NODES=NODES, PICKS=maximum,
    )  # fmt: skip
    return found


def on_host(tree: Tree, logits: np.ndarray, params: SamplingParams) -> tuple[list[int], int]:
    rows = logits[: len(tree)]
    outcome = accept_exactly(
        tree, PassResult({LOGITS: rows[None]}, len(rows)), Sampler(params=params)
    )
    return outcome.path, outcome.bonus


def test_greedy_acceptance_of_many_trees():
    trees = random_trees(TREES)
    logits = random_logits(trees)
    found = greedy(trees, logits, 2048)
    lengths = set()
    for index, tree in enumerate(trees):
        path, token, status = found.of(index)
        assert (path, token) == on_host(tree, logits[index], GREEDY)
        assert status == acceptance.DECIDED.value
        lengths.add(len(path))
    assert lengths >= {1, 2, 3, 4, 5}


@pytest.mark.nightly
def test_sampled_acceptance_of_many_trees():
    trees = random_trees(TREES, 2)
    logits = random_logits(trees, 3)
    params = [
        dataclasses.replace(SAMPLED[index % len(SAMPLED)], seed=index) for index in range(TREES)
    ]
    uniforms = np.stack(
        [np.random.Generator(np.random.Philox(p.seed)).random(NODES) for p in params]
    )
    found = sampled(trees, logits, params, uniforms, 2048)
    drawn = 0
    for index, tree in enumerate(trees):
        path, token, status = found.of(index)
        assert (path, token) == on_host(tree, logits[index], params[index]), index
        assert status == acceptance.DECIDED.value
        drawn += token != logits[index, path[-1]].argmax()
    assert drawn > TREES / 5  # this acceptance is not greedy


def test_picks_that_are_fewer_than_the_vocabulary():
    """Where a token after the picks might be drawn, the kernel says so instead of drawing."""
    trees = random_trees(600, 4)
    logits = random_logits(trees, 5)
    params = [
        SamplingParams(temperature=0.9, top_p=0.9, top_k=index % 5, seed=index)
        for index in range(600)
    ]
    params = [GREEDY_SAFE if p.is_greedy else p for p in params]
    uniforms = np.stack(
        [np.random.Generator(np.random.Philox(p.seed)).random(NODES) for p in params]
    )
    found = sampled(trees, logits, params, uniforms, 256, maximum=4)
    decided = found.outcome[:, 2] == acceptance.DECIDED.value
    assert set(found.outcome[~decided, 2]) == {acceptance.UNDECIDED.value}
    for index in np.flatnonzero(decided):
        path, token, _ = found.of(index)
        assert (path, token) == on_host(trees[index], logits[index], params[index])
    top_k = np.array([p.top_k for p in params])
    assert not decided[(top_k == 0) | (top_k == 4)].any()  # a fifth might equal the fourth
    assert 0.7 < decided[(top_k == 2) | (top_k == 3)].mean() < 1  # some are equal to the last pick


def test_nan_ends_the_path_and_leaves_the_error_to_the_host():
    tree = Tree(np.array([0, 1, 2]), np.array([-1, 0, 1]), np.ones(3))
    logits = np.zeros((1, NODES, VOCAB), np.float32)
    logits[0, 0, 1] = 4
    for broken in (math.nan, math.inf, -math.inf):
        logits[0, 1] = broken
        with pytest.raises(EdgeLLMError, match="the engine computed"):
            on_host(tree, logits[0], GREEDY)
        path, _, status = greedy([tree], logits, 1).of(0)
        assert (path, status) == ([0, 1], acceptance.NOT_A_NUMBER.value)
        found = sampled(
            [tree],
            logits,
            [SamplingParams(temperature=1.0, top_p=1.0, top_k=1, seed=42)],
            np.zeros((1, NODES)),
            1,
        )
        path, _, status = found.of(0)
        assert (path, status) == ([0, 1], acceptance.NOT_A_NUMBER.value)


@pytest.mark.each_change("64-1")
@pytest.mark.parametrize(("vocab", "share"), [(5, 1), (64, 1), (600, 3)])
def test_picks_and_sums_of_logits(vocab, share):
    """Of equal numbers the earlier comes first; -0 equals 0; a row may hold NaN."""
    random, block = np.random.default_rng(vocab), 256
    logits = np.round(random.normal(size=(5, vocab)) * 3, 1).astype(np.float32)
    logits[1] = np.where(random.random(vocab) < 0.5, np.float32(-0.0), np.float32(0.0))
    logits[2, vocab // 2 :] = -np.inf
    logits[3] = -np.inf
    keys = np.zeros((5, share, 64), np.int64)
    sums = np.zeros((5, share, 2), np.float32)
    run_both(picks.pick_shares, logits, vocab, keys, sums, grid=(5, share), PICKS=64, BLOCK=block)
    values, ids = np.zeros((5, 64), np.float32), np.zeros((5, 64), np.int32)
    argmax, log_sums = np.zeros(5, np.int64), np.zeros(5, np.float32)
    run_both(
        picks.join_picks, keys, sums, vocab, share, values, ids, argmax, log_sums,
        grid=(5,), PICKS=64, MOST=4,
    )  # fmt: skip
    expected_values, expected_ids = picked(logits[:, None], 64)
    np.testing.assert_array_equal(ids, expected_ids[:, 0])
    np.testing.assert_array_equal(values, expected_values[:, 0])
    np.testing.assert_array_equal(argmax, logits.argmax(-1))
    exact = logits[:3].astype(np.float64)
    exact = np.log(np.exp(exact - exact.max(-1, keepdims=True)).sum(-1)) + exact.max(-1)
    np.testing.assert_allclose(log_sums[:3], exact, rtol=1e-6)


def test_nan_is_the_first_pick():
    logits = np.zeros((2, 100), np.float32)
    logits[0, 70], logits[1, 30] = np.nan, -np.nan
    keys, sums = np.zeros((2, 1, 64), np.int64), np.zeros((2, 1, 2), np.float32)
    launch(picks.pick_shares, (2, 1), logits, 100, keys, sums, PICKS=64, BLOCK=128)
    values, ids = np.zeros((2, 64), np.float32), np.zeros((2, 64), np.int32)
    launch(picks.join_picks, (2,), keys, sums, 100, 1, values, ids, np.zeros(2, np.int64),
           np.zeros(2, np.float32), PICKS=64, MOST=1)  # fmt: skip
    assert np.isnan(values[:, 0]).all()
    assert ids[:, 0].tolist() == [70, 30] == logits.argmax(-1).tolist()


def test_the_fake_gpus_acceptance_is_the_kernels():
    """Tree by tree, as a round has them; the picks are as many as the catalog's."""
    trees = random_trees(12, 8)
    logits = random_logits(trees, 9)
    tokens, parents = stacked(trees)
    values, ids = picked(logits, 64)
    uniforms = np.random.default_rng(10).random((12, NODES))
    for at, tree in enumerate(trees):
        params, size = SAMPLED[at % len(SAMPLED)], len(tree)
        path, outcome = np.zeros(NODES, np.int32), np.zeros(3, np.int32)
        own = tokens[at], parents[at]
        run_both(
            acceptance.accept_greedy, *own, logits[at].argmax(-1), logits[at].max(-1), 1, size,
            path, outcome, TREES=1, NODES=64,
        )  # fmt: skip
        rules = np.array([params.temperature, params.top_k, params.top_p, params.min_p], float)
        run_both(
            acceptance.accept_sampled, *own, values[at], ids[at], rules, uniforms[at], 1, size,
            VOCAB, path, outcome, TREES=1, NODES=64, PICKS=64,
        )  # fmt: skip
