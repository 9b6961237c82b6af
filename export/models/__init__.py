"""Architectures, one file each, found by the `model_type` of config.json.

A file exports `Model` (how the architecture computes; attributes carry the checkpoint's own
parameter names), `Config` (`read` turns a config into facts) and `TINY` (a small config, with
which the tests compare the architecture with transformers).
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from edgellm.core.errors import UnsupportedModelError

# Architectures that compute as a supported one does, but for what is named.
_RELATIVES = {
    "apertus": ("olmo2", "activation"),
    "cohere": ("cohere2", "norms of queries and keys"),
    "gemma": ("gemma2", "norms, which are only before"),
}
_LIST = "docs/reference/models.md"


def supported() -> list[str]:
    """The model types that have a file."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(model_type: str) -> ModuleType:
    """The architecture's module.

    Raises:
        UnsupportedModelError: there is none; the hint names a relative, if any, and all others.
    """
    known = supported()
    if model_type not in known:
        hint = f"supported: {', '.join(known)}; {_LIST} says more"
        if model_type in _RELATIVES:
            family, besides = _RELATIVES[model_type]
            hint = f"it computes as {family} does, but for its {besides}; {hint}"
        raise UnsupportedModelError(f"architecture {model_type!r} is not supported", hint=hint)
    return importlib.import_module(f"{__name__}.{model_type}")
