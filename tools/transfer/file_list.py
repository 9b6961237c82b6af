"""What is to be transferred: the files of an artifact with their hashes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from edgellm.core.artifact import hash_file, verify_files
from edgellm.core.errors import BrokenArtifactError
from edgellm.core.manifest import DRAFT_FOLDER, MANIFEST_NAME, FileRecord

_KINDS = ("llm_bundle", "draft_bundle", "visual_bundle", "llm_engine", "draft_engine",
          "visual_engine")  # fmt: skip
_MADE_BY = "give a folder that edgellm-export, llm_build or visual_build made"


@dataclass(frozen=True, slots=True)
class FileList:
    """A bundle or engine; a manifest comes after the files that it names."""

    folder: Path
    files: dict[str, FileRecord]
    kinds: dict[str, str]  # of the artifacts in it, by the path of their manifests
    is_verified: bool = False

    @property
    def version(self) -> str:
        """What tells it from others."""
        return version_of(self.files[name].sha256 for name in self.kinds)

    def verify(self, names: Iterable[str]) -> None:
        """Make sure that these files are what the manifest says.

        Raises:
            BrokenArtifactError: one is missing or was changed.
        """
        if not self.is_verified:
            verify_files(self.folder, {name: self.files[name] for name in names})

    def verified(self) -> FileList:
        """The same, read once for all of its transfers; raises as `verify`."""
        self.verify(self.files)
        return replace(self, is_verified=True)


def version_of(manifest_hashes: Iterable[str]) -> str:
    """The sha256 of a manifest; of several, that of their hashes in ascending order."""
    first, *others = sorted(manifest_hashes)
    return hashlib.sha256("".join([first, *others]).encode()).hexdigest() if others else first


def load(folder: Path) -> FileList:
    """The files of a bundle or engine, an engine's draft included.

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
        return FileList(folder, {**files, MANIFEST_NAME: hash_file(path)}, {MANIFEST_NAME: kind})
    of_draft = load(folder / DRAFT_FOLDER)
    beside = {f"{DRAFT_FOLDER}/{name}": record for name, record in of_draft.files.items()}
    return FileList(
        folder,
        {**files, **beside, MANIFEST_NAME: hash_file(path)},
        {inner: of_draft.kinds[MANIFEST_NAME], MANIFEST_NAME: kind},
    )


def listing(manifest: str) -> tuple[str, dict[str, FileRecord]]:
    """Kind and files of a manifest's text; ("", {}) of anything else."""
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
    """Whether a name stays inside its folder, and is one line."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and name.isprintable() and bool(name)
