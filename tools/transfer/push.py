"""Transfer of a folder to a target: compare, send, verify, publish."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from edgellm.core.commands.progress import Report
from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
    LimitError,
)
from edgellm.core.manifest import MANIFEST_NAME
from edgellm.tools.transfer import scripts
from edgellm.tools.transfer.file_list import FileList, listing
from edgellm.tools.transfer.send import Sent, require_tools, send
from edgellm.tools.transfer.target import Target, run_script

_SHOWN = 4  # names in a message


@dataclass(frozen=True, slots=True)
class Delivery:
    """Result of a transfer."""

    changed: tuple[str, ...]  # files that were missing or differed
    sent: Sent


def check(listed: FileList, target: Target) -> tuple[str, ...]:
    """Return the files that are missing or differ on the target, by its own sha256sum.

    Raises:
        EdgeLLMError: the target cannot be reached, or has no sha256sum.
    """
    _require_commands(target, "sha256sum")
    right, _ = _state(target, target.folder, listed)
    return tuple(name for name in listed.files if name not in right)


def deliver(listed: FileList, target: Target, report: Report = lambda _step: None) -> Delivery:
    """Copy the files of `listed` to the target; resumes after an interrupt.

    Files are sent to a stage next to the target's folder, verified there, then moved. Until then
    the target keeps its earlier version. Other files in its folder stay. `report` is called with
    each step.

    Raises:
        EdgeLLMError: the target cannot be reached or written, or holds other artifacts.
        LimitError: its disk is too small.
        BrokenArtifactError: a file differs from its manifest, here or after the transfer.
    """
    require_tools(target)
    report("comparing with the target")
    _require_commands(target, "sha256sum", *(["rsync"] if target.host else []))
    printed = run_script(target, scripts.prepare(target.folder, target.stage, listed.kinds))
    disk, *manifests = printed.split(f"\n{scripts.MANIFEST_MARK}\n")
    right, existing = _state(target, target.folder, listed)
    changed = tuple(name for name in listed.files if name not in right)
    old = _own_files(manifests, listed)
    _reject_foreign(target, [name for name in changed if name in existing and name not in old])
    arrived, _ = _state(target, target.stage, listed)
    missing = [name for name in changed if name not in arrived]
    listed.verify(missing)
    _require_space(target, sum(listed.files[name].num_bytes for name in missing), disk)
    sent = Sent(0, 0)
    if missing:
        has_others = not existing.isdisjoint(missing)
        sent = send(listed.folder, missing, target, has_others=has_others, report=report)
    report("verifying the hashes on the target")
    _verify_stage(listed, target, missing)
    old_files = sorted(old - set(listed.files))
    run_script(target, scripts.publish(target.folder, target.stage, changed, old_files))
    return Delivery(changed, sent)


def _require_commands(target: Target, *names: str) -> None:
    if lacking := run_script(target, scripts.tools(*names)).split():
        where = target.host or "this machine"
        raise EdgeLLMError(
            f"{where} has no {' and no '.join(lacking)}", hint="install it there (apt install)"
        )


def _state(target: Target, folder: str, listed: FileList) -> tuple[set[str], set[str]]:
    """Return the files of `listed` with the right hash in a folder, and all that exist there."""
    lines = run_script(target, scripts.check(folder, listed.files)).splitlines()
    right = {line.removesuffix(": OK") for line in lines if line.endswith(": OK")}
    return right, {line.removeprefix("exists ") for line in lines if line.startswith("exists ")}


def _own_files(manifests: list[str], listed: FileList) -> set[str]:
    """Return the files in the target's manifests, if their kinds are those of `listed`."""
    own: set[str] = set()
    for text, (path, kind) in zip(manifests, listed.kinds.items(), strict=True):
        found, files = listing(text)
        if found == kind:
            prefix = path.removesuffix(MANIFEST_NAME)
            own |= {path, *(prefix + name for name in files)}
    return own


def _reject_foreign(target: Target, names: list[str]) -> None:
    if names:
        raise EdgeLLMError(
            f"{target} has files that are not from an earlier transfer: {_listed(names)}",
            hint="give another folder, or move them away",
        )


def _require_space(target: Target, needed: int, disk: str) -> None:
    """Check the free kilobytes, the fourth column of `df -Pk`."""
    fields = disk.split()
    free = int(fields[3]) * 1024 if len(fields) > 3 and fields[3].isdigit() else needed
    if needed > free:
        raise LimitError(
            f"{target} has {free / 1e6:.1f} MB free, the files need {needed / 1e6:.1f} MB "
            f"({needed} bytes)",
            hint="free some space there, or give a folder on another disk",
        )


def _verify_stage(listed: FileList, target: Target, names: list[str]) -> None:
    right, _ = _state(target, target.stage, listed)
    if broken := [name for name in names if name not in right]:
        run_script(target, scripts.forget(target.stage, broken))
        raise BrokenArtifactError(
            f"{target}: the sha256 of {_listed(broken)} differs from the manifest after transfer",
            hint="run it again; if it fails again, check the disk there",
        )


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more
