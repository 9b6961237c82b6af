"""Acceptance by exact enumeration: every value of every random number, weighed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.core.graph_io import LOGITS
from edgellm.device_runtime.networks.decoder import PassResult
from edgellm.device_runtime.sampling.sampler import Sampler, SamplingParams
from edgellm.device_runtime.speculate.acceptance import (
    Accepted,
    Typical,
    accept_exactly,
    accept_typically,
)
from edgellm.device_runtime.speculate.tree import Tree

VOCAB, LENGTH = 4, 3
PROMPT = (1, 2)
GREEDY = SamplingParams(temperature=0)
PARAMS = [
    SamplingParams(temperature=1.0, top_p=1.0, top_k=0, seed=42),
    SamplingParams(temperature=0.4, top_p=1.0, top_k=0, seed=42),
    SamplingParams(temperature=2.5, top_p=0.8, top_k=0, seed=42),
    SamplingParams(temperature=1.0, top_p=0.6, top_k=3, seed=42),
    SamplingParams(temperature=1.3, top_p=1.0, top_k=2, seed=42),
    SamplingParams(temperature=1.0, top_p=0.9, top_k=1, seed=42),
    GREEDY,
    SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.2, seed=42),
    SamplingParams(temperature=1.0, top_p=0.9, top_k=0, repetition_penalty=1.7, seed=42),
    SamplingParams(
        temperature=0.8,
        top_p=1.0,
        top_k=3,
        min_p=0.05,
        presence_penalty=1.1,
        frequency_penalty=0.6,
        seed=42,
    ),
    SamplingParams(
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        logit_bias={0: 1.5, 3: -100},
        presence_penalty=-0.7,
        seed=42,
    ),
    SamplingParams(temperature=0.0, repetition_penalty=1.9, frequency_penalty=0.9),
]


@functools.cache
def base_logits(seed: int, context: tuple[int, ...]) -> np.ndarray:
    random = np.random.default_rng([seed, 1, *context])
    return random.normal(size=VOCAB).astype(np.float32) * 2


def naive_logits(logits, params, said) -> list[float]:
    """Logits after biases and penalties, for `PROMPT` and the output so far."""
    found, single = [], np.float32
    for token, logit in enumerate(logits):
        logit += single(params.logit_bias.get(token, 0))
        if token in PROMPT or token in said:
            factor = single(params.repetition_penalty)
            logit = logit / factor if logit > 0 else logit * factor
        if count := said.count(token):
            logit -= single(params.presence_penalty) + single(params.frequency_penalty) * count
        found.append(float(logit))
    return found


def naive_distribution(logits, params, said=()) -> dict[int, float]:
    """Probabilities by token id, from the definitions of penalties and sampling parameters."""
    logits = naive_logits(logits, params, said)
    order = sorted(range(VOCAB), key=lambda token: -logits[token])
    if params.is_greedy:
        return {order[0]: 1.0}
    kept = order[: params.top_k] if params.top_k else order
    weights = {token: math.exp(logits[token] / params.temperature) for token in kept}
    total = math.fsum(weights.values())
    nucleus: dict[int, float] = {}
    for token in kept:
        if math.fsum(nucleus.values()) >= params.top_p and nucleus:
            break
        nucleus[token] = weights[token] / total
    least = params.min_p * max(nucleus.values())
    nucleus = {token: chance for token, chance in nucleus.items() if chance >= least}
    mass = math.fsum(nucleus.values())
    return {token: chance / mass for token, chance in sorted(nucleus.items())}


class Exhaustive(Sampler):
    """The real sampler, but its uniform numbers are those of a chosen branch.

    Every interval of the uniform number that gives one token is one branch; `weight` is the
    product of the intervals' lengths.
    """

    def __init__(self, params: SamplingParams, branches: list[int]) -> None:
        super().__init__(params=params, prompt=PROMPT)
        self._random = self  # type: ignore[assignment]
        self._said: tuple[int, ...] = ()
        self.branches, self.widths, self.weight, self._uniform = branches, [], 1.0, 0.0

    def choose(self, logits, argmax):
        shares = list(naive_distribution(logits, self.params, self._said).items())
        if len(self.branches) == len(self.widths):
            self.branches.append(0)
        branch = self.branches[len(self.widths)]
        self.widths.append(len(shares))
        token, share = shares[branch]
        low = math.fsum(chance for _, chance in shares[:branch])
        self.weight *= share
        adjusted = self.adjusted(logits)
        for place in (0.001, 0.999):  # constant over the whole interval
            self._uniform = low + place * share
            assert self._pick(adjusted, int(adjusted.argmax())) == token
        self._uniform = low + 0.5 * share
        assert super().choose(logits, argmax) == token
        return token

    def take(self, token_ids):
        super().take(token_ids)
        self._said += tuple(token_ids)

    def random(self) -> float:
        return self._uniform


def enumerate_all(params, run) -> dict[tuple[int, ...], float]:
    """The exact distribution of what `run(sampler)` returns."""
    found: dict[tuple[int, ...], float] = {}
    branches: list[int] = []
    while True:
        sampler = Exhaustive(params, branches)
        outcome = run(sampler)
        found[outcome] = found.get(outcome, 0.0) + sampler.weight
        branches = sampler.branches[: len(sampler.widths)]
        while branches and branches[-1] + 1 == sampler.widths[len(branches) - 1]:
            branches.pop()
        if not branches:
            return found
        branches[-1] += 1


def tree_of(seed: int, context: tuple[int, ...], depth: int) -> Tree:
    """An arbitrary tree of distinct siblings, a function of the context alone."""
    random = np.random.default_rng([seed, 2, *context])
    token_ids, parents, depths = [context[-1]], [-1], [0]
    for node in itertools.count():
        if node == len(token_ids) or len(token_ids) > 14:
            break
        if depths[node] < depth:
            for token in random.permutation(VOCAB)[: random.integers(0, VOCAB + 1)].tolist():
                token_ids.append(token)
                parents.append(node)
                depths.append(depths[node] + 1)
    return Tree(np.array(token_ids), np.array(parents), np.ones(len(parents)))


def verify(seed: int, context: tuple[int, ...], tree: Tree) -> PassResult:
    """Logits of the base for every node."""
    rows = []
    for node in range(len(tree)):
        path = []
        while node > 0:
            path.append(int(tree.token_ids[node]))
            node = int(tree.parents[node])
        rows.append(base_logits(seed, context + tuple(path[::-1])))
    logits = np.stack(rows)
    return PassResult({LOGITS: logits[None]}, len(logits))


def emitted(seed: int, accept, sampler) -> tuple[int, ...]:
    """The next tokens by rounds of speculation, as the loop runs them."""
    context: tuple[int, ...] = PROMPT
    while (left := LENGTH + 2 - len(context)) > 0:
        tree = tree_of(seed, context, min(left - 1, 3))
        outcome = accept(tree, verify(seed, context, tree), sampler)
        for above, below in itertools.pairwise(outcome.path):
            assert tree.parents[below] == above
        context += (*(int(tree.token_ids[node]) for node in outcome.path[1:]), outcome.bonus)
    assert len(context) == LENGTH + 2
    return context[2:]


def ancestral(seed: int, params) -> dict[tuple[int, ...], float]:
    found = {(): 1.0}
    for _ in range(LENGTH):
        found = {
            (*tokens, token): mass * share
            for tokens, mass in found.items()
            for token, share in naive_distribution(
                base_logits(seed, (*PROMPT, *tokens)), params, tokens
            ).items()
        }
    return found


def total_variation(one, other) -> float:
    return sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other}) / 2


def distance(seed: int, params, accept) -> float:
    """Distance of speculation from ancestral sampling."""
    found = enumerate_all(params, lambda sampler: emitted(seed, accept, sampler))
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    return total_variation(found, ancestral(seed, params))


@pytest.mark.parametrize("params", PARAMS, ids=str)
@settings(max_examples=12)
@given(seed=st.integers(0, 10_000))
def test_any_tree_preserves_the_distribution(params, seed):
    assert distance(seed, params, accept_exactly) < 1e-12


def top_child(tree, result, sampler):
    """Biased: the first child is always taken."""
    path = [0]
    while True:
        below = np.flatnonzero(tree.parents == path[-1])
        if not len(below):
            return Accepted(path, sampler.choose(result.logits[path[-1]], 0))
        path.append(int(below[0]))


def unprocessed_bonus(tree, result, sampler):
    """Biased, as EAGLE-1's code was: the bonus ignores temperature, top-k and top-p."""
    outcome = accept_exactly(tree, result, sampler)
    if any(tree.parents == outcome.path[-1]):
        return outcome
    logits = result.logits[outcome.path[-1]]
    return Accepted(outcome.path, int(logits.argmax()))


