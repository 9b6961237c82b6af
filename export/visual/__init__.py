"""Visual encoders, one file for each `model_type` of config.json.

A file exports `Model` (from pixel values to rows of the language model's embedding; attributes
carry the checkpoint's own parameter names), `Config` (what it reads of a config) and `TINY` (a
small config of the whole model, with which the tests compare the encoder with transformers).
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from edgellm.core.errors import UnsupportedModelError


def supported() -> list[str]:
    """The model types that have a file."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(model_type: str) -> ModuleType:
    """The encoder's module; raises `UnsupportedModelError` naming those that there are."""
    known = supported()
    if model_type not in known:
        raise UnsupportedModelError(
            f"the visual encoder of {model_type!r} is not supported",
            hint=f"supported: {', '.join(known)}; docs/reference/models.md says more",
        )
    return importlib.import_module(f"{__name__}.{model_type}")
