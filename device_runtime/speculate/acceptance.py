"""Acceptance rules of speculative decoding: exact and typical acceptance.

Exact acceptance samples a token at every node, as plain decoding would. It continues while that
token is a child of the node. So the output has the base model's distribution for every tree. For
candidates that are a function of the context, the residual scheme of arXiv 2302.01318 and
2305.09781 is equivalent. Each emitted token uses one random number, so a seed gives the output of
plain decoding also with sampling.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from edgellm.device_runtime.arrays import F32
from edgellm.device_runtime.networks.decoder import PassResult
from edgellm.device_runtime.sampling.sampler import Sampler, draw, processed_distribution
from edgellm.device_runtime.speculate.tree import F64, Tree


@dataclass(frozen=True, slots=True)
class Accepted:
    """The result of verifying a tree."""

    path: list[int]  # accepted nodes, root first
    bonus: int  # the token after the path's last node


class Round(NamedTuple):
    """The tokens that one forward pass added to a sequence."""

    token_ids: tuple[int, ...]  # at least one
    tree: Tree | None = None  # the verified tree; None for plain decoding or a prefill
    path: tuple[int, ...] = ()  # accepted nodes, root first
    confidences: tuple[float, ...] = ()  # the draft's probability of every node


Accept = Callable[[Tree, PassResult, Sampler], Accepted]


def accept_exactly(tree: Tree, result: PassResult, sampler: Sampler) -> Accepted:
    """Accept nodes while the token sampled at a node is one of its children.

    Args:
        tree: N nodes.
        result: the base's forward pass over them, R = N.
        sampler: the request's sampler.

    Raises:
        EdgeLLMError: the base computed logits that are not numbers.
    """
    children, path = tree.children(), [0]
    while True:
        token_id = draw(result, path[-1], sampler)
        child = children.get((path[-1], token_id))
        if child is None:
            return Accepted(path, token_id)
        path.append(child)


@dataclass(frozen=True, slots=True)
class Typical:
    """Typical acceptance (Medusa, arXiv 2401.10774, 2.3.1).

    A token is accepted if its probability exceeds min(threshold, alpha * exp(-entropy)).
    """

    threshold: float
    alpha: float | None = None  # None: the threshold's square root

    def least(self, probabilities: F64) -> float:
        """The bound that a token's probability must exceed."""
        positive = probabilities[probabilities > 0]  # small probabilities underflow to 0
        entropy = float(-(positive * np.log(positive)).sum())
        alpha = math.sqrt(self.threshold) if self.alpha is None else self.alpha
        return min(self.threshold, alpha * math.exp(-entropy))


def accept_typically(
    tree: Tree, result: PassResult, sampler: Sampler, typical: Typical
) -> Accepted:
    """Accept the longest path of typical tokens.

    The output does NOT have the base's distribution. Greedy requests use exact acceptance.
    """
    if sampler.params.is_greedy:
        return accept_exactly(tree, result, sampler)
    paths: dict[int, list[int]] = {0: []}  # drafted tokens on the path to an acceptable node
    likelihood = {0: 0.0}
    depths, _ = tree.layout()
    cached: dict[int, tuple[dict[int, float], float]] = {}
    for node in range(1, len(tree)):
        parent = int(tree.parents[node])
        if parent not in likelihood:
            continue
        if parent not in cached:
            cached[parent] = _chances(result.logits[parent], sampler, paths[parent], typical)
        probabilities, least = cached[parent]
        probability = probabilities.get(int(tree.token_ids[node]), 0.0)
        if probability > least:
            likelihood[node] = likelihood[parent] + math.log(probability)
            paths[node] = [*paths[parent], int(tree.token_ids[node])]
    end = max(likelihood, key=lambda node: (depths[node], likelihood[node]))
    path = [end]
    while path[-1]:
        path.append(int(tree.parents[path[-1]]))
    sampler.take(paths[end])
    path.reverse()
    for parent, node in itertools.pairwise(path):
        sampler.record(result.logits[parent], int(tree.token_ids[node]))
    return Accepted(path, draw(result, end, sampler))


def _chances(
    logits: F32, sampler: Sampler, path: list[int], typical: Typical
) -> tuple[dict[int, float], float]:
    """Probabilities by token after the text and `path`, and the bound that they must exceed."""
    adjusted = sampler.adjusted(logits, path)
    token_ids, probabilities = processed_distribution(adjusted, sampler.params)
    chances = zip(token_ids.tolist(), probabilities.tolist(), strict=True)
    return dict(chances), typical.least(probabilities)
