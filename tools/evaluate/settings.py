"""Settings of a run, stored in its folder; resuming requires equal settings."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from edgellm.core.artifact import replace_file
from edgellm.core.errors import EdgeLLMError
from edgellm.core.file_lock import hold

RUN_FILE = "run.json"
_RESULTS = ("plain.jsonl", "spec.jsonl", "scores.json", "report.md", "report.html")
_FLAGS = {
    "dataset": "--dataset",
    "data_sha256": "questions (--limit, or the data changed)",
    "engines": "engines",
    "spec": "options of speculation",
    "max_generate_length": "--maxGenerateLength",
    "temperature": "--temperature",
    "seed": "--seed",
    "repeats": "--repeats",
}


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings that the answers of a run depend on."""

    dataset: str
    num_questions: int
    data_sha256: str
    model: str  # the engine folder's name
    engines: dict[str, str]  # sha256 of manifests by role
    spec: dict[str, Any] | None  # the `SpecOptions`; None: plain mode only
    max_generate_length: int
    temperature: float
    seed: int
    repeats: int

    @property
    def modes(self) -> tuple[str, ...]:
        """Decoding modes of each question."""
        return ("plain",) if self.spec is None else ("plain", "spec")

    @property
    def is_exact(self) -> bool:
        """Whether speculative answers must equal the plain ones, token by token."""
        return self.temperature == 0 and self.spec is not None and not self.spec.get("typical")


@contextlib.contextmanager
def run_folder(folder: Path, settings: Settings, *, overwrite: bool = False) -> Iterator[None]:
    """Start or resume a run in the folder, and lock it; with `overwrite` it starts anew.

    Raises:
        EdgeLLMError: the run has other settings, another process holds the lock, or the folder
            has answer files without settings, or other foreign files.
    """
    path = folder / RUN_FILE
    busy = f"another edgellm-eval uses {folder}", "wait for it, or give another --outputDir"
    if is_own := overwrite and path.exists():
        read_settings(folder)
        with hold(path, *busy):
            for name in (*_RESULTS, RUN_FILE):
                (folder / name).unlink(missing_ok=True)
    if not path.exists():
        _begin(folder, settings, is_own=is_own)
    with hold(path, *busy):
        stored = read_settings(folder)
        for name, flag in _FLAGS.items():
            if getattr(stored, name) != getattr(settings, name):
                raise EdgeLLMError(
                    f"{folder} was started with other {flag}{_values(stored, settings, name)}",
                    hint="give the same flags to resume, another --outputDir, or --overwrite to "
                    "replace it",
                )
        yield


def _begin(folder: Path, settings: Settings, *, is_own: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise EdgeLLMError(f"{folder} is a file", hint="give a folder as --outputDir")
    for name in ("plain.jsonl", "spec.jsonl"):
        if (folder / name).exists():
            raise EdgeLLMError(
                f"{folder / name} exists, but {RUN_FILE} with its settings is missing",
                hint="give another --outputDir",
            )
    entries = sorted(folder.iterdir()) if folder.exists() else []
    foreign = [each.name for each in entries if each.name not in _RESULTS]
    if foreign and not is_own:
        raise EdgeLLMError(
            f"{folder} is not empty and holds no evaluation: it has {foreign[0]}",
            hint="give another --outputDir",
        )
    folder.mkdir(parents=True, exist_ok=True)
    content = msgspec.to_builtins(settings)
    replace_file(folder / RUN_FILE, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _values(stored: Settings, settings: Settings, name: str) -> str:
    one, other = getattr(stored, name), getattr(settings, name)
    return f": {one}, now {other}" if isinstance(one, (int, float)) or name == "dataset" else ""


def read_settings(folder: Path) -> Settings:
    """Return the settings of a run; raise `EdgeLLMError` if the folder has none."""
    path = folder / RUN_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Settings)
    except FileNotFoundError:
        hint = "give the --outputDir of an edgellm-eval"
        raise EdgeLLMError(f"{folder} holds no evaluation", hint=hint) from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise EdgeLLMError(f"{path} is damaged: {error}", hint="evaluate again") from None


def sync_folder(folder: Path) -> None:
    """Sync the folder to disk, so that the names of new files persist."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
