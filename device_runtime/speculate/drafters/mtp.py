"""MTP drafter: the multi-token prediction layer of the base's checkpoint.

It runs as EAGLE-1: its input is the output of the base's final norm, and the output of its own
norm is the input of the next step.
"""

from __future__ import annotations

from edgellm.core.graph_roles import DRAFT
from edgellm.device_runtime.speculate.drafter_loading import DrafterContext, LoadedDrafter
from edgellm.device_runtime.speculate.drafters.eagle import open_network
from edgellm.device_runtime.speculate.policy.tree_policy import TreeLimits

ROLE, METHODS = DRAFT, ("mtp",)
DEFAULTS = TreeLimits()


def open(order: DrafterContext) -> LoadedDrafter:
    """The MTP layer, as a draft in the folder of its base."""
    return open_network(order, "mtp")
