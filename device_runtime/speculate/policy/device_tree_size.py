"""Limits and size policy of draft trees that the device builds without the host.

The host receives a tree only after verification. So it chooses the size in advance, by the
acceptance of earlier trees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from edgellm.device_runtime.runners.device_speculation import Growth
from edgellm.device_runtime.speculate.device_rounds import Size
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.device_runtime.speculate.policy.costs import Costs, price
from edgellm.device_runtime.speculate.policy.spec_gate import SpecGate
from edgellm.device_runtime.speculate.policy.static_tree import Choice
from edgellm.device_runtime.speculate.policy.tree_policy import TreeLimits
from edgellm.device_runtime.speculate.tree import F64, Tree

_SIZES = (8, 16, 32)  # of smaller trees; each needs a context and a graph of the base
_MEMORY = 0.05  # weight of the newest tree in running means
_LARGEST_EVERY = 24  # rounds between trees of full size, which measure what a larger tree gains


def growth_of(options: SpecOptions, limits: TreeLimits) -> Growth | None:
    """Limits of trees on the device; None: lookups need the host in every round."""
    if options.lookups:
        return None
    if options.choices:
        return _static_growth(options.choices, limits)
    widths = (limits.top_k,) * (limits.steps - 1)
    maximum = limits.verify_size
    if options.tree == "fixed":
        return Growth(top_k=limits.top_k, widths=widths, nodes=(maximum,), scored="draft")
    nodes = tuple(size for size in _SIZES if size < maximum)
    return Growth(top_k=limits.top_k, widths=widths, nodes=(*nodes, maximum), scored="rates")


def _static_growth(choices: Sequence[Choice], limits: TreeLimits) -> Growth:
    """Scores by place: 0 for nodes with children, -1 for leaves, -inf for places without choice."""
    known, parents = set(choices), {path[:-1] for path in choices}
    widths = Counter(len(path) for path in parents - {()})
    level: list[Choice] = [()]
    places = [0.0]
    for _ in range(limits.steps):
        below = [(*path, rank) for path in level for rank in range(limits.top_k)]
        places += [0.0 if path in parents else -1.0 if path in known else -np.inf for path in below]
        level = [path for path in below if path in parents]
    sizes = tuple(widths[depth] for depth in range(1, limits.steps))
    return Growth(
        top_k=limits.top_k,
        widths=sizes,
        nodes=(limits.verify_size,),
        scored="places",
        places=np.array(places),
    )


class Sizes(Protocol):
    """Chooses the tree size of a round; learns over requests."""

    def plan(self, levels: int, answers: int = 1) -> Size:
        """The size of a tree of at most `levels`, in a batch of `answers` sequences."""
        ...

    def learn(self, tree: Tree, size: Size) -> None:
        """Record a tree of a size, with the acceptance probabilities of its nodes."""
        ...


class FixedSize:
    """Always the maximum size."""

    def __init__(self, growth: Growth) -> None:
        self._growth = growth

    def plan(self, levels: int, answers: int = 1) -> Size:
        """See `Sizes`."""
        del answers
        return Size(min(levels, self._growth.levels), self._growth.nodes[-1])

    def learn(self, tree: Tree, size: Size) -> None:
        """Learn nothing."""


class WorthwhileSize:
    """The size at which each level and verified token gains more tokens than its time is worth.

    See `tree_policy`; the gains are running means over rounds.
    """

    def __init__(self, growth: Growth, costs: Costs, controller: SpecGate) -> None:
        self._growth, self._costs, self._controller = growth, costs, controller
        self._by_rank = np.zeros(growth.nodes[-1])  # acceptance by rank, likeliest node first
        self._by_level = np.zeros(growth.levels)  # expected accepted nodes of a level
        self._seen_ranks, self._seen_levels = self._by_rank.copy(), self._by_level.copy()
        self._rounds = 0

    def plan(self, levels: int, answers: int = 1) -> Size:
        """See `Sizes`."""
        growth, rate = self._growth, self._controller.rate
        maximum = min(levels, growth.levels)
        self._rounds += 1
        is_known = self._seen_ranks.all() and self._seen_levels[:maximum].all()
        if not is_known or self._rounds % _LARGEST_EVERY == 0:
            return Size(maximum, growth.nodes[-1])
        step = self._costs.step_share(answers)
        steps = [rate * float(price(step, width)) for width in growth.widths]
        deep = 1
        while deep < maximum and self._by_level[deep] > steps[deep - 1]:
            deep += 1
        sizes = np.array(growth.nodes)
        verify = np.array(self._controller.verify)  # in this batch
        gains = np.cumsum(self._by_rank)[sizes - 1] - rate * price(verify, sizes)
        return Size(deep, int(sizes[int(gains.argmax())]))

    def learn(self, tree: Tree, size: Size) -> None:
        """See `Sizes`; only full-depth trees update ranks, only full-size trees update levels."""
        if size.levels == self._growth.levels:
            chances = np.sort(tree.probabilities)[::-1]
            _mean(self._by_rank, self._seen_ranks, chances, size.nodes)
        if size.nodes == self._growth.nodes[-1]:
            depths, _ = tree.layout()
            drafted = np.zeros(size.levels)
            np.add.at(drafted, depths[1:] - 1, tree.probabilities[1:])
            _mean(self._by_level, self._seen_levels, drafted, size.levels)


def _mean(means: F64, counts: F64, found: F64, size: int) -> None:
    """Update the first `size` running means with `found`, padded with zeros."""
    values = np.zeros(size)
    values[: len(found)] = found[:size]
    counts[:size] += 1
    means[:size] += np.maximum(_MEMORY, 1 / counts[:size]) * (values - means[:size])
