"""What passes of an engine cost: as its build measured them, or as measured now."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edgellm.device_runtime.runners import ArrangesPasses, Runner
from edgellm.device_runtime.runners.batch_costs import SharedCosts

Measured = Mapping[str, Mapping[str, float]]  # milliseconds by kind of pass and rows


def known_costs(
    runner: Runner, kind: str, built: Measured, measure: Callable[[], Measured]
) -> Measured:
    """All of them; a runner that arranges passes learns what those of several sequences cost.

    Args:
        runner: whose passes they are.
        kind: of pass that sequences share.
        built: what the build measured, {} where it could not.
        measure: on this machine.
    """
    arranges = isinstance(runner, ArrangesPasses)
    found = built
    if not found or (arranges and SharedCosts.find(kind, found) is None):
        found = {**measure(), **found}
    shared = SharedCosts.find(kind, found)
    if isinstance(runner, ArrangesPasses) and shared is not None:
        runner.learn_costs(shared)
    return found
