"""What the passes of an engine are held to."""

from __future__ import annotations

from dataclasses import replace

from edgellm.device_runtime.engine.cache_slot import CacheSlot
from edgellm.device_runtime.engine.scheduler import Bounds
from edgellm.device_runtime.sessions.decoder import costs
from edgellm.device_runtime.speculate.costs import Costs
from edgellm.manifest import Engine
from edgellm.roles import PASS


def bounds_of(engine: Engine, slot: CacheSlot, most_stall_ms: float, *, drafts: bool) -> Bounds:
    """The engine's; passes are measured where it does not know what they cost, and that matters.

    Args:
        engine: its manifest.
        slot: its caches.
        most_stall_ms: of a pass that reads a prompt beside answers that grow.
        drafts: whether answers verify trees.
    """
    tree_rows = engine.max_verify_tree_size if drafts else 1
    bounds = Bounds(engine.max_batch_size, engine.prefill_rows, tree_rows)
    if engine.max_batch_size == 1:
        return bounds
    pass_ms = (engine.cost_ms or costs(slot.session, engine.decoder))[PASS]
    verify = Costs.of(pass_ms).verify
    return replace(bounds, page_rows=slot.page_rows, most_stall_ms=most_stall_ms, pass_ms=verify)
