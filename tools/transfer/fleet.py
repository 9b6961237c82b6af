"""`edgellm-transfer --fleet`: updates, checks and rollbacks of a fleet."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import typer

from edgellm.core.artifact import check_output_file
from edgellm.core.errors import EdgeLLMError
from edgellm.tools import tables
from edgellm.tools.transfer import inventory, rollout
from edgellm.tools.transfer.file_list import FileList, load
from edgellm.tools.transfer.rollout import Outcome, Plan
from edgellm.tools.transfer.target import Commands, Target, is_within
from edgellm.tools.transfer.versions import is_html, read_versions, table, write_page

_SHOWN = 4  # devices in a message


@dataclass(frozen=True, slots=True)
class FleetJob:
    """Flags of a run on a fleet."""

    canary: str = "1"
    num_parallel: int = 8
    max_failed: int = 0
    test: str = ""
    check: bool = False
    rollback: bool = False
    status: bool = False
    page: Path | None = None

    def fleet_flag(self) -> str:
        """Return the first given flag that needs --fleet, or ""."""
        given = {
            "--rollback": self.rollback,
            "--status": self.status,
            "--page": self.page,
            "--test": self.test,
        }
        return next((flag for flag, value in given.items() if value), "")


def run(job: FleetJob, bundle: Path | None, fleet: Path) -> None:
    """Update, check or roll back a fleet, or show its versions.

    Raises:
        EdgeLLMError: the flags exclude each other, the inventory is invalid, or devices failed.
    """
    targets, listed = _read(job, bundle, fleet)
    if job.rollback:
        _finish(job, rollout.roll_back(targets, job.num_parallel, _report), rollout.ROLLED_BACK)
    elif job.check and listed is not None:
        found = rollout.compare(listed, targets, job.num_parallel, _report)
        _finish(job, found, rollout.CURRENT)
    elif job.status:
        shown = _status(job, targets, listed)
        tables.show(f"Fleet {fleet}", [shown])
    elif listed is not None:
        plan = Plan(
            inventory.share(job.canary, len(targets)),
            job.num_parallel,
            job.max_failed,
            job.test,
        )
        found = rollout.roll_out(listed, targets, plan, _report)
        _finish(job, found, rollout.UPDATED, rollout.CURRENT, listed=listed)


def _read(
    job: FleetJob, bundle: Path | None, fleet: Path
) -> tuple[tuple[Target, ...], FileList | None]:
    """Return the devices and the files of the bundle; raise `EdgeLLMError` as `run`."""
    if sum((job.check, job.rollback, job.status)) > 1:
        raise EdgeLLMError("--check, --rollback, --status: one of them at a time")
    if bundle is None and not (job.rollback or job.status):
        raise EdgeLLMError("--fleet needs a bundle", hint="give BUNDLE")
    if bundle is not None and job.rollback:
        raise EdgeLLMError(
            f"{bundle} and --rollback exclude each other: devices restore their earlier version",
            hint="leave BUNDLE out to roll back, or --rollback to update",
        )
    targets = inventory.read(fleet, Commands())
    inventory.share(job.canary, len(targets))
    if job.page is not None:
        is_html(job.page)
        check_output_file(job.page, fleet)
    if bundle is None:
        return targets, None
    for target in targets:
        if is_within(bundle, target):
            raise EdgeLLMError(f"{target} is the bundle itself", hint="give another folder")
    return targets, load(bundle)


def _status(job: FleetJob, targets: Sequence[Target], listed: FileList | None) -> tables.Table:
    with ThreadPoolExecutor(job.num_parallel) as pool:
        shown = table(list(pool.map(read_versions, targets)), listed)
    if job.page is not None:
        write_page(job.page, shown)
    return shown


def _report(outcome: Outcome) -> None:
    typer.echo(f"{outcome.target}: {outcome.state}" + (outcome.detail and f": {outcome.detail}"))


def _finish(
    job: FleetJob, found: Sequence[Outcome], *good: str, listed: FileList | None = None
) -> None:
    """Write the page; raise `EdgeLLMError` if the state of a device is not `good`."""
    if job.page is not None:
        _status(job, [outcome.target for outcome in found], listed)
    counts = collections.Counter(outcome.state for outcome in found)
    summary = ", ".join(f"{number} {state}" for state, number in counts.items())
    bad = [outcome for outcome in found if outcome.state not in good]
    if bad:
        names = ", ".join(str(outcome.target) for outcome in bad[:_SHOWN])
        more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise EdgeLLMError(
            f"of {len(found)} devices {summary}; check {names}{more}",
            hint="fix the errors above and run it again: correct devices are skipped",
        )
    typer.echo(f"{len(found)} devices: {summary}")
