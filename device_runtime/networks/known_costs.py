"""Costs of an engine's passes, as measured by its build or now."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edgellm.device_runtime.runners.batch_costs import SharedCosts
from edgellm.device_runtime.runners.runner import Runner

Measured = Mapping[str, Mapping[str, float]]  # milliseconds by kind of pass and tokens


def known_costs(
    runner: Runner, kind: str, built: Measured, measure: Callable[[], Measured]
) -> Measured:
    """All costs; a runner with `batch_limits` also receives those of batches.

    Args:
        runner: of the passes.
        kind: of batched passes.
        built: measured by the build; {} if it could not.
        measure: measures on this machine.
    """
    found, needs_batches = built, any(runner.batch_limits)
    if not found or (needs_batches and SharedCosts.find(kind, found) is None):
        found = {**measure(), **found}
    shared = SharedCosts.find(kind, found)
    if needs_batches and shared is not None:
        runner.learn_costs(shared)
    return found
