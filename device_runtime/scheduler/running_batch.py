"""The running requests: their state, and the steps that they take in one batch."""

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
from edgellm.device_runtime.request_faults import Confined, as_failure, is_fault
from edgellm.device_runtime.scheduler.scheduler import Bounds, Plan, RequestState, plan
from edgellm.device_runtime.speculate.policy.costs import BatchLoad

_log = logging.getLogger(__name__)
AHEAD = 4  # steps that a batch may compute before the reader takes them


class OutOfTimeError(Exception):
    """Raised by `before_pass`: the output ends here, with the finish reason `length`."""


@dataclass(slots=True, eq=False, kw_only=True)
class RunningRequest:
    """A request in the batch, between its reader and the passes."""

    sequence: Sequence
    kept: int | None = None  # tokens of the prefix to pin for later prompts
    priority: int = 0  # smaller is first
    # Called before every pass, by any thread; an exception ends the request. See `OutOfTimeError`.
    before_pass: Callable[[], object] | None = None
    number: int = 0  # of arrival
    came_s: float = 0.0  # of time.monotonic()
    paused_s: float = 0.0  # when its reader took the latest step
    is_wanted: bool = False  # its reader waits
    is_unclaimed: bool = False  # its reader waits for another request
    is_admitted: bool = False
    is_cut: bool = False  # its time limit is reached
    is_done: bool = False  # `steps` are its last
    saved_rows: int = 0  # positions that were swapped out when it was preempted
    steps: deque[Step] = field(default_factory=deque)  # not read yet
    failure: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether it takes no further steps."""
        return self.sequence.is_over or self.is_cut or self.failure is not None

    @property
    def is_read(self) -> bool:
        """Whether all steps, and the failure if any, have been read."""
        return self.is_done and not self.steps and self.failure is None

    def ask(self) -> None:
        """Call `before_pass`, which may end the request."""
        if self.before_pass is None or self.is_over:
            return
        try:
            self.before_pass()
        except OutOfTimeError:
            self.is_cut = True
        except BaseException as error:
            if not is_fault(error):
                raise
            self.failure = error  # unwrapped: the reader knows its own exceptions

    def state(self, now_s: float, patience_s: float, tree_rows: int) -> RequestState:
        """The request's state for the scheduler."""
        sequence, is_parked = self.sequence, False
        if not self.is_wanted:
            is_parked = self.is_unclaimed or now_s - self.paused_s > patience_s
        may_run_ahead = self.is_admitted and not is_parked and len(self.steps) < AHEAD
        begin, prompt = sequence.num_rows, sequence.prompt
        spans = [(first - begin, last - begin) for first, last in prompt.spans if last > begin]
        return RequestState(
            number=self.number,
            priority=self.priority,
            waited_s=now_s - self.came_s,
            is_admitted=self.is_admitted,
            is_due=self.is_wanted or may_run_ahead,
            is_parked=is_parked,
            held_rows=0 if self.saved_rows else sequence.num_rows,
            saved_rows=self.saved_rows,
            prefill_rows_left=max(len(prompt.token_ids) - begin, 0),
            spans=tuple(spans),
            tree_rows=1 if sequence.drafter is None else tree_rows,
            usual_rows=_recent_tokens(sequence),
        )