def again_after_rejection(tree, result, sampler):
    """Biased: a rejected node is followed by a draw that may give the rejected child."""
    outcome = accept_exactly(tree, result, sampler)
    row = outcome.path[-1]
    if not any(tree.parents == row):
        return outcome
    return Accepted(outcome.path, sampler.choose(result.logits[row], 0))


def typical(tree, result, sampler):
    return accept_typically(tree, result, sampler, Typical(0.09))


def without_ancestors(tree, result, sampler):
    """Biased under penalties: penalties of all nodes ignore their ancestors."""
    params, text = sampler.params, sampler._said
    outcome = accept_exactly(tree, result, sampler)
    shares = naive_distribution(result.logits[outcome.path[-1]], params, text)
    return Accepted(outcome.path, max(shares, key=shares.__getitem__))


def test_the_check_finds_penalties_that_forget_a_nodes_ancestors():
    params = SamplingParams(temperature=0.0, frequency_penalty=1.5)
    found = [distance(seed, params, without_ancestors) for seed in range(20)]
    assert max(found) == 1


@pytest.mark.parametrize(
    "accept",
    [top_child, unprocessed_bonus, again_after_rejection, typical],
    ids=lambda accept: accept.__name__,
)
def test_the_check_finds_biased_acceptance(accept):
    found = [
        distance(seed, SamplingParams(temperature=0.7, top_p=1.0, top_k=0, seed=42), accept)
        for seed in range(6)
    ]
    assert max(found) > 0.02


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_same_seed_equals_plain_decoding(params):
    for seed in range(30):
        seeded = dataclasses.replace(params, seed=seed)
        one, other = Sampler(params=seeded, prompt=PROMPT), Sampler(params=seeded, prompt=PROMPT)
        plain = ()
        for _ in range(LENGTH):
            logits = base_logits(seed, (1, 2, *plain))
            plain += (one.choose(logits, int(logits.argmax())),)
        assert emitted(seed, accept_exactly, other) == plain


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000))
def test_greedy_is_exact_also_when_typical(seed):
    assert distance(seed, GREEDY, typical) == 0


