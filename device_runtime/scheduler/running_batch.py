"""The answers in the works: how they stand, and the steps that they take side by side."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.engine.kv_cache_manager import KVCacheManager
from edgellm.device_runtime.engine.sequence import Sequence, Step
from edgellm.device_runtime.engine.step import step
from edgellm.device_runtime.faults import Confined, as_failure, is_fault
from edgellm.device_runtime.scheduler.scheduler import Bounds, Plan, RequestState, plan
from edgellm.device_runtime.speculate.policy.costs import BatchLoad

_log = logging.getLogger(__name__)
AHEAD = 4  # steps that are computed in company before their reader asks for them


class OutOfTimeError(Exception):
    """Raised by `before_pass`: the output ends here, with the finish reason `length`."""


@dataclass(slots=True, eq=False)
class RunningRequest:
    """An answer in the works, between its reader and the passes."""

    sequence: Sequence
    kept: int | None = None  # rows of it that are to be kept for later prompts
    priority: int = 0  # smaller goes first
    # Asked before every pass, by any thread; what it raises ends the answer. See `OutOfTimeError`.
    before_pass: Callable[[], object] | None = None
    number: int = 0  # in line
    came_s: float = 0.0  # of time.monotonic()
    paused_s: float = 0.0  # when its reader took its latest step
    is_wanted: bool = False  # its reader waits
    is_turned_away: bool = False  # its reader waits for another answer
    is_admitted: bool = False
    is_cut: bool = False  # its time is over
    is_done: bool = False  # `steps` are its last
    saved_rows: int = 0  # that the pool had to have back
    steps: deque[Step] = field(default_factory=deque)  # that nobody has read
    failure: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether it takes no further step."""
        return self.sequence.is_over or self.is_cut or self.failure is not None

    @property
    def is_read(self) -> bool:
        """Whether nothing more comes of it, not even why it failed."""
        return self.is_done and not self.steps and self.failure is None

    def ask(self) -> None:
        """Ask whether it may go on."""
        if self.before_pass is None or self.is_over:
            return
        try:
            self.before_pass()
        except OutOfTimeError:
            self.is_cut = True
        except BaseException as error:
            if not is_fault(error):
                raise
            self.failure = error  # as it is: its reader knows what it may raise

    def standing(self, now_s: float, patience_s: float, tree_rows: int) -> RequestState:
        """As the scheduler sees it."""
        sequence, is_parked = self.sequence, False
        if not self.is_wanted:
            is_parked = self.is_turned_away or now_s - self.paused_s > patience_s
        may_run_ahead = self.is_admitted and not is_parked and len(self.steps) < AHEAD
        return RequestState(
            self.number,
            self.priority,
            now_s - self.came_s,
            self.is_admitted,
            is_due=self.is_wanted or may_run_ahead,
            is_parked=is_parked,
            held_rows=0 if self.saved_rows else sequence.num_rows,
            saved_rows=self.saved_rows,
            unread_rows=max(len(sequence.prompt.token_ids) - sequence.num_rows, 0),
            tree_rows=1 if sequence.drafter is None else tree_rows,
            usual_rows=_rows_lately(sequence),
        )


