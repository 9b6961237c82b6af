"""Output folders of commands: finished ones are reused, others are replaced only on request.

A finished folder has a record of its command, settings and inputs (`MADE_BY_NAME`). The same
command finds it and returns at once. Other contents need `--overwrite`. Foreign files are never
replaced.
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.core.artifact import (
    COMMAND,
    INPUTS,
    SETTINGS,
    artifact_kind,
    hash_file,
    is_complete,
    own_files,
    read_record,
)
from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import MANIFEST_NAME

_HASHED_BYTES = 1 << 20  # smaller files are hashed; of larger ones, size and time count
_MISSING = "missing"
GGUF_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")  # of a model in several files


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputKey:
    """What determines the contents of an output folder."""

    command: str  # "edgellm-export llm"
    settings: Mapping[str, Any]  # that change the contents, by name
    inputs: Mapping[str, Path | None]  # files and folders that are read, by flag; None: not given

    def facts(self) -> dict[str, Any]:
        """The key as JSON; two outputs with equal facts have equal contents."""
        from importlib.metadata import version  # takes a hundredth of a second

        settings = {**self.settings, "edgellm": version("edgellm")}
        return {
            COMMAND: self.command,
            SETTINGS: json.loads(json.dumps(settings, default=str)),
            INPUTS: {flag: fingerprint(path) for flag, path in self.inputs.items() if path},
        }


def fingerprint(path: Path) -> str:
    """Digest of an input's files: their hashes, or sizes and times where they are large.

    An artifact's digest is the hash of its manifest, so that copies have the same one.
    """
    if path.is_dir() and artifact_kind(path):
        return hash_file(path / MANIFEST_NAME).sha256
    digest = hashlib.sha256()
    for file in input_files(path):
        status = file.stat()
        content = f"{status.st_size} {status.st_mtime_ns}"
        if status.st_size < _HASHED_BYTES:
            content = hash_file(file).sha256
        name = "" if file == path else file.relative_to(_folder(path)).as_posix()
        digest.update(f"{name}\0{content}\0".encode())
    return digest.hexdigest()


def input_files(path: Path) -> list[Path]:
    """An input's files, in order: those of a GGUF model, or the files of a folder.

    A GGUF model has all parts of a split, and files of visual encoders next to it. Those of a
    folder include the JSON files in folders that sentence-transformers numbers.
    """
    if not path.is_dir():
        part = GGUF_PART.fullmatch(path.name)
        own = f"{glob.escape(part[1])}-*-of-{part[2]}.gguf" if part else glob.escape(path.name)
        parts = sorted(each for each in path.parent.glob(own) if each.is_file())
        return parts + encoder_files(path) if path.suffix == ".gguf" else parts
    found = [*path.iterdir(), *path.glob("[0-9]*_*/*.json")]
    return sorted(each for each in found if each.is_file() and not each.name.startswith("."))


def encoder_files(path: Path) -> list[Path]:
    """Files next to a GGUF file whose name says that they hold a visual encoder (llama.cpp)."""
    return sorted(
        each
        for each in path.parent.glob("*.gguf")
        if "mmproj" in each.name.lower() and each.is_file() and each != path
    )


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def is_finished(output: Path, key: OutputKey, *, overwrite: bool) -> bool:
    """Whether a run of the same key finished this folder; false if there is work to do.

    Raises:
        EdgeLLMError: the folder is an input, or has foreign contents, or others without
            `overwrite`.
    """
    require_own(output)
    for flag, path in key.inputs.items():
        if path and path.exists() and output.exists() and path.samefile(output):
            raise EdgeLLMError(f"{output} is the input {flag}", hint="give another output folder")
    if overwrite:
        return False
    record, facts = read_record(output), key.facts()
    difference = _difference(record, facts)
    if not difference:
        return is_complete(output)
    if record or own_files(output):
        raise EdgeLLMError(
            f"{output} holds another result: {difference}",
            hint="give another output folder, or --overwrite to replace it",
        )
    return False


def require_own(output: Path) -> None:
    """Check that a folder is new, or empty, or that edgellm wrote it.

    Raises:
        EdgeLLMError: it is a file, or has files and none that edgellm wrote.
    """
    if output.exists() and not output.is_dir():
        raise EdgeLLMError(f"{output} is a file", hint="give another output folder")
    if not output.exists() or own_files(output):
        return
    for entry in sorted(output.iterdir()):
        is_ours = entry.is_dir() and own_files(entry)  # the engine of a draft without its base
        if not (entry.name.startswith(".") or entry.name == "lost+found" or is_ours):
            raise EdgeLLMError(
                f"{output} is not empty and was not made by edgellm: it has {entry.name}",
                hint="give another output folder",
            )


def finished_line(output: Path) -> str:
    """The line that says that the output was finished already."""
    return f"{output}: finished already, by this command from the same inputs"


def _difference(record: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """The first difference between a folder's record and the facts of a run; "" if none."""
    if not record:
        return "it does not say by which command"
    if record[COMMAND] != facts[COMMAND]:
        return f"{record[COMMAND]} made it"
    for name in sorted({*record[SETTINGS], *facts[SETTINGS]}):
        old, new = (each[SETTINGS].get(name, _MISSING) for each in (record, facts))
        if old != new:
            return f"{_shown(name, old, new)}"
    for flag in sorted({*record[INPUTS], *facts[INPUTS]}):
        if record[INPUTS].get(flag) != facts[INPUTS].get(flag):
            return f"it is from other files of {flag}"
    return ""


def _shown(name: str, old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        inner = next(key for key in sorted({*old, *new}) if old.get(key) != new.get(key))
        return _shown(inner, old.get(inner, _MISSING), new.get(inner, _MISSING))
    return f"it has {name} {_value(old)}, not {_value(new)}"


def _value(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)
