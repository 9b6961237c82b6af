"""What drafts, one file each, named as `--spec` says it.

A network has `DEFAULTS` (`TreeLimits`) and `open(order)`, which loads it; if it is the draft in an
engine's folder, `ROLE`, the main role of such engines (`edgellm.core.graph_roles`), and where
several share a role, `METHODS`, the methods of its drafts. What looks tokens up in text alone has
`remember()`, which gives what starts the lookup of a request.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

from edgellm.core.errors import EdgeLLMError

if TYPE_CHECKING:
    from edgellm.core.manifest import Engine
    from edgellm.device_runtime.speculate.drafter_loading import DrafterContext, LoadedDrafter
    from edgellm.device_runtime.speculate.policy.tree_policy import TreeLimits
    from edgellm.device_runtime.speculate.text_lookup import Lookup


class Network(Protocol):
    """A module whose drafter has a network."""

    DEFAULTS: TreeLimits

    def open(self, order: DrafterContext) -> LoadedDrafter:
        """Load it; raises as `Drafters`."""
        ...


class TextLookup(Protocol):
    """A module whose drafter has text alone."""

    def remember(self) -> Callable[[], Lookup]:
        """What starts the lookup of a request."""
        ...


def networks() -> tuple[str, ...]:
    """The names of those with a network."""
    return tuple(name for name in _names() if hasattr(_module(name), "DEFAULTS"))


def lookups() -> tuple[str, ...]:
    """The names of the others."""
    return tuple(name for name in _names() if not hasattr(_module(name), "DEFAULTS"))


def own(draft: Engine) -> str:
    """What drafts with a draft's engine.

    Raises:
        EdgeLLMError: nothing here.
    """
    role, method = draft.main_role, draft.draft.method
    for name, of_it in owners().items():
        if of_it == role and method in getattr(_module(name), "METHODS", (method,)):
            return name
    raise EdgeLLMError(f"no drafter here runs {role} of {method}", hint="update edgellm here")


def owners() -> dict[str, str]:
    """The networks that are drafts in an engine's folder, with the main roles of these."""
    roles = {name: getattr(_module(name), "ROLE", "") for name in networks()}
    return {name: role for name, role in roles.items() if role}


def network(name: str) -> Network:
    """The module of a network."""
    return cast(Network, _module(name))


def lookup(name: str) -> TextLookup:
    """The module of a lookup."""
    return cast(TextLookup, _module(name))


def _names() -> list[str]:
    return sorted(found.name for found in pkgutil.iter_modules(__path__))


def _module(name: str) -> object:
    return importlib.import_module(f"{__name__}.{name}")