class Batch:
    """See the module; one thread at a time takes steps, any may add and remove."""

    def __init__(self, slot: KVCacheManager, bounds: Bounds) -> None:
        self._slot: KVCacheManager | None = slot
        self.bounds = bounds
        self.entries: list[RunningRequest] = []
        self.stepping: frozenset[RunningRequest] = frozenset()  # in the pass that runs
        # Told before each pass how many answers share it, and how many made way for them.
        self.on_pass: Callable[[int, int], object] | None = None
        self._num_preempted = 0
        self._numbers = itertools.count(1)

    @property
    def slot(self) -> KVCacheManager:
        """The caches, before `close`."""
        assert self._slot is not None
        return self._slot

    def close(self) -> None:
        """Let go of the caches."""
        self.slot.close()
        self._slot, self.entries = None, []

    def add(self, entry: RunningRequest) -> None:
        """It stands at the end of the line."""
        entry.number, entry.came_s = next(self._numbers), time.monotonic()
        entry.paused_s = entry.came_s
        self.entries = [*self.entries, entry]

    def remove(self, entry: RunningRequest) -> None:
        """Nobody reads on; what a pass computes for it is dropped behind the pass."""
        self.entries = [other for other in self.entries if other is not entry]
        if entry not in self.stepping:
            entry.sequence.close()

    def sweep(self) -> bool:
        """End those that may not go on; whether there were any."""
        any_ended = False
        for entry in self.entries:
            entry.ask()
            if entry.is_over and not entry.is_done:
                self._finish(entry)
                any_ended = True
        return any_ended

    def begin(self, patience_s: float) -> list[RunningRequest]:
        """Move the line; those that step, none while that is nothing for any reader who waits.

        Args:
            patience_s: for which an answer keeps its place though nobody asks for its next step.
        """
        stepping = self._lone()
        if not stepping:
            found = self._plan(patience_s)
            if found is None:
                return []
            stepping = self._move(found)
        self.stepping = frozenset(stepping)
        if self.slot.steps_together:
            _share(stepping)
        return stepping

    def _plan(self, patience_s: float) -> Plan | None:
        now_s, rows = time.monotonic(), self.bounds.tree_rows
        going = [entry for entry in self.entries if not entry.is_done]
        standings = [entry.standing(now_s, patience_s, rows) for entry in going]
        found = plan(standings, self.slot.free_rows, self.bounds)
        is_wanted = any(entry.is_wanted and entry.number in found.rows for entry in going)
        return found if is_wanted else None

    def _lone(self) -> list[RunningRequest]:
        """The only answer, if it decodes and is waited for: nothing is to plan."""
        if len(self.entries) != 1:
            return []
        (entry,) = self.entries
        sequence = entry.sequence
        if not (entry.is_wanted and entry.is_admitted) or entry.is_done or sequence.is_reading:
            return []
        if entry.saved_rows:
            return []
        sequence.max_rows = 1 if sequence.drafter is None else self.bounds.tree_rows
        return [entry]

    def _move(self, found: Plan) -> list[RunningRequest]:
        """Move the line as planned; those that step."""
        by_number = {entry.number: entry for entry in self.entries}
        for number in found.admitted:
            by_number[number].is_admitted = True
        for number in found.released:
            self._release(by_number[number])
        for number in found.overtaken:
            by_number[number].is_admitted = False
            by_number[number].number = next(self._numbers)
        stepping = [by_number[number] for number in found.rows]
        for entry in stepping:
            entry.sequence.max_rows, entry.saved_rows = found.rows[entry.number], 0
        return stepping

    def _release(self, entry: RunningRequest) -> None:
        self._num_preempted += entry.is_admitted
        entry.is_admitted, entry.saved_rows = False, entry.sequence.num_rows
        self.slot.release(entry.sequence)

    def run(self, stepping: list[RunningRequest]) -> list[tuple[Step, ...]]:
        """Take the step; entries whose answers fail say so."""
        if self.on_pass is not None:
            with Confined(self._drop_on_pass):
                self.on_pass(len(stepping), self._num_preempted)
        self._num_preempted = 0
        if self.slot.steps_together:
            return self._step(stepping)
        found: list[tuple[Step, ...]] = []
        for entry in stepping:
            if found:  # since it was asked, others have stepped
                entry.ask()
            found += [()] if entry.is_over else self._step([entry])
        return found

    def _drop_on_pass(self, error: EdgeLLMError) -> None:
        _log.error("on_pass failed and is not called again: %s", error, exc_info=error)
        self.on_pass = None

    def _step(self, entries: list[RunningRequest]) -> list[tuple[Step, ...]]:
        try:
            found = step(self.slot, [entry.sequence for entry in entries])
            for entry in entries:
                self._keep(entry)
        except BaseException as error:  # of no sequence alone, or an interrupt
            failure = as_failure(error) if is_fault(error) else _interrupted()
            for entry in entries:
                entry.failure = failure
            if not is_fault(error):
                raise
            return [() for _ in entries]
        for entry in entries:
            entry.failure = entry.failure or entry.sequence.failure
        return found

    def _keep(self, entry: RunningRequest) -> None:
        if entry.kept is None:
            return
        with Confined(entry.sequence.warn):  # the output lacks nothing
            if self.slot.is_to_keep(entry.sequence, entry.kept):
                kept, entry.kept = entry.kept, None
                entry.sequence.warnings += self.slot.keep(entry.sequence, kept)

    def end(self, stepping: list[RunningRequest], found: list[tuple[Step, ...]]) -> None:
        """Hand out what the pass gave."""
        self.stepping = frozenset()
        for at, entry in enumerate(stepping):
            entry.steps += found[at] if at < len(found) else ()
            if entry.is_over or entry not in self.entries:
                self._finish(entry)

    def _finish(self, entry: RunningRequest) -> None:
        if entry.is_cut and not entry.sequence.is_over:
            entry.steps += entry.sequence.cut()
            entry.failure = entry.sequence.failure
        entry.is_done, entry.is_admitted = True, False
        entry.sequence.close()


def _share(stepping: list[RunningRequest]) -> None:
    """Tell those that draft what the rows of the pass cost beside the others'."""
    rows = {entry: _rows_lately(entry.sequence) for entry in stepping}
    answers = max(sum(not entry.sequence.is_reading for entry in stepping), 1)
    total, companies = sum(rows.values()), dict[int, BatchLoad]()
    for entry in stepping:
        if entry.sequence.drafter is not None:
            others = total - rows[entry]
            # One object for all that stand alike: who turns to it finds it by its identity.
            batch_load = companies.setdefault(others, BatchLoad(answers, others))
            with Confined(entry.sequence.fail):
                entry.sequence.drafter.batch_load = batch_load


def _rows_lately(sequence: Sequence) -> int:
    """Of a pass: the piece that is read next, or as many as the latest tree."""
    if sequence.is_reading:
        return sequence.max_rows
    return sequence.profile.rounds[-1].tree_size if sequence.profile.rounds else 1


def _interrupted() -> EdgeLLMError:
    return EdgeLLMError("the pass was interrupted", hint="ask again")
