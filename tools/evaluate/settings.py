"""What a run was asked to do, kept in its folder so that it goes on with the same."""

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
_FLAGS = {
    "dataset": "--dataset",
    "data_sha256": "questions (--limit, or the data changed)",
    "engines": "engines",
    "spec": "ways to speculate",
    "max_generate_length": "--maxGenerateLength",
    "temperature": "--temperature",
    "seed": "--seed",
    "repeats": "--repeats",
}


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run: all that its answers depend on."""

    dataset: str
    num_questions: int
    data_sha256: str
    model: str  # the engine folder's name
    engines: dict[str, str]  # sha256 of manifests by role
    spec: dict[str, Any] | None  # the `SpecOptions`; None: plain answers alone
    max_generate_length: int
    temperature: float
    seed: int
    repeats: int

    @property
    def modes(self) -> tuple[str, ...]:
        """How every question is answered."""
        return ("plain",) if self.spec is None else ("plain", "spec")

    @property
    def is_exact(self) -> bool:
        """Whether speculated answers are meant to be the plain ones, token by token."""
        return self.temperature == 0 and self.spec is not None and not self.spec.get("typical")


@contextlib.contextmanager
def run_folder(folder: Path, settings: Settings) -> Iterator[None]:
    """Begin a run in the folder, or go on with one; no other process may meanwhile.

    Raises:
        EdgeLLMError: the run was begun with other settings, somebody else is at it, or the folder
            holds files of a run without its settings.
    """
    path = folder / RUN_FILE
    if not path.exists():
        _begin(folder, settings)
    busy = f"another edgellm-eval works in {folder}"
    with hold(path, busy, "wait for it, or give another --outputDir"):
        begun = read_settings(folder)
        for name, flag in _FLAGS.items():
            if getattr(begun, name) != getattr(settings, name):
                raise EdgeLLMError(
                    f"{folder} was begun with other {flag}{_values(begun, settings, name)}",
                    hint="give the same again to go on, or another --outputDir",
                )
        yield


def _begin(folder: Path, settings: Settings) -> None:
    if folder.exists() and not folder.is_dir():
        raise EdgeLLMError(f"{folder} is a file", hint="give a folder as --outputDir")
    for name in ("plain.jsonl", "spec.jsonl"):
        if (folder / name).exists():
            raise EdgeLLMError(
                f"{folder / name} is there, but no {RUN_FILE} says what it is of",
                hint="give another --outputDir",
            )
    folder.mkdir(parents=True, exist_ok=True)
    content = msgspec.to_builtins(settings)
    replace_file(folder / RUN_FILE, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _values(begun: Settings, settings: Settings, name: str) -> str:
    one, other = getattr(begun, name), getattr(settings, name)
    return f": {one}, now {other}" if isinstance(one, (int, float)) or name == "dataset" else ""


def read_settings(folder: Path) -> Settings:
    """The settings of a run; raises `EdgeLLMError` where there is none."""
    path = folder / RUN_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Settings)
    except FileNotFoundError:
        hint = "give the --outputDir of an edgellm-eval"
        raise EdgeLLMError(f"{folder} holds no evaluation", hint=hint) from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise EdgeLLMError(f"{path} is damaged: {error}", hint="evaluate again") from None


def sync_folder(folder: Path) -> None:
    """Make the names of new files last as their contents do."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
