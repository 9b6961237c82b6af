"""From a folder here to the same folder there: compare, send, check, move into place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
    """What a transfer did."""

    changed: tuple[str, ...]  # files that were missing or differed
    sent: Sent


@dataclass(frozen=True, slots=True)
class Arrived:
    """What lies on a target's stage, and the files of its folder that go when it is published."""

    changed: tuple[str, ...]
    gone: tuple[str, ...]
    sent: Sent


def check(listed: FileList, target: Target) -> tuple[str, ...]:
    """The files that the target lacks or has otherwise, found by its own sha256sum.

    Raises:
        EdgeLLMError: the target cannot be reached, or has no sha256sum.
    """
    _require_there(target, "sha256sum")
    right, _ = _state(target, target.folder, listed)
    return tuple(name for name in listed.files if name not in right)


def deliver(listed: FileList, target: Target) -> Delivery:
    """Bring the target to what `listed` is; interrupted, it goes on where it was.

    Files arrive in a folder beside the target's, are checked there and then moved, so that the
    target holds what it held before until everything has arrived. Foreign files stay.

    Raises:
        EdgeLLMError: the target cannot be reached or written, or holds something else.
        LimitError: its disk is too small.
        BrokenArtifactError: a file of `listed` is not what its manifest says, or did not arrive so.
    """
    arrived = bring(listed, target)
    publish(arrived, target)
    return Delivery(arrived.changed, arrived.sent)


def bring(listed: FileList, target: Target) -> Arrived:
    """Let everything arrive beside the target's folder; raises as `deliver`."""
    require_tools(target)
    _require_there(target, "sha256sum", *(["rsync"] if target.host else []))
    printed = run_script(target, scripts.prepare(target.folder, target.stage, listed.kinds))
    disk, *manifests = printed.split(f"\n{scripts.MANIFEST_MARK}\n")
    right, there = _state(target, target.folder, listed)
    changed = tuple(name for name in listed.files if name not in right)
    old = _own_files(manifests, listed)
    _refuse_foreign(target, [name for name in changed if name in there and name not in old])
    arrived, _ = _state(target, target.stage, listed)
    missing = [name for name in changed if name not in arrived]
    listed.verify(missing)
    _require_space(target, sum(listed.files[name].num_bytes for name in missing), disk)
    sent = Sent(0, 0)
    if missing:
        sent = send(listed.folder, missing, target, has_others=not there.isdisjoint(missing))
    _check_arrived(listed, target, missing)
    return Arrived(changed, tuple(sorted(old - set(listed.files))), sent)


def publish(arrived: Arrived, target: Target, *, keep_for: str = "") -> None:
    """Move what arrived into its place.

    Args:
        arrived: on this target.
        target: where `bring` went to.
        keep_for: the version that is published, if what it replaces shall be kept.

    Raises:
        EdgeLLMError: the target cannot be reached or written.
    """
    names = (*arrived.changed, *arrived.gone)
    if keep_for and names:
        run_script(target, scripts.keep(target.folder, target.kept, keep_for, names))
    moved = scripts.publish(target.folder, target.stage, arrived.changed, arrived.gone)
    run_script(target, moved if keep_for or not names else moved + scripts.drop(target.kept))


def _require_there(target: Target, *names: str) -> None:
    if lacking := run_script(target, scripts.tools(*names)).split():
        where = target.host or "this machine"
        raise EdgeLLMError(
            f"{where} has no {' and no '.join(lacking)}", hint="install it there (apt install)"
        )


def _state(target: Target, folder: str, listed: FileList) -> tuple[set[str], set[str]]:
    """The files of `listed` that are right in a folder of the target, and those that are there."""
    lines = run_script(target, scripts.check(folder, listed.files)).splitlines()
    right = {line.removesuffix(": OK") for line in lines if line.endswith(": OK")}
    return right, {line.removeprefix("there ") for line in lines if line.startswith("there ")}


def _own_files(manifests: list[str], listed: FileList) -> set[str]:
    """The files that the target's manifests name, where they are of the kinds of `listed`."""
    own: set[str] = set()
    for text, (path, kind) in zip(manifests, listed.kinds.items(), strict=True):
        found, files = listing(text)
        if found == kind:
            prefix = path.removesuffix(MANIFEST_NAME)
            own |= {path, *(prefix + name for name in files)}
    return own


def _refuse_foreign(target: Target, names: list[str]) -> None:
    if names:
        raise EdgeLLMError(
            f"{target} has files that are not of an earlier transfer: {_listed(names)}",
            hint="give another folder, or move them away",
        )


def _require_space(target: Target, needed: int, disk: str) -> None:
    """Compare with the available kilobytes, the fourth column of `df -Pk`."""
    fields = disk.split()
    free = int(fields[3]) * 1024 if len(fields) > 3 and fields[3].isdigit() else needed
    if needed > free:
        raise LimitError(
            f"{target} has {free / 1e6:.1f} MB free, the files need {needed / 1e6:.1f} MB "
            f"({needed} bytes)",
            hint="free some space there, or give a folder on another disk",
        )


def _check_arrived(listed: FileList, target: Target, names: list[str]) -> None:
    right, _ = _state(target, target.stage, listed)
    if broken := [name for name in names if name not in right]:
        run_script(target, scripts.forget(target.stage, broken))
        raise BrokenArtifactError(
            f"{target}: {_listed(broken)} arrived with another sha256 than the manifest's",
            hint="run it again; if it stays so, check the disk there",
        )


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more
