"""Static trees, of the same shape every round (EAGLE-1, arXiv 2401.15077; Medusa, 2401.10774).

A choice is a node, written as the path of ranks to it: (0, 2) is the third likeliest child of the
root's likeliest child.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from edgellm.core.errors import EdgeLLMError
from edgellm.core.strict_json import parse
from edgellm.device_runtime.arrays import I64
from edgellm.device_runtime.speculate.tree import F64, CandidatePool

Choice = tuple[int, ...]

# Medusa's tree of 63 nodes, the default of TensorRT-LLM's EAGLE: children by parent.
_MC_SIM_7B_63: dict[Choice, int] = {
    (): 10, (0,): 10, (1,): 7, (2,): 3, (3,): 2, **{(rank,): 1 for rank in range(4, 10)},
    (0, 0): 10, (0, 1): 3, (0, 2): 2, **{(0, rank): 1 for rank in range(3, 8)},
    (1, 0): 2, (2, 0): 1, (0, 0, 0): 2,
}  # fmt: skip
NAMED = {
    "mc_sim_7b_63": tuple(
        (*parent, rank) for parent, count in _MC_SIM_7B_63.items() for rank in range(count)
    )
}


def read_choices(text: str) -> tuple[Choice, ...]:
    """Parse a tree, given by name or as a JSON list of paths; checks only types.

    Raises:
        EdgeLLMError: the text is neither.
    """
    if text in NAMED:
        return NAMED[text]
    hint = f"give {' or '.join(NAMED)}, or JSON like [[0], [0, 0], [1]]"
    try:
        paths = parse(text)
    except ValueError:
        raise EdgeLLMError(f"a tree of choices is not JSON: {text[:60]}", hint=hint) from None
    if not isinstance(paths, list) or not all(
        isinstance(path, list) and all(type(rank) is int for rank in path) for path in paths
    ):
        raise EdgeLLMError("a tree of choices is not a list of lists of ranks", hint=hint)
    if not paths:
        raise EdgeLLMError("a tree of choices has none", hint=hint)
    return tuple(map(tuple, paths))


def check_choices(choices: Sequence[Choice], max_non_leaves: int) -> None:
    """Reject choices that are not a tree, or too wide.

    Args:
        choices: paths of ranks.
        max_non_leaves: maximum nodes with children per level.

    Raises:
        EdgeLLMError: names the path or the level.
    """
    known = {(), *choices}
    for path in choices:
        if not path or min(path) < 0:
            raise EdgeLLMError(f"{list(path)} is not a choice", hint="give paths of ranks from 0")
        if path[:-1] not in known:
            raise EdgeLLMError(
                f"the choice {list(path)} has no parent", hint=f"add {list(path[:-1])}"
            )
    if len(known) <= len(choices):
        twice = next(path for path, count in Counter(choices).items() if count > 1)
        raise EdgeLLMError(f"the choice {list(twice)} is given twice")
    parents = {path[:-1] for path in choices} - {()}
    for level, count in sorted(Counter(map(len, parents)).items()):
        if count > max_non_leaves:
            raise EdgeLLMError(
                f"level {level} of the choices has {count} nodes with children, "
                f"--maxNonLeavesPerLayer allows {max_non_leaves}"
            )


class StaticTree:
    """The policy that drafts and verifies exactly the choices, independent of scores."""

    curve = None

    def __init__(self, choices: Sequence[Choice]) -> None:
        """Args: `choices`, checked; a pool must have one child of a parent for each rank."""
        numbers = {path: number for number, path in enumerate([(), *choices])}
        self._children = np.full((len(numbers), 1 + max(itertools.chain(*choices))), -1)
        for path in choices:
            self._children[numbers[path[:-1]], path[-1]] = numbers[path]
        self._is_parent = np.any(self._children >= 0, axis=1)

    def _numbers(self, pool: CandidatePool) -> I64:
        """The choice of every node of a pool; 0 is the root, -1 none."""
        numbers, width = np.zeros(pool.count, np.int64), self._children.shape[1]
        for first in range(1, pool.count, width):  # siblings are adjacent, by rank
            numbers[first : first + width] = self._children[numbers[pool.parents[first]]]
        return numbers

    def scores(self, log_probs: F64) -> F64:
        """The draft's own log-probabilities."""
        return log_probs

    def frontier(self, pool: CandidatePool, newest: I64, prices: F64) -> I64:
        """The choices of the newest level that have children."""
        numbers = self._numbers(pool)[newest]
        return newest[(numbers >= 0) & self._is_parent[numbers]][: len(prices)]

    def select(self, pool: CandidatePool, room: int) -> I64:
        """All choices, level by level."""
        return np.flatnonzero(self._numbers(pool) > 0)[:room]

    def pays(self, chances: Iterable[float]) -> bool:
        """Lookups do not pay: a static tree has no place for them."""
        del chances
        return False

    def learn(self, confidences: Sequence[float], accepted: Sequence[bool]) -> None:
        """Learn nothing."""
