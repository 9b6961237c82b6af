"""`--slotSavePath`: what the engine's caches hold outlasts the server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import typer

from edgellm.artifact import hash_engines
from edgellm.contract import EdgeLLMError
from edgellm.device_runtime.engine.llm import LLM
from edgellm.device_runtime.engine.saved_contexts import ContextFolder


def prepared(
    folder: Path | None, engine: Path, visual: Path | None, draft: Path | None, *, reuses: bool
) -> ContextFolder | None:
    """The folder, if one is wanted, before the engine is loaded.

    Raises:
        EdgeLLMError: it cannot be written, or nobody would read what is there.
    """
    if folder is None:
        return None
    if not reuses:
        raise EdgeLLMError(
            "--slotSavePath keeps contexts, which --noContextReuse does not read",
            hint="give one of them",
        )
    found = ContextFolder(folder, hash_engines(engine, visual, draft))
    found.prepare()
    return found


@contextlib.contextmanager
def outlasting(folder: ContextFolder | None, llm: LLM) -> Iterator[None]:
    """Give an engine the contexts of a folder, and put them back when the server has ended.

    Raises:
        LimitError: the disk is full.
    """
    if folder is None:
        yield
        return
    num_caches = llm.slot.num_caches
    found = folder.load(num_caches)
    for line in found.ignored:
        typer.echo(f"warning: {line}", err=True)
    for context in found.contexts:
        llm.slot.kept.add(context)
    yield
    count = folder.save(llm.slot.contexts())
    typer.echo(f"contexts kept in {folder.folder}: {count}")
