"""Encoders of texts, one file each, found by the `model_type` of config.json.

An encoder is a decoder without a head whose tokens attend to all others, so one pass computes a
text. A file exports `Model`, `Config` and `TINY` as those of `edgellm.export.models` do, and also:

* `PREFIX`, which the tensors of its models with a head have,
* `classifier(config, tensors)`, the dense layers of its classification head (`Classifier`).
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def supported() -> list[str]:
    """All model types with a file, as file names."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(model_type: object) -> ModuleType | None:
    """The encoder's module; None: it is no encoder."""
    name = str(model_type).replace("-", "_")
    return importlib.import_module(f"{__name__}.{name}") if name in supported() else None
