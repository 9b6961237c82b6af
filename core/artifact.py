"""Artifact folders with a manifest: atomic publication; checks of sizes, hashes and counterparts.

Standard library and modules of `edgellm.core` only: host and device both use it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
)
from edgellm.core.file_lock import Unfinished, begin
from edgellm.core.manifest import (
    DRAFT_FOLDER,
    MANIFEST_NAME,
    Bundle,
    Engine,
    FileRecord,
    Manifest,
    is_kind,
    manifest_text,
)
from edgellm.core.model_spec import DraftSpec
from edgellm.core.resources import explain_full_disk, user_folder
from edgellm.core.strict_json import parse

# What made an output folder, see `edgellm.core.commands.output_folder`; hidden, and no artifact's
# file, so that it is neither hashed nor transferred.
MADE_BY_NAME = ".made_by.json"
COMMAND, SETTINGS, INPUTS = "command", "settings", "inputs"
_FILES, _DONE = "files", "finished"


def cache_folder() -> Path:
    """$EDGELLM_CACHE, or edgellm's folder in the user's cache."""
    if given := os.environ.get("EDGELLM_CACHE"):
        return Path(given)
    return user_folder("XDG_CACHE_HOME", ".cache") / "edgellm"


def verify_sizes(folder: Path, files: dict[str, FileRecord]) -> None:
    """Check presence and size of every listed file; raises `BrokenArtifactError` at a fault."""
    for name, record in files.items():
        path = folder / name
        if not path.is_file():
            raise BrokenArtifactError(f"{path} is missing", hint="copy or make the folder again")
        size = path.stat().st_size
        if size != record.num_bytes:
            raise BrokenArtifactError(
                f"{path} has {size} bytes instead of {record.num_bytes}",
                hint="the copy was cut short or the file was changed; copy or make it again",
            )


def verify_files(
    folder: Path, files: dict[str, FileRecord], on_progress: Callable[[int], None] = lambda _: None
) -> None:
    """Check size and hash of every listed file; raises `BrokenArtifactError` at the first fault.

    `on_progress`: how many bytes of all were read, while they are.
    """
    verify_sizes(folder, files)
    before = 0
    for name, record in files.items():
        found = hash_file(
            folder / name, on_progress=lambda size, before=before: on_progress(before + size)
        )
        before += record.num_bytes
        if found.sha256 != record.sha256:
            raise BrokenArtifactError(
                f"{folder / name} was changed: its sha256 differs from {MANIFEST_NAME}",
                hint="copy or make the folder again",
            )


def hash_file(
    path: Path,
    is_stopped: Callable[[], bool] = lambda: False,
    on_progress: Callable[[int], None] = lambda _: None,
) -> FileRecord:
    """Size and sha256 of a file, read in pieces; of no use if `is_stopped` ended it early.

    `on_progress`: how many bytes were read, while they are.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while not is_stopped() and (piece := stream.read(1 << 22)):
            digest.update(piece)
            size += len(piece)
            on_progress(size)
    return FileRecord(size, digest.hexdigest())


def hash_engines(
    engine: Path, visual: Path | None, draft_model: Path | None, audio: Path | None = None
) -> dict[str, str]:
    """Hashes of the manifests of all engines, by role; missing ones are left out."""
    folders = {"base": engine, "draft": engine / DRAFT_FOLDER}
    folders |= {"visual": visual} if visual is not None else {}
    folders |= {"audio": audio} if audio is not None else {}
    folders |= {"draft model": draft_model} if draft_model is not None else {}
    manifests = {role: folder / MANIFEST_NAME for role, folder in folders.items()}
    return {role: hash_file(path).sha256 for role, path in manifests.items() if path.is_file()}


def publish(
    temporary: Path,
    output: Path,
    manifest: Manifest,
    on_progress: Callable[[int, int], None] = lambda *_: None,
    facts: dict[str, Any] | None = None,
) -> Manifest:
    """Write the manifest and move a finished temporary folder to `output`.

    Files of an earlier artifact there are replaced, foreign files stay. Files that the manifest
    already lists (hashed while they were written) are not hashed again. `on_progress`: how many
    bytes of how many were hashed, while they are. `facts`: see `move_files`; with them an artifact
    of another kind is replaced, too.

    Returns:
        The manifest with all files listed.

    Raises:
        EdgeLLMError: a foreign file has the name of one of ours.
    """
    names = sorted(p.relative_to(temporary).as_posix() for p in temporary.rglob("*") if p.is_file())
    files = {name: manifest.files[name] for name in names if name in manifest.files}
    left = {name: (temporary / name).stat().st_size for name in names if name not in files}
    before, total = 0, sum(left.values())
    for name, size in left.items():
        files[name] = hash_file(
            temporary / name,
            on_progress=lambda done, before=before: on_progress(before + done, total),
        )
        before += size
    complete = dataclasses.replace(manifest, files=files)
    (temporary / MANIFEST_NAME).write_text(manifest_text(complete), "utf-8")
    check_output(output, manifest.kind, names, facts)
    old = own_files(output) if facts else _listed_files(output, manifest.kind)
    move_files(temporary, output, [*names, MANIFEST_NAME], old, facts)
    return complete


