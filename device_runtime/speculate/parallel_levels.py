"""Trees of networks that predict each level independently of the levels before."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from edgellm.device_runtime.arrays import I64
from edgellm.device_runtime.speculate.policy.tree_policy import Policy
from edgellm.device_runtime.speculate.tree import F64, CandidatePool


def expand_levels(pool: CandidatePool, policy: Policy, levels: Iterable[tuple[I64, F64]]) -> None:
    """Fill the pool: all nodes of a level have the same candidates, which cost no passes.

    Args:
        pool: holds only the root.
        policy: chooses the nodes that get children.
        levels: token ids [K] and log-probabilities [K] of each.
    """
    nodes = np.zeros(1, np.int64)
    for ids, log_probs in levels:
        shape = len(nodes), len(ids)
        newest = pool.add(
            nodes,
            np.broadcast_to(ids, shape),
            np.broadcast_to(policy.scores(log_probs), shape),
            np.broadcast_to(np.exp(log_probs), shape),
        )
        nodes = policy.frontier(pool, newest, np.zeros(len(newest)))
        if not len(nodes):
            return
