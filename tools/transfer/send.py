"""Files into the stage of a target; what is there of them already is used."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from edgellm.core.disk_space import explain_full_disk
from edgellm.core.errors import EdgeLLMError
from edgellm.tools.transfer.errors import explain
from edgellm.tools.transfer.target import Target, run

_PARTIAL = ".partial"
_PIECE_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Sent:
    """How many bytes of the files travelled, and how many were found on the target."""

    travelled: int
    found: int


def send(source: Path, names: Sequence[str], target: Target, *, has_others: bool) -> Sent:
    """Copy files into the target's stage.

    Over ssh rsync sends what differs inside a file: from the file of the same name that the
    target has, or from a part that arrived before an interrupt.

    Args:
        source: the folder here.
        names: of files in it.
        target: where they go.
        has_others: whether the target's folder has other versions of some of them.

    Raises:
        EdgeLLMError: there is no rsync, or it failed.
    """
    if not target.host:
        needed = sum((source / name).stat().st_size for name in names)
        hint = "free some space and run it again: what has arrived is kept"
        with explain_full_disk(Path(target.stage), num_bytes=needed, hint=hint):
            return _locally(source, names, target)
    folder = PurePosixPath(target.folder).name if has_others else ""
    return _with_rsync(source, names, target, folder)


def require_tools(target: Target) -> None:
    """Raise `EdgeLLMError` when this machine lacks what `send` needs."""
    if target.host and shutil.which("rsync") is None:
        raise EdgeLLMError(
            "rsync is not installed here",
            hint="install it (apt install rsync); or scp -r the folder and run this with --check",
        )


def _with_rsync(source: Path, names: Sequence[str], target: Target, others: str) -> Sent:
    """`others` is the folder beside the stage that has other versions of files, "" for none."""
    is_watched = sys.stderr.isatty() and not target.is_one_of_many
    # That size and time of two files are equal says nothing: their hashes differ.
    command = [
        "rsync", "--times", "--ignore-times", "--stats", "--protect-args", "--files-from=-",
        f"--partial-dir={_PARTIAL}", *([f"--copy-dest=../{others}"] if others else []),
        *(["--progress"] if is_watched else []),
        "-e", shlex.join(target.ssh),
        f"{source}/", f"{target.host}:{target.stage}/",
    ]  # fmt: skip
    listed = "".join(f"{name}\n" for name in names)
    code, printed, errors = run(target.commands, command, listed, _show if is_watched else None)
    if code:
        raise explain(target, code, errors, hint="run it again: what has arrived is kept")
    return Sent(_figure("Literal data", printed), _figure("Matched data", printed))


def _show(piece: str) -> None:
    print(piece, end="", file=sys.stderr, flush=True)


def _figure(name: str, printed: str) -> int:
    """A number of bytes out of rsync's statistics."""
    match = re.search(rf"{name}: ([\d,.]+) bytes", printed)
    return int(re.sub(r"\D", "", match[1])) if match else 0


def _locally(source: Path, names: Sequence[str], target: Target) -> Sent:
    stage, travelled, found = Path(target.stage), 0, 0
    for name in names:
        partial = stage / _PARTIAL / name
        partial.parent.mkdir(parents=True, exist_ok=True)
        kept = _go_on(source / name, partial)
        size = partial.stat().st_size
        travelled, found = travelled + size - kept, found + kept
        place = stage / name
        place.parent.mkdir(parents=True, exist_ok=True)
        partial.replace(place)
    return Sent(travelled, found)


def _go_on(source: Path, partial: Path) -> int:
    """Make `partial` a copy of `source`; the bytes of it that were right already."""
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