def move_files(
    temporary: Path,
    output: Path,
    names: list[str],
    old: set[str],
    facts: dict[str, Any] | None = None,
) -> None:
    """Move finished files to `output` with Ctrl-C deferred; remove files of the `old` artifact.

    With `facts` of the command, the folder gets a record of them. If the run is killed here, the
    record says that the folder is unfinished, and which files are edgellm's.

    Raises:
        EdgeLLMError: with `facts`, a foreign file has one of the names.
    """
    files = {name: _state_of(temporary / name) for name in names}
    if facts:
        _require_free(output, names, own_files(output))
    with defer_interrupt():
        if facts and not output.is_symlink() and not (output.exists() and any(output.iterdir())):
            output.parent.mkdir(parents=True, exist_ok=True)
            _write_record(temporary, facts, files, is_finished=True)
            temporary.replace(output)
            return
        output.mkdir(parents=True, exist_ok=True)
        if facts:
            _write_record(output, facts, {name: [0, 0] for name in old} | files, is_finished=False)
        else:
            (output / MADE_BY_NAME).unlink(missing_ok=True)
        for name in names:
            target = output / name
            target.parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).replace(target)
        for name in old - {*names, MADE_BY_NAME}:
            (output / name).unlink(missing_ok=True)
        if facts:
            _write_record(output, facts, files, is_finished=True)


def _state_of(path: Path) -> list[int]:
    """Size and time of the last change in ns."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _write_record(
    output: Path, facts: dict[str, Any], files: dict[str, list[int]], *, is_finished: bool
) -> None:
    record = {**facts, _DONE: is_finished, _FILES: files}
    replace_file(output / MADE_BY_NAME, json.dumps(record, indent=2) + "\n")


def read_record(folder: Path) -> dict[str, Any]:
    """What made the folder, as `move_files` recorded it; {} without a valid record."""
    try:
        record = parse((folder / MADE_BY_NAME).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    parts = (SETTINGS, INPUTS, _FILES)
    is_valid = isinstance(record, dict) and all(isinstance(record.get(key), dict) for key in parts)
    if not is_valid or not isinstance(record.get(COMMAND), str):
        return {}
    return record if all(isinstance(each, list) for each in record[_FILES].values()) else {}


def is_complete(folder: Path) -> bool:
    """Whether the folder has a record of a finished run and all of its files, unchanged.

    Files with new times, such as those of a copy, are hashed if they are an artifact's.
    """
    record = read_record(folder)
    if record.get(_DONE) is not True:
        return False
    listed = {folder / name: state for name, state in record[_FILES].items()}
    if not all(path.is_file() for path in listed):
        return False
    found = {path: _state_of(path) for path in listed}
    if found == listed or not artifact_kind(folder):
        return all(found[path][:1] == state[:1] for path, state in listed.items())
    try:
        raw = parse((folder / MANIFEST_NAME).read_text("utf-8"))["files"]
        verify_files(folder, {name: FileRecord(**facts) for name, facts in raw.items()})
    except (BrokenArtifactError, TypeError, AttributeError):
        return False
    return True


def own_files(folder: Path) -> set[str]:
    """Files in the folder that edgellm wrote, by its records; empty for a foreign folder."""
    recorded = read_record(folder).get(_FILES, {})
    own = {MADE_BY_NAME, *recorded} if recorded else set()
    kind = artifact_kind(folder)
    own |= _listed_files(folder, kind) if kind else set()
    return {name for name in own if not {"..", "/"} & {*Path(name).parts}}


def artifact_kind(folder: Path) -> str:
    """The kind of the bundle or engine in the folder; "" if it has none."""
    try:
        kind = parse((folder / MANIFEST_NAME).read_text("utf-8"))["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return kind if is_kind(kind) else ""


@contextlib.contextmanager
def temporary_folder(output: Path) -> Iterator[Path]:
    """A folder on the file system of `output`, removed when the block ends.

    Leftovers of killed runs are removed first.

    Raises:
        EdgeLLMError: another run writes `output`, it cannot be written, or the disk is full.
    """
    work: Unfinished | None = None
    try:
        with defer_interrupt():
            work = begin(output)
        with explain_full_disk(work.files, shown=output.absolute().parent):
            yield work.files
    finally:
        if work is not None:
            with defer_interrupt():
                work.remove()


def check_output_file(path: Path, *inputs: Path) -> None:
    """Check that a file can be written and is none of the `inputs`, before any work.

    Raises:
        EdgeLLMError: it cannot be written, or it is an input.
    """
    if path.is_dir():
        raise EdgeLLMError(f"{path} is a folder", hint="give the name of a file")
    if path.exists() and not path.is_file():
        raise EdgeLLMError(f"{path} is not a regular file", hint="give the name of a file")
    if not path.absolute().parent.is_dir():
        raise EdgeLLMError(f"no such folder: {path.absolute().parent}")
    if path.exists() and any(path.samefile(source) for source in inputs):
        raise EdgeLLMError(f"{path} is the input file", hint="give another output file")
    try:
        with tempfile.NamedTemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise EdgeLLMError(f"cannot write {path}: {error.strerror}") from None


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace the file (or the target of a link) atomically; lone surrogates become "?".

    Raises:
        LimitError: the disk is full; the old file is unchanged.
    """
    path = Path(os.path.realpath(path))  # a link to itself stays the link
    temporary = path.with_name(f".{path.name}.{time.time_ns()}")
    if isinstance(content, str):
        content = content.encode("utf-8", errors="replace")
    with explain_full_disk(path.parent, num_bytes=len(content)):
        try:
            temporary.write_bytes(content)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def check_output(
    output: Path, kind: str, names: list[str], facts: dict[str, Any] | None = None
) -> None:
    """Reject an output folder in which `names` would replace foreign files.

    With `facts` of a command, see `move_files`, artifacts of other kinds are not foreign.

    Raises:
        EdgeLLMError: `output` is a file, holds another kind of artifact, or has a file of one of
            these names that edgellm did not write.
    """
    if output.exists() and not output.is_dir():
        raise EdgeLLMError(f"{output} is a file", hint="give another output folder")
    ours = own_files(output) if facts else _listed_files(output, kind)
    _require_free(output, [MANIFEST_NAME, *names], ours, f"part of an earlier {kind}")


