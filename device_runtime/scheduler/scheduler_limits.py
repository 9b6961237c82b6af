"""Limits of an engine's passes, from its manifest and measured costs."""

from __future__ import annotations

from dataclasses import replace

from edgellm.core.graph_roles import PASS
from edgellm.core.manifest import Engine
from edgellm.device_runtime.engine.kv_cache_manager import KVCacheManager
from edgellm.device_runtime.runners.batch_costs import SharedCosts
from edgellm.device_runtime.scheduler.scheduler import Bounds
from edgellm.device_runtime.speculate.policy.costs import Costs


def bounds_of(
    engine: Engine,
    kv_cache_manager: KVCacheManager,
    max_stall_ms: float,
    answers: int,
    tree_rows: int,
) -> Bounds:
    """The scheduler's bounds; measures passes if the engine has no stored costs and needs them.

    Args:
        engine: its manifest.
        kv_cache_manager: its caches.
        max_stall_ms: limit of a pass that prefills a chunk while other requests decode.
        answers: batch size.
        tree_rows: maximum tokens of a draft tree.
    """
    bounds = Bounds(max_running=answers, prefill_rows=engine.prefill_rows, tree_rows=tree_rows)
    if answers == 1:
        return bounds
    measured = kv_cache_manager.base.costs_of(engine)
    return replace(
        bounds,
        block_size=kv_cache_manager.block_size,
        max_stall_ms=max_stall_ms,
        pass_ms=Costs.of(measured[PASS]).verify,
        together=SharedCosts.find(PASS, measured),
    )
