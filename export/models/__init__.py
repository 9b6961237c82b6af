"""Architectures, one file each, found by the `model_type` of config.json.

A file exports `Model` (the architecture; attributes have the checkpoint's parameter names),
`Config` (reads config.json into typed facts) and `TINY` (a small config for tests against
transformers).
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from edgellm.core.errors import UnsupportedModelError

# Architectures that are like a supported one, except for the named difference.
_RELATIVES = {
    "cohere": ("cohere2", "norms of queries and keys"),
    "gemma": ("gemma2", "norms, which are only before"),
}
_LIST = "docs/reference/models.md"


def supported() -> list[str]:
    """All model types with a file."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(model_type: str) -> ModuleType:
    """The architecture's module.

    Raises:
        UnsupportedModelError: there is none; the hint has a similar architecture, if any, and all.
    """
    known = supported()
    if model_type not in known:
        hint = f"supported: {', '.join(known)}; {_LIST} says more"
        if model_type in _RELATIVES:
            family, besides = _RELATIVES[model_type]
            hint = f"it computes as {family} does, but for its {besides}; {hint}"
        raise UnsupportedModelError(f"architecture {model_type!r} is not supported", hint=hint)
    return importlib.import_module(f"{__name__}.{model_type}")
