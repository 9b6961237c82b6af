"""Which drafted tokens become part of the answer.

Exact acceptance draws at every node what plain decoding would draw there, and goes on as long as
the drawn token is a child: the answer's distribution is the base's whatever the tree holds (for
candidates that are a function of the context, the residual scheme of arXiv 2302.01318 and
2305.09781 amounts to the same). One random number is spent for each emitted token, so that even
the sampled answer of a seed is that of plain decoding.
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
    """The outcome of a verification."""

    path: list[int]  # nodes from the root down
    bonus: int  # the token after the path's last node


class Round(NamedTuple):
    """What one pass gave to an answer."""

    token_ids: tuple[int, ...]  # at least one
    tree: Tree | None = None  # that was verified; None for a token of plain decoding or a prefill
    path: tuple[int, ...] = ()  # accepted nodes, root first
    confidences: tuple[float, ...] = ()  # the draft's probability of every node


Accept = Callable[[Tree, PassResult, Sampler], Accepted]


def accept_exactly(tree: Tree, result: PassResult, sampler: Sampler) -> Accepted:
    """Walk down while the token drawn at a node is one of its children.

    Args:
        tree: N nodes.
        result: the base's pass over them, R = N.
        sampler: of the request.

    Raises:
        EdgeLLMError: the base computed something that is not a number.
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
    """When a token is typical enough (Medusa, arXiv 2401.10774, 2.3.1).

    Its probability exceeds min(threshold, alpha * exp(-entropy)).
    """

    threshold: float
    alpha: float | None = None  # None: the threshold's square root

    def least(self, probabilities: F64) -> float:
        """What a probability must exceed."""
        positive = probabilities[probabilities > 0]  # small ones underflow
        entropy = float(-(positive * np.log(positive)).sum())
        alpha = math.sqrt(self.threshold) if self.alpha is None else self.alpha
        return min(self.threshold, alpha * math.exp(-entropy))


def accept_typically(
    tree: Tree, result: PassResult, sampler: Sampler, typical: Typical
) -> Accepted:
    """Take the longest path of tokens that are typical enough.

    This is NOT the base's distribution. Greedy requests are accepted exactly.
    """
    if sampler.params.is_greedy:
        return accept_exactly(tree, result, sampler)
    paths: dict[int, list[int]] = {0: []}  # drafted tokens down to a node that may be taken
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
    """Probabilities by token behind the text and `path`, and what they must exceed."""
    adjusted = sampler.adjusted(logits, path)
    token_ids, probabilities = processed_distribution(adjusted, sampler.params)
    chances = zip(token_ids.tolist(), probabilities.tolist(), strict=True)
    return dict(chances), typical.least(probabilities)
