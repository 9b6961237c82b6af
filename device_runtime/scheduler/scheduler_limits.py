"""What the passes of an engine are held to."""

from __future__ import annotations

from dataclasses import replace

from edgellm.core.graph_roles import PASS
from edgellm.core.manifest import Engine
from edgellm.device_runtime.engine.kv_cache_manager import KVCacheManager
from edgellm.device_runtime.runners.batch_costs import SharedCosts
from edgellm.device_runtime.scheduler.scheduler import Bounds
from edgellm.device_runtime.speculate.policy.costs import Costs


def bounds_of(
    engine: Engine, slot: KVCacheManager, max_stall_ms: float, answers: int, tree_rows: int
) -> Bounds:
    """Passes are measured where the engine does not know what they cost, and that matters.

    Args:
        engine: its manifest.
        slot: its caches.
        max_stall_ms: of a pass that reads a prompt beside answers that grow.
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
        max_stall_ms=max_stall_ms,
        pass_ms=Costs.of(measured[PASS]).verify,
        together=SharedCosts.find(PASS, measured),
    )
