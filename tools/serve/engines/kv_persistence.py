"""`--slotSavePath`: saves KV caches when an engine is unloaded, and restores them later."""

from __future__ import annotations

from pathlib import Path

import typer

from edgellm.core.artifact import hash_engines
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.engine.kv_snapshot import SnapshotFolder
from edgellm.tools.serve.engines.models import Model


def folder_of(folder: Path, model: Model, draft_model: Path | None) -> SnapshotFolder:
    """Snapshot folder of an engine."""
    return SnapshotFolder(
        folder, hash_engines(model.folder, model.visual, draft_model, model.audio)
    )


def prepare(folder: SnapshotFolder, *, reuses: bool) -> None:
    """Create a folder before the engine is loaded.

    Raises:
        EdgeLLMError: the folder is not writable, or context reuse is off.
    """
    if not reuses:
        raise EdgeLLMError(
            "--slotSavePath saves contexts, which --noContextReuse does not load",
            hint="give only one of the two flags",
        )
    folder.prepare()


def restore(folder: SnapshotFolder, llm: LLM) -> None:
    """Restore an engine's contexts from its folder."""
    found = folder.load(llm.kv_cache_manager.num_networks)
    for line in found.ignored:
        typer.echo(f"warning: {line}", err=True)
    for context in found.contexts:
        llm.kv_cache_manager.pinned.add(context)


def save(folder: SnapshotFolder, llm: LLM) -> None:
    """Save an engine's KV caches; raises `LimitError` if the disk is full."""
    count = folder.save(llm.kv_cache_manager.all_prefixes())
    typer.echo(f"contexts kept in {folder.folder}: {count}")
