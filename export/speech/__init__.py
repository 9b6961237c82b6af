"""Speech models, one file for each `model_type` of config.json.

A file exports `Config` and `Model` as `export.models` do, `Encoder` (from log-mel features to
hidden states), `CrossKV` (from these to the keys and values of audio that the decoder's layers
attend to), and `TINY`.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def supported() -> list[str]:
    """All model types with a file."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(model_type: str) -> ModuleType | None:
    """The speech model's module; None if there is none."""
    if model_type not in supported():
        return None
    return importlib.import_module(f"{__name__}.{model_type}")
