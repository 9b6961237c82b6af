"""Passes over the loaded graphs of an engine, on any backend.

A module for each role that an engine may be for (`edgellm.core.graph_roles`), found by the role's
name.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol, cast

from edgellm.core.manifest import Spec
from edgellm.device_runtime.runners import Runner
from edgellm.device_runtime.runners.pass_timing import Budget


class Module(Protocol):
    """What the module of a role has."""

    def session(self, opened: Mapping[str, Runner], spec: Spec, capacity: int) -> Any:
        """A session over the runners of an engine, whose caches have `capacity` rows."""
        ...

    def costs(
        self, session: Any, spec: Spec, max_rows: int = 0, budget: Budget | None = None
    ) -> dict[str, dict[str, float]]:
        """Milliseconds of passes on this machine, by kind and rows.

        Args:
            session: its cache is overwritten.
            spec: of the engine.
            max_rows: of a pass, and candidates of a row, where there is such a bound; 0: any.
            budget: of the time that it takes; None: one of its own.
        """
        ...


def find(role: str) -> Module:
    """The module of a role."""
    return cast(Module, importlib.import_module(f"{__name__}.{role}"))
