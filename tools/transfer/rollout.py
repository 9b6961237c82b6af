"""Staged rollout of a bundle to a fleet: canaries first, rollback on failure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from edgellm.core.errors import EdgeLLMError
from edgellm.tools.transfer import scripts
from edgellm.tools.transfer.file_list import FileList
from edgellm.tools.transfer.push import check, publish, stage
from edgellm.tools.transfer.target import Target, connected, run_script, try_script
from edgellm.tools.transfer.versions import read_version

UPDATED, CURRENT = "updated", "up to date"
UNTOUCHED = "not updated"  # the device is unchanged
ROLLED_BACK = "rolled back"
FAILED = "failed"  # the device needs a manual check
OTHER = "missing or different"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one device."""

    target: Target
    state: str
    detail: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the device has the new version."""
        return self.state in (UPDATED, CURRENT)


@dataclass(frozen=True, slots=True)
class Plan:
    """Options of a rollout."""

    num_canaries: int  # devices that are updated first
    num_parallel: int
    max_failed: int = 0  # if more devices fail, all updated ones are rolled back
    test: str = ""  # shell command that tests a device after its update, run in its folder


Report = Callable[[Outcome], None]


def roll_out(
    listed: FileList, targets: Sequence[Target], plan: Plan, report: Report
) -> tuple[Outcome, ...]:
    """Update a fleet.

    A device fails if its hashes or the plan's test are wrong after the update; it is rolled back.
    A device that is unreachable or full stays unchanged and does not count as failed. If a canary
    fails, no canary can be updated, or more than `max_failed` fail, all updated devices are rolled
    back.

    Args:
        listed: the bundle or engine.
        targets: the devices.
        plan: options of the rollout.
        report: gets the outcome of each device; twice if it is rolled back later.

    Returns:
        Outcome of each device, in the order of `targets`.

    Raises:
        BrokenArtifactError: a file differs from its manifest.
    """
    whole = listed.verified()
    found: dict[Target, Outcome] = {}

    def record(outcome: Outcome) -> None:
        found[outcome.target] = outcome
        report(outcome)

    def update(group: Sequence[Target], max_failed: int) -> bool:
        """Update devices; return whether at most `max_failed` have failed so far."""
        _each(
            group,
            plan.num_parallel,
            lambda one: _update(whole, one, plan.test),
            record,
            lambda: _num_failed(found) <= max_failed,
        )
        return _num_failed(found) <= max_failed

    is_good = update(targets[: plan.num_canaries], 0)
    if is_good and any(outcome.is_good for outcome in found.values()):
        is_good = update(targets[plan.num_canaries :], plan.max_failed)
    if not is_good:
        updated = [one for one in targets if one in found and found[one].state == UPDATED]
        _each(updated, plan.num_parallel, _roll_back_for_others, record)
    ended = "the rollout ended before"
    return tuple(found.get(one) or Outcome(one, UNTOUCHED, ended) for one in targets)


def roll_back(targets: Sequence[Target], num_parallel: int, report: Report) -> tuple[Outcome, ...]:
    """Roll all devices back to the version before their last rollout."""
    return _of_all(targets, num_parallel, _roll_back_one, report)


def compare(
    listed: FileList, targets: Sequence[Target], num_parallel: int, report: Report
) -> tuple[Outcome, ...]:
    """Check the hashes of all files on all devices; nothing is sent."""
    return _of_all(targets, num_parallel, lambda one: _compare_one(listed, one), report)


def _update(listed: FileList, target: Target, test: str) -> Outcome:
    try:
        with connected(target) as remote:
            staged = stage(listed, remote)
            try:
                publish(staged, remote, keep_for=listed.version)
                _verify(listed, remote, test)
            except EdgeLLMError as error:
                return _undo(remote, str(error), was_changed=bool(staged.changed))
    except EdgeLLMError as error:
        return Outcome(target, UNTOUCHED, str(error))
    if not staged.changed:
        return Outcome(target, CURRENT)
    return Outcome(
        target,
        UPDATED,
        f"{len(staged.changed)} of {len(listed.files)} files new or changed, "
        f"{staged.sent.sent_bytes / 1e6:.1f} MB travelled",
    )


def _verify(listed: FileList, target: Target, test: str) -> None:
    if wrong := check(listed, target):
        raise EdgeLLMError(f"the sha256 of {wrong[0]} differs from the manifest")
    if test:
        code, _, errors = try_script(target, scripts.test(target.folder, test))
        if code:
            last = next((line for line in reversed(errors.splitlines()) if line.strip()), "")
            raise EdgeLLMError(f"the test ended with exit code {code}" + (last and f": {last}"))


def _undo(target: Target, reason: str, *, was_changed: bool) -> Outcome:
    """Roll a failed device back over its open connection."""
    if not was_changed:
        return Outcome(target, FAILED, f"{reason}; it had this version already")
    try:
        _restore(target)
    except EdgeLLMError as error:
        return Outcome(target, FAILED, f"{reason}; and the rollback failed: {error}")
    return Outcome(target, ROLLED_BACK, reason)


def _roll_back_for_others(target: Target) -> Outcome:
    found = _roll_back_one(target)
    return Outcome(target, found.state, found.detail or "since others failed")


def _roll_back_one(target: Target) -> Outcome:
    try:
        with connected(target) as remote:
            _restore(remote)
    except EdgeLLMError as error:
        return Outcome(target, FAILED, str(error))
    return Outcome(target, ROLLED_BACK)


def _restore(target: Target) -> None:
    run_script(target, scripts.restore(target.folder, target.previous))
    restored = read_version(target)
    if restored.files is not None and (wrong := check(restored.files, target)):
        raise EdgeLLMError(f"{wrong[0]} of the earlier version differs from its manifest")


def _compare_one(listed: FileList, target: Target) -> Outcome:
    try:
        with connected(target) as remote:
            wrong = check(listed, remote)
    except EdgeLLMError as error:
        return Outcome(target, FAILED, str(error))
    if wrong:
        return Outcome(target, OTHER, f"{len(wrong)} of {len(listed.files)} files")
    return Outcome(target, CURRENT, f"{len(listed.files)} files, all hashes right")


def _num_failed(found: dict[Target, Outcome]) -> int:
    return sum(outcome.state in (ROLLED_BACK, FAILED) for outcome in found.values())


def _of_all(
    targets: Sequence[Target], num_parallel: int, work: Callable[[Target], Outcome], report: Report
) -> tuple[Outcome, ...]:
    found: dict[Target, Outcome] = {}

    def record(outcome: Outcome) -> None:
        found[outcome.target] = outcome
        report(outcome)

    _each(targets, num_parallel, work, record)
    return tuple(found[one] for one in targets)


def _each(
    targets: Sequence[Target],
    num_parallel: int,
    work: Callable[[Target], Outcome],
    record: Report,
    continues: Callable[[], bool] = lambda: True,
) -> None:
    """Run `work` on targets concurrently; start further ones only while `continues()`."""
    left = deque(targets)
    running: set[Future[Outcome]] = set()
    with ThreadPoolExecutor(num_parallel, "transfer") as pool:
        try:
            while True:
                while left and len(running) < num_parallel and continues():
                    running.add(pool.submit(work, left.popleft()))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    record(future.result())
        except BaseException:  # an interrupt reaches the main thread only
            for target in targets:
                target.commands.end()
            raise