class Batch:
    """The running requests; one thread at a time runs steps, any thread may add and remove."""

    def __init__(self, kv_cache_manager: KVCacheManager, bounds: Bounds) -> None:
        self._kv_cache_manager: KVCacheManager | None = kv_cache_manager
        self.bounds = bounds
        self.entries: list[RunningRequest] = []
        self.stepping: frozenset[RunningRequest] = frozenset()  # in the pass that runs
        # Called before each pass with the batch size and the number of preempted requests.
        self.on_pass: Callable[[int, int], object] | None = None
        self._num_preempted = 0
        self._numbers = itertools.count(1)

    @property
    def kv_cache_manager(self) -> KVCacheManager:
        """The caches, before `close`."""
        assert self._kv_cache_manager is not None
        return self._kv_cache_manager

    def close(self) -> None:
        """Free the caches."""
        self.kv_cache_manager.close()
        self._kv_cache_manager, self.entries = None, []

    def add(self, entry: RunningRequest) -> None:
        """Add a request to the end of the queue."""
        entry.number, entry.came_s = next(self._numbers), time.monotonic()
        entry.paused_s = entry.came_s
        self.entries = [*self.entries, entry]

    def remove(self, entry: RunningRequest) -> None:
        """Remove an abandoned request; results of a running pass are dropped after it."""
        self.entries = [other for other in self.entries if other is not entry]
        if entry not in self.stepping:
            entry.sequence.close()

    def sweep(self) -> bool:
        """End requests that may not continue; return whether there were any."""
        any_ended = False
        for entry in self.entries:
            entry.ask()
            if entry.is_over and not entry.is_done:
                self._finish(entry)
                any_ended = True
        return any_ended

    def begin(self, patience_s: float) -> list[RunningRequest]:
        """Plan and move the queue; return the requests that step.

        The list is empty if no waiting reader would get anything.

        Args:
            patience_s: how long a request keeps its place while its next step is not read.
        """
        stepping = self._single()
        if not stepping:
            found = self._plan(patience_s)
            if found is None:
                return []
            stepping = self._apply(found)
        self.stepping = frozenset(stepping)
        if self.kv_cache_manager.steps_together:
            _set_batch_loads(stepping)
        return stepping

    def _plan(self, patience_s: float) -> Plan | None:
        now_s, rows = time.monotonic(), self.bounds.tree_rows
        unfinished = [entry for entry in self.entries if not entry.is_done]
        states = [entry.state(now_s, patience_s, rows) for entry in unfinished]
        found = plan(states, self.kv_cache_manager.num_free, self.bounds)
        is_wanted = any(entry.is_wanted and entry.number in found.rows for entry in unfinished)
        return found if is_wanted else None

    def _single(self) -> list[RunningRequest]:
        """The only request, if it decodes and its reader waits: no plan is needed."""
        if len(self.entries) != 1:
            return []
        (entry,) = self.entries
        sequence = entry.sequence
        if not (entry.is_wanted and entry.is_admitted) or entry.is_done or sequence.is_prefilling:
            return []
        if entry.saved_rows:
            return []
        sequence.max_rows = 1 if sequence.drafter is None else self.bounds.tree_rows
        return [entry]

    def _apply(self, found: Plan) -> list[RunningRequest]:
        """Admit and preempt as planned; return the requests that step."""
        by_number = {entry.number: entry for entry in self.entries}
        for number in found.admitted:
            by_number[number].is_admitted = True
        for number in found.preempted:
            self._release(by_number[number])
        for number in found.displaced:
            by_number[number].is_admitted = False
            by_number[number].number = next(self._numbers)
        stepping = [by_number[number] for number in found.rows]
        for entry in stepping:
            entry.sequence.max_rows, entry.saved_rows = found.rows[entry.number], 0
        return stepping

    def _release(self, entry: RunningRequest) -> None:
        self._num_preempted += entry.is_admitted
        entry.is_admitted, entry.saved_rows = False, entry.sequence.num_rows
        self.kv_cache_manager.release(entry.sequence)

    def run(self, stepping: list[RunningRequest]) -> list[tuple[Step, ...]]:
        """Run the step; a failed request has its `failure` set."""
        if self.on_pass is not None:
            with Confined(self._drop_on_pass):
                self.on_pass(len(stepping), self._num_preempted)
        self._num_preempted = 0
        if self.kv_cache_manager.steps_together:
            return self._step(stepping)
        found: list[tuple[Step, ...]] = []
        for entry in stepping:
            if found:  # other requests have stepped since the last call
                entry.ask()
            found += [()] if entry.is_over else self._step([entry])
        return found

    def _drop_on_pass(self, error: EdgeLLMError) -> None:
        _log.error("on_pass failed and is not called again: %s", error, exc_info=error)
        self.on_pass = None

    def _step(self, entries: list[RunningRequest]) -> list[tuple[Step, ...]]:
        try:
            found = step(self.kv_cache_manager, [entry.sequence for entry in entries])
            for entry in entries:
                self._keep(entry)
        except BaseException as error:  # not of one sequence, or an interrupt
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
        with Confined(entry.sequence.warn):  # the output is still complete
            if self.kv_cache_manager.is_pin_due(entry.sequence, entry.kept):
                kept, entry.kept = entry.kept, None
                entry.sequence.warnings += self.kv_cache_manager.pin(entry.sequence, kept)

    def end(self, stepping: list[RunningRequest], found: list[tuple[Step, ...]]) -> None:
        """Append the steps of a pass to their requests."""
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


def _set_batch_loads(stepping: list[RunningRequest]) -> None:
    """Set the batch load of each drafter: the batch size, and the tokens of other sequences."""
    rows = {entry: _recent_tokens(entry.sequence) for entry in stepping}
    num_decoding = max(sum(not entry.sequence.is_prefilling for entry in stepping), 1)
    total, loads = sum(rows.values()), dict[int, BatchLoad]()
    for entry in stepping:
        if entry.sequence.drafter is not None:
            others = total - rows[entry]
            # One object for equal loads, since policies compare them by identity.
            batch_load = loads.setdefault(others, BatchLoad(num_decoding, others))
            with Confined(entry.sequence.fail):
                entry.sequence.drafter.batch_load = batch_load


def _recent_tokens(sequence: Sequence) -> int:
    """Tokens in a pass: the next chunk of the prompt, or the size of the latest tree."""
    if sequence.is_prefilling:
        return sequence.max_rows
    return sequence.profile.rounds[-1].tree_size if sequence.profile.rounds else 1


def _interrupted() -> EdgeLLMError:
    return EdgeLLMError("the pass was interrupted", hint="repeat the request")
