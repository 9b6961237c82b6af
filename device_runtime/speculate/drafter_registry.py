"""Registry of drafters: the modules of `speculate.drafters`, by the names that `--spec` takes."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Protocol, cast

from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import Engine
from edgellm.device_runtime.speculate.policy.tree_policy import TreeLimits
from edgellm.device_runtime.speculate.text_lookup import Lookup

_PACKAGE = "edgellm.device_runtime.speculate.drafters"


class Network(Protocol):
    """A module whose drafter has a network; `drafter_loading.LoadsDrafter` loads it."""

    DEFAULTS: TreeLimits


class TextLookup(Protocol):
    """A module whose drafter looks up text, without a network."""

    def remember(self) -> Callable[[], Lookup]:
        """Create the shared memory; returns the factory of lookups for requests."""
        ...


def networks() -> tuple[str, ...]:
    """The names of drafters with a network."""
    return tuple(name for name in _names() if hasattr(_module(name), "DEFAULTS"))


def lookups() -> tuple[str, ...]:
    """The names of lookups."""
    return tuple(name for name in _names() if not hasattr(_module(name), "DEFAULTS"))


def own(draft: Engine) -> str:
    """The name of the drafter that runs a draft engine.

    Raises:
        EdgeLLMError: this version has none.
    """
    role, method = draft.main_role, draft.draft.method
    for name, of_it in owners().items():
        if of_it == role and method in getattr(_module(name), "METHODS", (method,)):
            return name
    raise EdgeLLMError(f"no drafter here runs {role} of {method}", hint="update edgellm here")


def owners() -> dict[str, str]:
    """The main roles of draft engines, by the name of the drafter that runs them."""
    roles = {name: getattr(_module(name), "ROLE", "") for name in networks()}
    return {name: role for name, role in roles.items() if role}


def network(name: str) -> Network:
    """The module of a network."""
    return cast(Network, _module(name))


def lookup(name: str) -> TextLookup:
    """The module of a lookup."""
    return cast(TextLookup, _module(name))


def _names() -> list[str]:
    return sorted(
        found.name for found in pkgutil.iter_modules(importlib.import_module(_PACKAGE).__path__)
    )


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{_PACKAGE}.{name}")
