"""Drafting with the layer of multi-token prediction that a base brings along.

It is run as EAGLE-1 is: the feature is the output of the base's final norm, and what the layer
gives behind its own is the next step's.
"""

from __future__ import annotations

from edgellm.core.graph_roles import DRAFT
from edgellm.device_runtime.speculate.drafter_loading import DrafterContext, LoadedDrafter
from edgellm.device_runtime.speculate.drafters.eagle import open_network
from edgellm.device_runtime.speculate.policy.tree_policy import TreeLimits

ROLE, METHODS = DRAFT, ("mtp",)
DEFAULTS = TreeLimits()


def open(order: DrafterContext) -> LoadedDrafter:
    """The layer, as a draft in the folder of its base."""
    return open_network(order, "mtp")