def _require_free(
    output: Path, names: list[str], ours: set[str], what: str = "written by edgellm"
) -> None:
    for name in names:
        if name not in ours and (output / name).exists():
            raise EdgeLLMError(
                f"{output / name} exists and is not {what}",
                hint="give another output folder, or move that file away",
            )


def _listed_files(folder: Path, kind: str) -> set[str]:
    """Files in the manifest of `folder`, if it is an artifact of this kind."""
    try:
        raw = parse((folder / MANIFEST_NAME).read_text("utf-8"))
        return {*raw["files"], MANIFEST_NAME} if raw["kind"] == kind else set()
    except (OSError, ValueError, KeyError, TypeError):
        return set()


@contextlib.contextmanager
def defer_interrupt() -> Iterator[list[int]]:
    """Defer SIGINT and similar signals to the end of the block.

    Yields:
        The deferred signals, appended as they arrive.
    """
    pending: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield pending  # signals go to the main thread
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {
        number: signal.signal(number, lambda number, _frame: pending.append(number))
        for number in numbers
    }
    try:
        yield pending
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if pending:
        signal.raise_signal(pending[0])


_PAIR_HINTS = {
    "hidden taps": "export the base with --is_eagle_base --draft_model_dir, and build it again",
    "rotation": "export the draft again, with the quantized base as --base_model_dir",
}


def require_pair(draft: DraftSpec, base: Bundle | Engine, where: str) -> None:
    """Reject a draft that was trained for another base.

    Raises:
        BrokenArtifactError: sizes or taps differ.
    """
    layers = base.decoder.num_layers or base.decoder.kv.num_layers
    for what, wanted, found in (
        ("hidden size", draft.base_hidden_size, base.decoder.hidden_size),
        ("number of layers", draft.base_num_layers, layers),
        ("vocabulary size", draft.decoder.vocab_size, base.decoder.vocab_size),
        ("hidden taps", draft.hidden_taps, base.hidden_taps),
        ("rotation", draft.base_rotation or "none", base.decoder.rotation or "none"),
    ):
        if wanted != found:
            raise BrokenArtifactError(
                f"{where}: the draft is for a base with {what} {wanted}, this one has {found}",
                hint=_PAIR_HINTS.get(what, "use the draft that was trained for this base"),
            )
