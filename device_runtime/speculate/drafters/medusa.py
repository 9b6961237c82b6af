"""Medusa heads (arXiv 2401.10774): one pass a round predicts every level.

Head d takes the hidden state that gave the root, and predicts the token d + 1 positions later,
independent of the tokens between. So all nodes of a level have the same candidates, a path's
log-probability is the sum of the heads', and no KV cache is needed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edgellm.core.checksums import FileCheck
from edgellm.core.errors import LimitError
from edgellm.core.graph_roles import ALL_HEADS, HEADS
from edgellm.core.model_spec import DraftSpec
from edgellm.device_runtime.arrays import (
    F32,
    I64,
)
from edgellm.device_runtime.networks.heads import (
    HeadsNetwork,
    HeadsPart,
    costs,
    open_heads,
)
from edgellm.device_runtime.speculate.draft_cache import ImageIds
from edgellm.device_runtime.speculate.drafter import SpecState, TreeDrafter
from edgellm.device_runtime.speculate.drafter_loading import (
    DrafterContext,
    LoadedDrafter,
    check_candidates,
    open_own,
)
from edgellm.device_runtime.speculate.parallel_levels import expand_levels
from edgellm.device_runtime.speculate.policy.costs import Costs, price, shared
from edgellm.device_runtime.speculate.policy.tree_policy import TreeLimits
from edgellm.device_runtime.speculate.shared_passes import Passes, Wanted
from edgellm.device_runtime.speculate.tree import F64, CandidatePool

ROLE = HEADS
DEFAULTS = TreeLimits()  # `open` limits the steps to the number of heads


def open(order: DrafterContext) -> LoadedDrafter:
    """The heads in the folder of their base."""
    folder, manifest = open_own(order, "medusa")
    limits = heads_limits(order, manifest.draft)
    with FileCheck(folder, manifest.files, order.verify):
        network = open_heads(folder, manifest)
    measured = manifest.cost_ms or costs(network, manifest.draft, limits.top_k)
    prices = Costs.of(order.pass_costs(), None, measured[ALL_HEADS], *order.host_ms)
    image_ids = order.image_ids(has_embeddings=True)

    def start(learned: SpecState) -> MedusaDrafter:
        return MedusaDrafter(
            network=network, learned=learned, limits=limits, costs=prices, image_ids=image_ids
        )

    return LoadedDrafter(costs=prices, start=start)


def heads_limits(order: DrafterContext, draft: DraftSpec) -> TreeLimits:
    """The limits with the number of levels that a pass predicts, unless the user requests fewer.

    Raises:
        LimitError: the user requests more.
    """
    limits, options = order.limits, order.options
    check_candidates(limits, draft)
    if limits.steps <= draft.num_heads:
        return limits
    if options.choices or options.steps is not None:
        what = "the choices are" if options.choices else "--eagleDraftStep is"
        raise LimitError(
            f"{what} {limits.steps} levels deep, the draft has {draft.num_heads} heads"
            if draft.mask_token_id is None
            else f"{what} {limits.steps} levels deep, the draft predicts {draft.num_heads}",
            hint="take fewer",
        )
    return replace(limits, steps=draft.num_heads)


class MedusaDrafter(TreeDrafter):
    """Fills the pool with the candidates of Medusa heads."""

    def __init__(
        self,
        *,
        network: HeadsNetwork,
        learned: SpecState,
        limits: TreeLimits,
        costs: Costs,
        image_ids: ImageIds | None = None,
    ) -> None:
        """Compute nothing.

        Args:
            network: the heads, at least one for each level of `limits`.
            learned: see `TreeDrafter`.
            limits: the user's limits.
            costs: pass times of the engine; `extend` of 1 is one pass of the heads.
            image_ids: token ids of image positions, if the base takes images.
        """
        super().__init__(learned, limits, image_ids=image_ids)
        self._network, self._costs = network, costs
        self._has_candidates = False
        self._shares: dict[int, F64] = {}  # prices by batch size

    def observe(self, next_token_ids: I64, taps: F32) -> None:
        """Committed positions: hidden states [M, H]; the heads use the newest."""
        del next_token_ids  # the root is part of the tree
        self._feature = taps[-1].copy()
        self._has_candidates = False

    def _prefill(self) -> Passes[None]:
        """Run the heads."""
        maximum = self._limits.top_k
        wanted = Wanted(network=self._network, part=HeadsPart(self._feature, maximum))
        ids, log_probs = yield wanted
        answers = wanted.answers
        if answers not in self._shares:
            self._shares[answers] = shared(self._costs.extend, answers)
        self._spent_ms += price(self._shares[answers], 1)
        ids, log_probs = ids[:, :maximum].copy(), log_probs[:, :maximum].astype(np.float64)
        self._levels = list(zip(ids, log_probs, strict=True))
        self._has_candidates = True

    def _is_ready(self) -> bool:
        """False without candidates for this round: the tree is then the root."""
        return self._has_candidates

    def _expand(self, pool: CandidatePool, levels: int) -> None:
        expand_levels(pool, self._policy, self._levels[:levels])
