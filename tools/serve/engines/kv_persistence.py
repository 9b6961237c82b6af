"""`--slotSavePath`: what the engine's caches hold outlasts the server."""

from __future__ import annotations

from pathlib import Path

import typer

from edgellm.core.artifact import hash_engines
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.engine.kv_snapshot import SnapshotFolder


def folder_of(
    folder: Path, engine: Path, visual: Path | None, draft_model: Path | None
) -> SnapshotFolder:
    """Where the contexts of an engine are."""
    return SnapshotFolder(folder, hash_engines(engine, visual, draft_model))


def prepare(folder: SnapshotFolder, *, reuses: bool) -> None:
    """Make a folder, before the engine is loaded.

    Raises:
        EdgeLLMError: it cannot be written, or nobody would read what is there.
    """
    if not reuses:
        raise EdgeLLMError(
            "--slotSavePath keeps contexts, which --noContextReuse does not read",
            hint="give one of them",
        )
    folder.prepare()


def give_back(folder: SnapshotFolder, llm: LLM) -> None:
    """Give an engine the contexts of its folder."""
    found = folder.load(llm.slot.num_caches)
    for line in found.ignored:
        typer.echo(f"warning: {line}", err=True)
    for context in found.contexts:
        llm.slot.kept.add(context)


def keep(folder: SnapshotFolder, llm: LLM) -> None:
    """Write what an engine's caches hold; raises `LimitError` if the disk is full."""
    count = folder.save(llm.slot.contexts())
    typer.echo(f"contexts kept in {folder.folder}: {count}")
