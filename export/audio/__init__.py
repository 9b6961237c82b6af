"""Audio encoders of chat models, one file for each `model_type` of config.json.

A file exports `Model` (from a clip's features to the language model's embeddings; attributes have
the checkpoint's parameter names), `Config` (typed facts of `audio_config` and of the feature
extractor) and `TINY` (a small config of the whole model for tests against transformers).
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from edgellm.core.errors import UnsupportedModelError


def supported() -> list[str]:
    """All model types with a file."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(model_type: str) -> ModuleType:
    """The encoder's module; raises `UnsupportedModelError` with all supported ones."""
    known = supported()
    if model_type not in known:
        raise UnsupportedModelError(
            f"the audio encoder of {model_type!r} is not supported",
            hint=f"supported: {', '.join(known)}; docs/reference/models.md says more",
        )
    return importlib.import_module(f"{__name__}.{model_type}")
