"""Copies files into the stage of a target; reuses data that the target has."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from edgellm.core.errors import EdgeLLMError
from edgellm.core.resources import explain_full_disk
from edgellm.tools.transfer.errors import explain
from edgellm.tools.transfer.target import Target, run

_PARTIAL = ".partial"
_PIECE_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes that were sent, and bytes that the target had already."""

    sent_bytes: int
    reused_bytes: int


def send(source: Path, names: Sequence[str], target: Target, *, has_others: bool) -> Sent:
    """Copy files into the target's stage.

    Over ssh, rsync sends the differences to the target's file of the same name, or to the part
    that arrived before an interrupt.

    Args:
        source: local folder.
        names: files in it.
        target: destination.
        has_others: whether the target's folder has other versions of some files.

    Raises:
        EdgeLLMError: rsync is missing or failed.
    """
    if not target.host:
        needed = sum((source / name).stat().st_size for name in names)
        hint = "free some space and run it again: it resumes"
        with explain_full_disk(Path(target.stage), num_bytes=needed, hint=hint):
            return _locally(source, names, target)
    folder = PurePosixPath(target.folder).name if has_others else ""
    return _with_rsync(source, names, target, folder)


def require_tools(target: Target) -> None:
    """Raise `EdgeLLMError` if this machine lacks rsync and `send` needs it."""
    if target.host and shutil.which("rsync") is None:
        raise EdgeLLMError(
            "rsync is not installed here",
            hint="install it (apt install rsync); or scp -r the folder and run this with --check",
        )


def _with_rsync(source: Path, names: Sequence[str], target: Target, others: str) -> Sent:
    """Send files with rsync; `others` is a folder with other versions of them, or ""."""
    has_progress = sys.stderr.isatty()
    # Sizes and times may be equal although the hashes differ.
    command = [
        "rsync", "--times", "--ignore-times", "--stats", "--protect-args", "--files-from=-",
        f"--partial-dir={_PARTIAL}", *([f"--copy-dest=../{others}"] if others else []),
        *(["--progress"] if has_progress else []),
        "-e", shlex.join(target.ssh),
        f"{source}/", f"{target.host}:{target.stage}/",
    ]  # fmt: skip
    listed = "".join(f"{name}\n" for name in names)
    code, printed, errors = run(command, listed, _show if has_progress else None)
    if code:
        raise explain(target, code, errors, hint="run it again: it resumes")
    return Sent(_statistic("Literal data", printed), _statistic("Matched data", printed))


def _show(piece: str) -> None:
    print(piece, end="", file=sys.stderr, flush=True)


def _statistic(name: str, printed: str) -> int:
    """Return a number of bytes from rsync's statistics."""
    match = re.search(rf"{name}: ([\d,.]+) bytes", printed)
    return int(re.sub(r"\D", "", match[1])) if match else 0


def _locally(source: Path, names: Sequence[str], target: Target) -> Sent:
    stage, sent, reused = Path(target.stage), 0, 0
    for name in names:
        partial = stage / _PARTIAL / name
        partial.parent.mkdir(parents=True, exist_ok=True)
        kept = _resume(source / name, partial)
        size = partial.stat().st_size
        sent, reused = sent + size - kept, reused + kept
        place = stage / name
        place.parent.mkdir(parents=True, exist_ok=True)
        partial.replace(place)
    return Sent(sent, reused)


def _resume(source: Path, partial: Path) -> int:
    """Make `partial` a copy of `source`; return the number of bytes that it had already."""
    kept = 0
    partial.touch()
    with source.open("rb") as origin, partial.open("r+b") as copy:
        while piece := origin.read(_PIECE_BYTES):
            if copy.read(len(piece)) == piece:
                kept += len(piece)
                continue
            copy.seek(kept)
            copy.truncate()
            copy.write(piece)
            shutil.copyfileobj(origin, copy, _PIECE_BYTES)
        copy.truncate(source.stat().st_size)
    return kept
