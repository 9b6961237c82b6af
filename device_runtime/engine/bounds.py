"""What the passes of an engine are held to."""

from __future__ import annotations

from dataclasses import replace

from edgellm.device_runtime.engine.cache_slot import CacheSlot
from edgellm.device_runtime.engine.scheduler import Bounds
from edgellm.device_runtime.shared_costs import SharedCosts
from edgellm.device_runtime.speculate.costs import Costs
from edgellm.manifest import Engine
from edgellm.roles import PASS


def bounds_of(
    engine: Engine, slot: CacheSlot, most_stall_ms: float, answers: int, tree_rows: int
) -> Bounds:
    """Passes are measured where the engine does not know what they cost, and that matters.

    Args:
        engine: its manifest.
        slot: its caches.
        most_stall_ms: of a pass that reads a prompt beside answers that grow.
        answers: that share a pass at most.
        tree_rows: that an answer verifies.
    """
    bounds = Bounds(answers, engine.prefill_rows, tree_rows)
    if answers == 1:
        return bounds
    measured = slot.session.costs_of(engine)
    return replace(
        bounds,
        page_rows=slot.page_rows,
        most_stall_ms=most_stall_ms,
        pass_ms=Costs.of(measured[PASS]).verify,
        together=SharedCosts.find(PASS, measured),
    )
