"""Models as users name them: a path, a hub id, or a name of the store."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from edgellm.core.artifact import hash_file
from edgellm.core.commands.output_folder import GGUF_PART, input_files
from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import LLM_BUNDLE, LLM_ENGINE, MANIFEST_NAME
from edgellm.core.strict_json import parse
from edgellm.tools.store import hub

CHECKPOINT, BUNDLE, ENGINE = "checkpoint", "bundle", "engine"
_KINDS = {LLM_BUNDLE: BUNDLE, LLM_ENGINE: ENGINE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a model comes from."""

    reference: str  # a hub id or an absolute path
    name: str
    kind: str = CHECKPOINT
    path: Path | None = None  # None: on the hub

    def fingerprint(self) -> str:
        """Names, sizes and times of the files; "" for a hub id, whose files never change."""
        if self.path is None:
            return ""
        digest = hashlib.sha256()
        for file in input_files(self.path):
            found = file.stat()
            times = found.st_mtime_ns, found.st_ctime_ns
            digest.update(repr((file.name, found.st_size, *times, found.st_ino)).encode())
        return digest.hexdigest()

    def identity(self) -> str:
        """Hash of the content of a model on disk."""
        assert self.path is not None
        if self.kind == BUNDLE:
            return hash_file(self.path / MANIFEST_NAME).sha256
        digest = hashlib.sha256()
        for file in input_files(self.path):
            name = "" if file == self.path else file.name
            digest.update(f"{name} {hash_file(file).sha256}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


def read_source(text: str) -> Source | None:
    """The source that a user names; None for a text that is neither a path nor a hub id.

    Raises:
        EdgeLLMError: a path that holds no model, or does not exist.
    """
    path = Path(text).expanduser()
    if path.exists():
        return _local(path)
    if path.is_absolute() or text.startswith((".", "~")) or path.suffix == ".gguf":
        raise EdgeLLMError(f"no such folder or file: {path}", hint="check the path")
    return Source(reference=text, name=text) if hub.is_id(text) else None


def _local(path: Path) -> Source:
    place = path.absolute()
    reference = str(place.resolve())
    if path.is_file():
        if path.suffix != ".gguf":
            raise EdgeLLMError(
                f"{path} is neither a folder nor a .gguf file",
                hint="give a .gguf file, or the folder of a checkpoint, a bundle or an engine",
            )
        part = GGUF_PART.fullmatch(place.name)
        name = part[1] if part else place.stem
        return Source(reference=reference, name=name, path=place)
    name = place.resolve().name
    if (path / MANIFEST_NAME).is_file():
        return Source(reference=reference, name=name, kind=_kind(path), path=place)
    if not (path / "config.json").is_file():
        raise EdgeLLMError(
            f"{path} holds no model: it has neither config.json nor {MANIFEST_NAME}",
            hint="give a .gguf file, or the folder of a checkpoint, a bundle or an engine",
        )
    return Source(reference=reference, name=name, path=place)


def _kind(folder: Path) -> str:
    """Of an artifact of edgellm; a damaged one is reported when it is read."""
    try:
        found = parse((folder / MANIFEST_NAME).read_text("utf-8"))["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        return BUNDLE
    if found not in _KINDS:
        raise EdgeLLMError(
            f"{folder} is of kind {found}, not a language model",
            hint="give the folder of its language model",
        )
    return _KINDS[found]
