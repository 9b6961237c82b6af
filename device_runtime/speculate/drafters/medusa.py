"""Drafting with Medusa heads (arXiv 2401.10774): one pass a round foresees every level.

Head d reads what the base's own head read when it gave the root, and foresees the token d + 1
further on, whatever stands between. So all nodes of a level have the same candidates, a path's
log-probability is the sum of the heads', and nothing needs a cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm.device_runtime.session import F32, I64, HeadsSession
from edgellm.device_runtime.speculate.draft_cache import ImageIds
from edgellm.device_runtime.speculate.drafter import TreeDrafter
from edgellm.device_runtime.speculate.gate import NetworkGate
from edgellm.device_runtime.speculate.lookup import LookupSource
from edgellm.device_runtime.speculate.policy import Costs, Policy, TreeLimits, price
from edgellm.device_runtime.speculate.tree import Pool


class MedusaDrafter(TreeDrafter):
    """Grows the pool with the candidates of heads."""

    def __init__(
        self,
        session: HeadsSession,
        policy: Policy,
        limits: TreeLimits,
        costs: Costs,
        *,
        lookups: Sequence[LookupSource] = (),
        gate: NetworkGate | None = None,
        image_ids: ImageIds | None = None,
    ) -> None:
        """Wire up.

        Args:
            session: the heads, at least as many as `limits` has levels.
            policy: sizes the tree.
            limits: the user's bounds.
            costs: of the engine, for the books; one row extended is one pass of the heads.
            lookups: see `TreeDrafter`.
            gate: the same.
            image_ids: of a base that takes images.
        """
        super().__init__(policy, limits, lookups=lookups, gate=gate, image_ids=image_ids)
        self._session, self._costs = session, costs
        self._has_candidates = False

    def observe(self, next_token_ids: I64, taps: F32) -> None:
        """Committed rows, of which the heads read the newest: features [M, H]."""
        del next_token_ids  # the root is the tree's
        self._feature = taps[-1].copy()
        self._has_candidates = False

    def _read(self) -> None:
        """Ask the heads."""
        ids, log_probs = self._session.candidates(self._feature, self._limits.top_k)
        self._spent_ms += price(self._costs.extend, 1)
        self._levels = list(zip(ids, log_probs.astype(np.float64), strict=True))
        self._has_candidates = True

    def _is_ready(self) -> bool:
        """Without candidates for this round the tree is the root."""
        return self._has_candidates

    def _grow(self, pool: Pool, levels: int) -> None:
        policy, nodes = self._policy, np.zeros(1, np.int64)
        for ids, log_probs in self._levels[:levels]:
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
