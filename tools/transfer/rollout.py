"""A bundle to a fleet: first to a few, then to all, back where it fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from edgellm.core.errors import EdgeLLMError
from edgellm.tools.transfer import scripts
from edgellm.tools.transfer.file_list import FileList
from edgellm.tools.transfer.push import bring, check, publish
from edgellm.tools.transfer.target import Target, connected, run_script, try_script
from edgellm.tools.transfer.versions import read_version

UPDATED, CURRENT = "updated", "up to date"
UNTOUCHED = "not updated"  # nothing was changed there
ROLLED_BACK = "rolled back"
FAILED = "failed"  # and what the device has now is for somebody to look at
OTHER = "missing or different"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one device."""

    target: Target
    state: str
    detail: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the device now has what it should."""
        return self.state in (UPDATED, CURRENT)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a fleet is updated."""

    num_canaries: int  # the first of the fleet; the others follow when these are well
    num_parallel: int
    max_failed: int = 0  # devices that may fail; one more, and all that were updated go back
    test: str = ""  # a command for each device, in its folder, that fails where the update does


Tell = Callable[[Outcome], None]


def roll_out(
    listed: FileList, targets: Sequence[Target], plan: Plan, tell: Tell
) -> tuple[Outcome, ...]:
    """Update a fleet.

    A device fails when its hashes or the plan's test are wrong after the update; it goes back to
    what it had. One that cannot be reached, or has no room, was not touched and is no failure.
    Where a canary fails, no canary can be updated, or more fail than the plan allows, the rollout
    ends and every device that it updated goes back.

    Args:
        listed: the bundle or engine.
        targets: the devices.
        plan: how.
        tell: told of each device once something became of it, perhaps twice.

    Returns:
        What became of each device, in the order of `targets`.

    Raises:
        BrokenArtifactError: a file is not what its manifest says.
    """
    whole = listed.verified()
    found: dict[Target, Outcome] = {}

    def record(outcome: Outcome) -> None:
        found[outcome.target] = outcome
        tell(outcome)

    def update(stage: Sequence[Target], max_failed: int) -> bool:
        """Whether no more than that have failed up to now."""
        _each(
            stage,
            plan.num_parallel,
            lambda one: _update(whole, one, plan.test),
            record,
            lambda: _num_failed(found) <= max_failed,
        )
        return _num_failed(found) <= max_failed

    is_well = update(targets[: plan.num_canaries], 0)
    if is_well and any(outcome.is_good for outcome in found.values()):
        is_well = update(targets[plan.num_canaries :], plan.max_failed)
    if not is_well:
        updated = [one for one in targets if one in found and found[one].state == UPDATED]
        _each(updated, plan.num_parallel, _taken_back, record)
    ended = "the rollout ended before"
    return tuple(found.get(one) or Outcome(one, UNTOUCHED, ended) for one in targets)


def roll_back(targets: Sequence[Target], num_parallel: int, tell: Tell) -> tuple[Outcome, ...]:
    """Give every device what it had before its last update by a rollout."""
    return _of_all(targets, num_parallel, _returned, tell)


def compare(
    listed: FileList, targets: Sequence[Target], num_parallel: int, tell: Tell
) -> tuple[Outcome, ...]:
    """Whether every device has all files with the right hashes; nothing is sent."""
    return _of_all(targets, num_parallel, lambda one: _compared(listed, one), tell)


def _update(listed: FileList, target: Target, test: str) -> Outcome:
    try:
        with connected(target) as there:
            arrived = bring(listed, there)
            try:
                publish(arrived, there, keep_for=listed.version)
                _prove(listed, there, test)
            except EdgeLLMError as error:
                return _undone(there, str(error), was_changed=bool(arrived.changed))
    except EdgeLLMError as error:
        return Outcome(target, UNTOUCHED, str(error))
    if not arrived.changed:
        return Outcome(target, CURRENT)
    return Outcome(
        target,
        UPDATED,
        f"{len(arrived.changed)} of {len(listed.files)} files new or changed, "
        f"{arrived.sent.travelled / 1e6:.1f} MB travelled",
    )


def _prove(listed: FileList, target: Target, test: str) -> None:
    if wrong := check(listed, target):
        raise EdgeLLMError(f"{wrong[0]} has another sha256 than the manifest's")
    if test:
        code, _, errors = try_script(target, scripts.test(target.folder, test))
        if code:
            last = next((line for line in reversed(errors.splitlines()) if line.strip()), "")
            raise EdgeLLMError(f"the test ended with exit code {code}" + (last and f": {last}"))


def _undone(target: Target, reason: str, *, was_changed: bool) -> Outcome:
    """Of a device that failed, while the connection to it is there."""
    if not was_changed:
        return Outcome(target, FAILED, f"{reason}; it had this version already")
    try:
        _put_back(target)
    except EdgeLLMError as error:
        return Outcome(target, FAILED, f"{reason}; and it cannot be rolled back: {error}")
    return Outcome(target, ROLLED_BACK, reason)


def _taken_back(target: Target) -> Outcome:
    found = _returned(target)
    return Outcome(target, found.state, found.detail or "since others failed")


def _returned(target: Target) -> Outcome:
    try:
        with connected(target) as there:
            _put_back(there)
    except EdgeLLMError as error:
        return Outcome(target, FAILED, str(error))
    return Outcome(target, ROLLED_BACK)


def _put_back(target: Target) -> None:
    run_script(target, scripts.put_back(target.folder, target.kept))
    there = read_version(target)
    if there.files is not None and (wrong := check(there.files, target)):
        raise EdgeLLMError(f"{wrong[0]} of the earlier version is not what its manifest says")


def _compared(listed: FileList, target: Target) -> Outcome:
    try:
        with connected(target) as there:
            wrong = check(listed, there)
    except EdgeLLMError as error:
        return Outcome(target, FAILED, str(error))
    if wrong:
        return Outcome(target, OTHER, f"{len(wrong)} of {len(listed.files)} files")
    return Outcome(target, CURRENT, f"{len(listed.files)} files, all hashes right")


def _num_failed(found: dict[Target, Outcome]) -> int:
    return sum(outcome.state in (ROLLED_BACK, FAILED) for outcome in found.values())


def _of_all(
    targets: Sequence[Target], num_parallel: int, work: Callable[[Target], Outcome], tell: Tell
) -> tuple[Outcome, ...]:
    found: dict[Target, Outcome] = {}

    def record(outcome: Outcome) -> None:
        found[outcome.target] = outcome
        tell(outcome)

    _each(targets, num_parallel, work, record)
    return tuple(found[one] for one in targets)


def _each(
    targets: Sequence[Target],
    num_parallel: int,
    work: Callable[[Target], Outcome],
    record: Tell,
    goes_on: Callable[[], bool] = lambda: True,
) -> None:
    """Work on some targets at a time, and begin with further ones while `goes_on`."""
    left = deque(targets)
    running: set[Future[Outcome]] = set()
    with ThreadPoolExecutor(num_parallel, "transfer") as pool:
        try:
            while True:
                while left and len(running) < num_parallel and goes_on():
                    running.add(pool.submit(work, left.popleft()))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    record(future.result())
        except BaseException:  # an interrupt reaches the main thread alone
            for target in targets:
                target.commands.end()
            raise
