"""Draft trees: the pool of candidates from a draft, and the tree that the base verifies.

Nodes are in topological order: the root (the newest committed token) is first, and every parent
has a smaller index than its children.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.device_runtime.arrays import (
    F32,
    I64,
    Bool,
)

F64 = NDArray[np.float64]
_NO_PARENT, _CERTAIN = np.array([-1]), np.ones(1)  # shared by all roots: trees are read-only


@dataclass(frozen=True, slots=True)
class Tree:
    """The draft tree that one forward pass verifies; N nodes."""

    token_ids: I64  # [N]
    parents: I64  # [N]; -1 for the root
    probabilities: F64  # [N]; estimate that the node and its ancestors are accepted

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def of_root(cls, token_id: int) -> Tree:
        """A tree without drafted tokens: plain decoding."""
        return cls.of_roots(np.array([token_id]))

    @classmethod
    def of_roots(cls, token_ids: I64) -> Tree:
        """As `of_root`, of `token_ids`, int64 [1]."""
        return cls(token_ids, _NO_PARENT, _CERTAIN)

    def layout(self) -> tuple[I64, Bool]:
        """Depth of each node [N], and the attention mask [N, N]: itself and its ancestors."""
        size = len(self)
        depths = self.depths()
        mask = np.eye(size, dtype=np.bool_)
        for node, parent in enumerate(self.parents.tolist()):
            if parent > 0:
                mask[node] |= mask[parent]
        mask[:, 0] = True
        return np.array(depths), mask

    def depths(self) -> list[int]:
        """Depth of each node; the root has 0."""
        depths: list[int] = []
        for parent in self.parents.tolist():
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    def children(self) -> dict[tuple[int, int], int]:
        """Node index by (parent, token)."""
        keys = zip(self.parents.tolist(), self.token_ids.tolist(), strict=True)
        return {key: node for node, key in enumerate(keys)}


class CandidatePool:
    """All candidates of a round; node 0 is the root. Nodes are appended and never move.

    `scores` are cumulative log-probabilities: a child's score is at most its parent's.
    """

    def __init__(self, root: int, size: int) -> None:
        """Args: `size`, the maximum number of nodes, root included."""
        self.token_ids = np.empty(size, np.int64)
        self.parents = np.empty(size, np.int64)
        self.scores = np.empty(size)
        self.confidences = np.empty(size)  # the draft's probability, given the parent
        self.token_ids[0], self.parents[0], self.scores[0], self.confidences[0] = root, -1, 0.0, 1.0
        self.count = 1

    @classmethod
    def of_tree(cls, token_ids: I64, parents: I64, scores: F64, confidences: F64) -> CandidatePool:
        """The pool of a tree that a device built: its nodes [N], with scores given the parent."""
        pool = cls(int(token_ids[0]), len(token_ids))
        pool.token_ids[1:], pool.parents[1:] = token_ids[1:], parents[1:]
        pool.confidences[1:] = confidences[1:]
        for node in range(1, len(token_ids)):
            pool.scores[node] = pool.scores[parents[node]] + scores[node]
        pool.count = len(token_ids)
        return pool

    def add(self, parents: I64, token_ids: I64, scores: F64, confidences: F64) -> I64:
        """Append children [R, K] of `parents` [R]; returns the new nodes' indices [R * K]."""
        width = token_ids.shape[1]
        nodes = np.arange(self.count, self.count + token_ids.size)
        self.count += len(nodes)
        place = slice(nodes[0], self.count)
        self.token_ids[place] = token_ids.ravel()
        self.parents[place] = parents.repeat(width)
        self.scores[place] = (scores + self.scores[parents, None]).ravel()
        self.confidences[place] = confidences.ravel()
        return nodes

    def add_chain(
        self, parent: int, token_ids: Sequence[int], scores: F64, confidences: F64
    ) -> None:
        """Append a chain of D nodes under `parent`; `scores` [D] are those of `add`."""
        begin, end = self.count, self.count + len(token_ids)
        self.token_ids[begin:end] = token_ids
        self.parents[begin], self.parents[begin + 1 : end] = parent, np.arange(begin, end - 1)
        self.scores[begin:end] = np.cumsum(scores) + self.scores[parent]
        self.confidences[begin:end] = confidences
        self.count = end

    def find(self, parent: int, token_id: int) -> int | None:
        """The child of `parent` with this token, or None."""
        known = self.parents[1 : self.count] == parent
        found = np.flatnonzero(known & (self.token_ids[1 : self.count] == token_id))
        return int(found[0]) + 1 if len(found) else None

    def ranked(self) -> I64:
        """All nodes but the root by descending score; ties by index, so parents come first."""
        return np.argsort(-self.scores[1 : self.count], kind="stable") + 1

    def tree(self, nodes: I64) -> tuple[Tree, I64]:
        """The tree of the root and `nodes` (each with its parent), and their pool indices [N]."""
        order = [0, *sorted(nodes.tolist())]
        place = {node: index for index, node in enumerate(order)}
        chosen = np.array(order)
        above = [place.get(parent, -1) for parent in self.parents[chosen].tolist()]
        return Tree(self.token_ids[chosen], np.array(above), np.exp(self.scores[chosen])), chosen


def top(scores: F32 | F64, count: int) -> I64:
    """Indices of the `count` largest scores, best first; ties by index."""
    return np.argsort(-scores, kind="stable")[:count]
