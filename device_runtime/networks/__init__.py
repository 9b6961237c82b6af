"""Networks: passes over the loaded graphs of an engine, on any backend.

One module for each role of an engine (`edgellm.core.graph_roles`), with the role's name.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol, cast

from edgellm.core.manifest import Spec
from edgellm.device_runtime.runners.pass_timing import Budget
from edgellm.device_runtime.runners.runner import Runner


class Module(Protocol):
    """Functions of a role's module."""

    def network(self, opened: Mapping[str, Runner], spec: Spec, capacity: int) -> Any:
        """A network over the runners of an engine, with KV caches of `capacity` positions."""
        ...

    def costs(
        self, network: Any, spec: Spec, max_rows: int = 0, budget: Budget | None = None
    ) -> dict[str, dict[str, float]]:
        """Milliseconds of passes on this machine, by kind and number of tokens.

        Args:
            network: its cache is overwritten.
            spec: of the engine.
            max_rows: maximum tokens of a pass, or candidates of a position; 0: no limit.
            budget: time limit; None: the default.
        """
        ...


def find(role: str) -> Module:
    """The module of a role."""
    return cast(Module, importlib.import_module(f"{__name__}.{role}"))
