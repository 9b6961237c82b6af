"""Drafter of Gemma 4's assistants, which read keys and values of the base.

It runs as an EAGLE head. But drafted tokens attend to the committed tokens only, all of them from
the position of the newest one, so that the cache holds none of them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edgellm.core.graph_roles import DRAFT
from edgellm.device_runtime.networks.draft import DraftPart
from edgellm.device_runtime.speculate.drafter_loading import DrafterContext, LoadedDrafter
from edgellm.device_runtime.speculate.drafters.eagle import EagleDrafter, open_network
from edgellm.device_runtime.speculate.policy.tree_policy import TreeLimits

ROLE, METHODS = DRAFT, ("gemma4_assistant",)
DEFAULTS = TreeLimits()


def open(order: DrafterContext) -> LoadedDrafter:
    """The assistant in the folder of its base."""
    return open_network(order, "gemma4_assistant", AssistantDrafter)


class AssistantDrafter(EagleDrafter):
    """Fills the pool with an assistant."""

    def _placed(self, part: DraftPart) -> DraftPart:
        """The nodes at the newest position; the next level overwrites their rows."""
        rows, length = len(part.token_ids), self._kv.length
        return replace(
            part,
            write_index=length,
            position_ids=np.full(rows, length - 1),
            tree_mask=np.zeros((rows, rows), np.bool_),
        )
