"""The files of an artifact with their hashes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from edgellm.core.artifact import hash_file, verify_files
from edgellm.core.errors import BrokenArtifactError
from edgellm.core.manifest import DRAFT_FOLDER, MANIFEST_NAME, FileRecord

_KINDS = tuple(
    f"{network}_{form}"
    for form in ("bundle", "engine")
    for network in ("llm", "draft", "visual", "audio")
)
_MADE_BY = "give a folder that edgellm-export, llm_build, visual_build or audio_build made"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileList:
    """Files of a bundle or engine; each manifest comes after the files that it lists."""

    folder: Path
    files: dict[str, FileRecord]
    kinds: dict[str, str]  # kinds of its artifacts by the path of their manifest

    def verify(self, names: Iterable[str]) -> None:
        """Check these files against the manifest.

        Raises:
            BrokenArtifactError: a file is missing or was changed.
        """
        verify_files(self.folder, {name: self.files[name] for name in names})


def load(folder: Path) -> FileList:
    """List the files of a bundle or engine, including an engine's draft.

    Raises:
        BrokenArtifactError: the folder has no readable manifest of edgellm.
    """
    if not folder.is_dir():
        raise BrokenArtifactError(f"no such folder: {folder}", hint=_MADE_BY)
    path = folder / MANIFEST_NAME
    kind, files = listing(path.read_text("utf-8") if path.is_file() else "")
    if kind not in _KINDS:
        raise BrokenArtifactError(f"{folder} has no readable {MANIFEST_NAME}", hint=_MADE_BY)
    inner = f"{DRAFT_FOLDER}/{MANIFEST_NAME}"
    if kind != "llm_engine" or not (folder / inner).is_file():
        return FileList(
            folder=folder,
            files={**files, MANIFEST_NAME: hash_file(path)},
            kinds={MANIFEST_NAME: kind},
        )
    draft = load(folder / DRAFT_FOLDER)
    draft_files = {f"{DRAFT_FOLDER}/{name}": record for name, record in draft.files.items()}
    return FileList(
        folder=folder,
        files={**files, **draft_files, MANIFEST_NAME: hash_file(path)},
        kinds={inner: draft.kinds[MANIFEST_NAME], MANIFEST_NAME: kind},
    )


def listing(manifest: str) -> tuple[str, dict[str, FileRecord]]:
    """Return kind and files of a manifest's text; ("", {}) if it is not a manifest."""
    try:
        raw: dict[str, Any] = json.loads(manifest)
        files = {
            name: FileRecord(int(record["num_bytes"]), str(record["sha256"]))
            for name, record in raw["files"].items()
        }
        kind = str(raw["kind"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "", {}
    if not all(map(_is_inside, files)):
        return "", {}
    return kind, files


def _is_inside(name: str) -> bool:
    """Return whether a name stays inside its folder and is one line."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and name.isprintable() and bool(name)
