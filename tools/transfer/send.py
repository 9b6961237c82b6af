"""Copies files into the stage of a target; reuses data that the target has."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from edgellm.core.commands.progress import Report, part_of, share_of
from edgellm.core.errors import EdgeLLMError
from edgellm.core.resources import explain_full_disk
from edgellm.tools.transfer.errors import explain
from edgellm.tools.transfer.target import Target, run

_PARTIAL, _SENDING = ".partial", "sending"
_PIECE_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes that were sent, and bytes that the target had already."""

    sent_bytes: int
    reused_bytes: int


def send(
    source: Path, names: Sequence[str], target: Target, *, has_others: bool, report: Report
) -> Sent:
    """Copy files into the target's stage.

    Over ssh, rsync sends the differences to the target's file of the same name, or to the part
    that arrived before an interrupt.

    Args:
        source: local folder.
        names: files in it.
        target: destination.
        has_others: whether the target's folder has other versions of some files.
        report: called with the share that was sent.

    Raises:
        EdgeLLMError: rsync is missing or failed.
    """
    if not target.host:
        needed = sum((source / name).stat().st_size for name in names)
        hint = "free some space and run it again: it resumes"
        with explain_full_disk(Path(target.stage), num_bytes=needed, hint=hint):
            return _locally(source, names, target, part_of(report, _SENDING, needed))
    folder = PurePosixPath(target.folder).name if has_others else ""
    return _with_rsync(source, names, target, folder, report)


def require_tools(target: Target) -> None:
    """Raise `EdgeLLMError` if this machine lacks rsync and `send` needs it."""
    if target.host and shutil.which("rsync") is None:
        raise EdgeLLMError(
            "rsync is not installed here",
            hint="install it (apt install rsync); or scp -r the folder and run this with --check",
        )


def _with_rsync(
    source: Path, names: Sequence[str], target: Target, others: str, report: Report
) -> Sent:
    """Send files with rsync; `others` is a folder with other versions of them, or ""."""
    # Sizes and times may be equal although the hashes differ.
    command = [
        "rsync", "--times", "--ignore-times", "--stats", "--protect-args", "--files-from=-",
        f"--partial-dir={_PARTIAL}", *([f"--copy-dest=../{others}"] if others else []),
        "--info=progress2",
        "-e", shlex.join(target.ssh),
        f"{source}/", f"{target.host}:{target.stage}/",
    ]  # fmt: skip
    listed = "".join(f"{name}\n" for name in names)

    def show(piece: str) -> None:
        if percents := re.findall(r"(\d+)%", piece):
            report(share_of(_SENDING, int(percents[-1]), 100))

    report(share_of(_SENDING, 0, 100))
    code, printed, errors = run(command, listed, show)
    if code:
        raise explain(target, code, errors, hint="run it again: it resumes")
    return Sent(_statistic("Literal data", printed), _statistic("Matched data", printed))


def _statistic(name: str, printed: str) -> int:
    """Return a number of bytes from rsync's statistics."""
    match = re.search(rf"{name}: ([\d,.]+) bytes", printed)
    return int(re.sub(r"\D", "", match[1])) if match else 0


def _locally(
    source: Path, names: Sequence[str], target: Target, on_progress: Callable[[int], None]
) -> Sent:
    stage, sent, reused = Path(target.stage), 0, 0
    for name in names:
        partial = stage / _PARTIAL / name
        partial.parent.mkdir(parents=True, exist_ok=True)
        before = sent + reused
        on_progress(before)
        kept = _resume(source / name, partial, lambda size, b=before: on_progress(b + size))
        size = partial.stat().st_size
        sent, reused = sent + size - kept, reused + kept
        place = stage / name
        place.parent.mkdir(parents=True, exist_ok=True)
        partial.replace(place)
    return Sent(sent, reused)


def _resume(source: Path, partial: Path, on_progress: Callable[[int], None]) -> int:
    """Make `partial` a copy of `source`; return the number of bytes that it had already.

    `on_progress`: how many bytes are the same as in `source`.
    """
    kept = written = 0
    partial.touch()
    with source.open("rb") as origin, partial.open("r+b") as copy:
        while piece := origin.read(_PIECE_BYTES):
            if kept == written and copy.read(len(piece)) == piece:
                kept += len(piece)
            else:
                if kept == written:
                    copy.seek(kept)
                    copy.truncate()
                copy.write(piece)
            written += len(piece)
            on_progress(written)
        copy.truncate(source.stat().st_size)
    return kept
