"""Detects the kind of a path and reads it."""

from __future__ import annotations

import json
from pathlib import Path

from edgellm.core.artifact import verify_files, verify_sizes
from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
)
from edgellm.core.manifest import MANIFEST_NAME
from edgellm.export.pipeline.open_checkpoint import refuse_adapter
from edgellm.tools.inspection.report import Report
from edgellm.tools.inspection.sources.bundles import (
    inspect_audio_bundle,
    inspect_bundle,
    inspect_draft_bundle,
    inspect_visual_bundle,
)
from edgellm.tools.inspection.sources.engines import (
    inspect_audio_engine,
    inspect_draft_engine,
    inspect_engine,
    inspect_visual_engine,
)

_READERS = {
    "llm_bundle": inspect_bundle,
    "draft_bundle": inspect_draft_bundle,
    "visual_bundle": inspect_visual_bundle,
    "audio_bundle": inspect_audio_bundle,
    "llm_engine": inspect_engine,
    "draft_engine": inspect_draft_engine,
    "visual_engine": inspect_visual_engine,
    "audio_engine": inspect_audio_engine,
}
_CONFIG = "config.json"
_WANTED = "give a Hugging Face checkpoint, a .gguf file, a bundle or an engine"


def inspect(path: Path, *, verify: bool = False) -> Report:
    """Return the report of a path, without reading weights.

    Args:
        path: a checkpoint, bundle or engine folder, or a GGUF file.
        verify: check the hashes of all files in the manifest.

    Raises:
        EdgeLLMError: the path is none of these, or damaged.
    """
    if path.is_file():
        if path.suffix != ".gguf":
            raise EdgeLLMError(f"{path} is neither a folder nor a .gguf file", hint=_WANTED)
        from edgellm.tools.inspection.sources.gguf_files import inspect_gguf

        return inspect_gguf(path)
    if not path.is_dir():
        stored = "; edgellm show MODEL prints the folder of a stored model"
        raise EdgeLLMError(f"no such file or folder: {path}", hint=_WANTED + stored)
    reader = _READERS.get(kind_of(path))
    if reader is not None:
        return reader(path, verify_files if verify else verify_sizes)
    if _is_checkpoint(path):
        from edgellm.tools.inspection.sources.checkpoints import inspect_checkpoint

        return inspect_checkpoint(path)
    if (path / MANIFEST_NAME).exists():
        raise BrokenArtifactError(
            f"{path / MANIFEST_NAME} is not a manifest of edgellm, or damaged", hint=_WANTED
        )
    refuse_adapter(path)
    raise EdgeLLMError(
        f"{path} is neither checkpoint, bundle nor engine", hint=_inside(path) or _WANTED
    )


def _is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint: bundles have a config.json, but no such weights."""
    weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    return (folder / _CONFIG).exists() and (weights or not (folder / MANIFEST_NAME).exists())


def kind_of(folder: Path) -> str:
    """Return the kind in a folder's manifest, "" without a readable one."""
    try:
        return str(json.loads((folder / MANIFEST_NAME).read_text("utf-8"))["kind"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


def _inside(folder: Path) -> str:
    """Return a hint with the readable artifacts inside a folder."""
    found = [
        child.name
        for child in sorted(folder.iterdir())
        if child.suffix == ".gguf" or (child / _CONFIG).exists() or kind_of(child) in _READERS
    ]
    return f"it contains {', '.join(found)}: give one of these" if found else ""