def naive_typical(tree, result, params, threshold, alpha) -> list[int]:
    """The end nodes that Medusa's definition allows: the longest, of equals the likeliest."""
    scores: dict[int, tuple[int, float]] = {0: (0, 0.0)}
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, len(tree)):
        parent = int(tree.parents[node])
        if parent not in scores:
            continue
        chances = naive_distribution(result.logits[parent], params, paths[parent])
        entropy = -sum(p * math.log(p) for p in chances.values())
        token = int(tree.token_ids[node])
        chance = chances.get(token, 0.0)
        if chance > min(threshold, alpha * math.exp(-entropy)):
            length, score = scores[parent]
            scores[node] = length + 1, score + math.log(chance)
            paths[node] = (*paths[parent], token)
    best = max(scores.values())
    return [n for n, s in scores.items() if s[0] == best[0] and s[1] > best[1] - 1e-9]


@pytest.mark.parametrize("alpha", [None, 0.2, 0.9])
@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.3, 1.0])
@settings(max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_typical_acceptance_follows_its_definition(threshold, alpha, seed):
    params = SamplingParams(
        temperature=0.8, top_p=0.95, top_k=3, repetition_penalty=1.4, frequency_penalty=0.5, seed=42
    )
    tree = tree_of(seed, PROMPT, 3)
    result, sampler = verify(seed, PROMPT, tree), Sampler(params=params, prompt=PROMPT)
    outcome = accept_typically(tree, result, sampler, Typical(threshold, alpha))
    known = math.sqrt(threshold) if alpha is None else alpha
    assert outcome.path[-1] in naive_typical(tree, result, params, threshold, known)
    assert outcome.path[0] == 0
    for above, below in itertools.pairwise(outcome.path):
        assert tree.parents[below] == above
    taken = tuple(int(tree.token_ids[node]) for node in outcome.path[1:])
    logits = result.logits[outcome.path[-1]]
    assert outcome.bonus in naive_distribution(logits, params, taken)
    np.testing.assert_allclose(  # the path and the bonus are part of the text
        sampler.adjusted(logits), naive_logits(logits, params, (*taken, outcome.bonus)), atol=1e-5
    )


@pytest.mark.filterwarnings("error")
def test_typical_acceptance_of_vanishing_probabilities():
    logits = np.array([[0, 90, -90, 5], [1, 2, 3, 4]], np.float32)
    tree = Tree(np.array([0, 1]), np.array([-1, 0]), np.ones(2))
    result = PassResult({LOGITS: logits[None]}, len(logits))
    outcome = accept_typically(
        tree,
        result,
        Sampler(params=SamplingParams(temperature=0.01, top_p=1.0, top_k=0, seed=42)),
        Typical(0.09),
    )
    assert outcome.path == [0, 1]
