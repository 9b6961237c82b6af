"""What `edgellm-transfer --fleet` does, and prints of it."""

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
class Order:
    """The flags."""

    canary: str = "1"
    num_parallel: int = 8
    max_failed: int = 0
    test: str = ""
    check: bool = False
    rollback: bool = False
    status: bool = False
    page: Path | None = None

    def of_fleets(self) -> str:
        """A given flag that has no meaning for one device, "" without."""
        given = {
            "--rollback": self.rollback,
            "--status": self.status,
            "--page": self.page,
            "--test": self.test,
        }
        return next((flag for flag, value in given.items() if value), "")


def carry_out(order: Order, bundle: Path | None, fleet: Path) -> None:
    """Update, check, roll back or look at a fleet.

    Raises:
        EdgeLLMError: flags that contradict each other, a faulty inventory, and at the end:
            devices that do not have what they should.
    """
    targets, listed = _read(order, bundle, fleet)
    if order.rollback:
        _finish(order, rollout.roll_back(targets, order.num_parallel, _tell), rollout.ROLLED_BACK)
    elif order.check and listed is not None:
        found = rollout.compare(listed, targets, order.num_parallel, _tell)
        _finish(order, found, rollout.CURRENT)
    elif order.status:
        shown = _status(order, targets, listed)
        tables.show(f"Fleet {fleet}", [shown])
    elif listed is not None:
        plan = Plan(
            inventory.share(order.canary, len(targets)),
            order.num_parallel,
            order.max_failed,
            order.test,
        )
        found = rollout.roll_out(listed, targets, plan, _tell)
        _finish(order, found, rollout.UPDATED, rollout.CURRENT, listed=listed)


def _read(
    order: Order, bundle: Path | None, fleet: Path
) -> tuple[tuple[Target, ...], FileList | None]:
    """The devices, and what they are to have; raises `EdgeLLMError` as `carry_out`."""
    if sum((order.check, order.rollback, order.status)) > 1:
        raise EdgeLLMError("--check, --rollback, --status: one of them at a time")
    if bundle is None and not (order.rollback or order.status):
        raise EdgeLLMError("which bundle is the fleet to have?", hint="give BUNDLE")
    if bundle is not None and order.rollback:
        raise EdgeLLMError(
            f"{bundle} and --rollback: the devices go back to what they kept",
            hint="leave BUNDLE out; or leave --rollback out to bring it to them",
        )
    targets = inventory.read(fleet, Commands())
    inventory.share(order.canary, len(targets))
    if order.page is not None:
        is_html(order.page)
        check_output_file(order.page, fleet)
    if bundle is None:
        return targets, None
    for target in targets:
        if is_within(bundle, target):
            raise EdgeLLMError(f"{target} is the bundle itself", hint="give another folder")
    return targets, load(bundle)


def _status(order: Order, targets: Sequence[Target], listed: FileList | None) -> tables.Table:
    with ThreadPoolExecutor(order.num_parallel) as pool:
        shown = table(list(pool.map(read_versions, targets)), listed)
    if order.page is not None:
        write_page(order.page, shown)
    return shown


def _tell(outcome: Outcome) -> None:
    typer.echo(f"{outcome.target}: {outcome.state}" + (outcome.detail and f": {outcome.detail}"))


def _finish(
    order: Order, found: Sequence[Outcome], *good: str, listed: FileList | None = None
) -> None:
    """Write the page, and end in an error where devices are not as they should be."""
    if order.page is not None:
        _status(order, [outcome.target for outcome in found], listed)
    counts = collections.Counter(outcome.state for outcome in found)
    said = ", ".join(f"{number} {state}" for state, number in counts.items())
    bad = [outcome for outcome in found if outcome.state not in good]
    if bad:
        names = ", ".join(str(outcome.target) for outcome in bad[:_SHOWN])
        more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise EdgeLLMError(
            f"of {len(found)} devices {said}; look at {names}{more}",
            hint="mend what is said above and run it again: what is right already is left alone",
        )
    typer.echo(f"{len(found)} devices: {said}")
