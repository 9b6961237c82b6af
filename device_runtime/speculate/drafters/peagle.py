"""P-EAGLE drafter (arXiv 2602.01469): the pass over committed tokens predicts every level.

Mask tokens follow the newest committed token. Each predicts one token further, independent of the
tokens before. The next round overwrites their positions.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from edgellm.core.checksums import FileCheck
from edgellm.core.errors import LimitError
from edgellm.core.graph_roles import DRAFT, EXTEND
from edgellm.core.manifest import Engine
from edgellm.device_runtime.networks.draft import DraftPart, open_draft
from edgellm.device_runtime.speculate.draft_cache import DraftKVCaches, MaskRows
from edgellm.device_runtime.speculate.drafter import SpecState
from edgellm.device_runtime.speculate.drafter_loading import DrafterContext, LoadedDrafter, open_own
from edgellm.device_runtime.speculate.drafters.eagle import EagleDrafter
from edgellm.device_runtime.speculate.drafters.medusa import heads_limits
from edgellm.device_runtime.speculate.parallel_levels import expand_levels
from edgellm.device_runtime.speculate.policy.costs import Costs
from edgellm.device_runtime.speculate.policy.tree_policy import TreeLimits
from edgellm.device_runtime.speculate.shared_passes import Passes
from edgellm.device_runtime.speculate.tree import CandidatePool

ROLE, METHODS = DRAFT, ("peagle",)
DEFAULTS = TreeLimits(steps=8)  # `open` limits the steps to the draft's training


def open(order: DrafterContext) -> LoadedDrafter:
    """The network in the folder of its base."""
    folder, manifest = open_own(order, "peagle")
    limits = heads_limits(order, manifest.draft)
    masks = mask_rows(limits, manifest)
    with FileCheck(folder, manifest.files, order.verify):
        network = open_draft(folder, manifest)
    measured = network.costs_of(manifest, manifest.max_draft_tree_size)
    prices = Costs.of(order.pass_costs(), None, measured[EXTEND], *order.host_ms)
    image_ids = order.image_ids(has_embeddings=manifest.draft.decoder.images is not None)
    caches = DraftKVCaches(
        network=network,
        round_rows=limits.round_rows,
        image_ids=image_ids,
        max_rows=limits.round_rows,
    )

    def start(learned: SpecState) -> PEagleDrafter:
        return PEagleDrafter(
            caches=caches, learned=learned, limits=limits, costs=prices, masks=masks
        )

    return LoadedDrafter(costs=prices, start=start, caches=(caches,))


def mask_rows(limits: TreeLimits, draft: Engine) -> MaskRows:
    """The mask tokens for the levels of `limits`; raises `LimitError` if the engine takes fewer."""
    token_id, maximum = draft.draft.mask_token_id, draft.max_draft_tree_size
    assert token_id is not None
    if limits.steps > maximum:
        raise LimitError(
            f"--eagleDraftStep {limits.steps} exceeds the draft engine's {maximum} tokens",
            hint="take less, or build with a larger --maxDraftTreeSize",
        )
    return MaskRows(token_id, limits.steps - 1)


class PEagleDrafter(EagleDrafter):
    """Fills the pool with the candidates of the newest token and of the mask tokens after it."""

    def __init__(
        self,
        *,
        caches: DraftKVCaches,
        learned: SpecState,
        limits: TreeLimits,
        costs: Costs,
        masks: MaskRows,
    ) -> None:
        """Compute nothing.

        Args:
            caches: the draft's.
            learned: see `TreeDrafter`.
            limits: the user's limits, at most as deep as the draft predicts.
            costs: pass times of the engine; `extend` includes the mask tokens.
            masks: the mask tokens of a pass.
        """
        super().__init__(
            caches=caches, learned=learned, limits=limits, costs=costs, max_tree_rows=1
        )
        self._masks = masks

    def _parts(self) -> Iterator[DraftPart]:
        return self._kv.parts(self._limits.top_k, self._masks)

    def _expand(self, pool: CandidatePool, levels: int) -> Passes[None]:
        assert self._root is not None
        found = self._root()
        log_probs = found.log_probs.astype(np.float64)
        predicted = list(zip(found.token_ids, log_probs, strict=True))
        expand_levels(pool, self._policy, predicted[:levels])
        yield from ()
