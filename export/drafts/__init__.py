"""Draft networks, one file for each method.

A file exports `Model` (tokens and hidden rows to the next hidden rows, and its head) and, when the
base's features are fused first, `Fuse`; attributes carry the checkpoint's own parameter names.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def find(method: str) -> ModuleType:
    """The module of a method that `draft_config` recognized."""
    return importlib.import_module(f"{__name__}.{method}")
