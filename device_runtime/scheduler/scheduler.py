"""Scheduler: which requests share the next pass, with how many tokens each; a pure function.

Requests are admitted by priority and arrival, while the batch has space and the KV cache can hold
their prompts. KV blocks for generated tokens are allocated step by step. When the cache is full,
the last request is preempted; its KV cache is swapped in when it is admitted again. So the first
request always continues, and each waiting request becomes the first. Prompts are prefilled in
chunks that make a pass at most a quarter longer, so that decoding requests do not stall. Chunks
are larger for long prompts, and when more requests prefill than decode, within the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgellm.device_runtime.engine.prompt import whole_end
from edgellm.device_runtime.runners.batch_costs import SharedCosts

AGING_S = 30.0  # of waiting outweigh one level of priority, which prevents starvation
MIN_CHUNK = 8  # minimum tokens of a prefill chunk, whatever the bound
MAX_SLOWDOWN = 0.25  # by which a chunk may lengthen a pass, as a share
MAX_CHUNKS = 16  # chunks of the waiting prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of a pass."""

    max_running: int  # batch size
    prefill_rows: int  # tokens of prompts in a pass
    tree_rows: int = 1  # maximum tokens of a speculative round
    block_size: int = 1  # positions of a KV block
    max_stall_ms: float = math.inf
    pass_ms: NDArray[np.float64] = field(default_factory=lambda: np.zeros(2))  # by tokens (index)
    together: SharedCosts | None = None  # measured costs of batches

    def table(self, answers: int) -> NDArray[np.float64]:
        """Milliseconds of passes with a batch size, by the tokens of all sequences (index)."""
        return self.pass_ms if self.together is None else self.together.by_rows(answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestState:
    """The state of one request for the scheduler."""

    number: int  # of arrival, or of the return into the queue
    priority: int = 0  # smaller is first
    waited_s: float = 0.0  # since it came
    is_admitted: bool = False
    is_due: bool = True  # its next step is wanted
    is_parked: bool = False  # its reader has paused for long: others may take its place
    held_rows: int = 0  # positions in the KV cache
    saved_rows: int = 0  # positions that were swapped out, and are needed again
    prefill_rows_left: int = 0  # prompt tokens left to prefill; 0: it decodes
    # Of these, first and after the last of each span that one pass has, see `ImageRows`.
    spans: tuple[tuple[int, int], ...] = ()
    tree_rows: int = 1  # maximum tokens of a decoding step
    usual_rows: int = 1  # tokens of its latest step

    @property
    def rank(self) -> tuple[float, int]:
        """Sort key; smaller is first."""
        return self.priority - math.floor(self.waited_s / AGING_S), self.number

    @property
    def min_rows(self) -> int:
        """Minimum tokens of its next step: 1, or those of the image that begins its next chunk."""
        return self.whole(1)

    def whole(self, rows: int) -> int:
        """Tokens of a chunk of about `rows` that ends outside images."""
        return whole_end(self.spans, 0, rows) if self.spans else rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The next step; requests are given by their numbers."""

    rows: dict[int, int] = field(default_factory=dict)  # maximum tokens of each that steps
    admitted: tuple[int, ...] = ()  # newly
    displaced: tuple[int, ...] = ()  # lost their place to others
    preempted: tuple[int, ...] = ()  # to be preempted


def plan(states: Sequence[RequestState], num_free: int, bounds: Bounds) -> Plan:
    """Plan the next step of the requests that are due.

    Args:
        states: all running and waiting requests.
        num_free: free positions of the KV cache, in whole blocks.
        bounds: limits of a pass. The KV cache can hold any one request.
    """
    planner = _Planner(sorted(states, key=lambda one: one.rank), num_free, bounds)
    planner.admit()
    planner.grant()
    return Plan(
        rows=planner.rows,
        admitted=tuple(planner.admitted),
        displaced=tuple(planner.displaced),
        preempted=tuple(planner.preempted),
    )


class _Planner:
    """A plan under construction."""

    def __init__(self, ranked: list[RequestState], num_free: int, bounds: Bounds) -> None:
        self._ranked, self._free, self._bounds = ranked, num_free, bounds
        self._running = [one for one in ranked if one.is_admitted]
        self._held = {one.number: self._pages(one.held_rows) for one in ranked}
        self.rows: dict[int, int] = {}
        self.admitted: list[int] = []
        self.displaced: list[int] = []
        self.preempted: list[int] = []

    def admit(self) -> None:
        """Admit requests that are due, in order, while the batch and the KV cache have space."""
        for one in self._ranked:
            if one.is_admitted or not one.is_due:
                continue
            if not (self._has_place() and self._has_room(one)):
                return
            self._running.append(one)
            self.admitted.append(one.number)

    def _has_place(self) -> bool:
        """Whether the batch has space for one more; a parked request loses its place."""
        if len(self._running) < self._bounds.max_running:
            return True
        parked = [one for one in self._running if one.is_parked]
        if parked:
            self._running.remove(parked[-1])
            self.displaced.append(parked[-1].number)
        return bool(parked)

    def _has_room(self, one: RequestState) -> bool:
        """Whether the KV cache holds a prompt and one further block of each running request."""
        rows = one.held_rows + one.saved_rows + one.prefill_rows_left + 1
        while self._free - self._reserve() < self._pages(rows) - self._held[one.number]:
            if not self._release_idle(one):
                return not self._running
        self._free -= self._pages(rows) - self._held[one.number]
        self._held[one.number] = self._pages(rows)
        return True

    def _reserve(self) -> int:
        """Positions that running requests need for their prompts and one step."""
        return sum(self._more(one, one.prefill_rows_left + 1) for one in self._running)

    def grant(self) -> None:
        """Grant tokens to requests that are due: in order, decoding before prefill."""
        due = [one for one in sorted(self._running, key=lambda one: one.rank) if one.is_due]
        for one in due:  # one token, or image, each, before any gets more
            if one in self._running and self._make_room(one):
                self.rows[one.number] = one.min_rows
        due = [one for one in due if one.number in self.rows]
        decoding = [one for one in due if not one.prefill_rows_left]
        for one in decoding:
            self.rows[one.number] += self._take(one, one.tree_rows - 1)
        self._grant_chunks([one for one in due if one.prefill_rows_left], decoding)

    def _grant_chunks(self, prefilling: list[RequestState], decoding: list[RequestState]) -> None:
        given = 0
        for count, one in enumerate(prefilling, 1):
            least, budget = one.min_rows, self._budget(prefilling, count, decoding)
            left = budget - given if given else max(budget, least)
            chunk = one.whole(min(one.prefill_rows_left, max(left, 0)))
            if not least <= chunk <= left:
                del self.rows[one.number]  # it prefills after the earlier prompts
                continue
            granted = least + self._take(one, chunk - least)
            self.rows[one.number] = max(one.whole(granted), least)
            given += self.rows[one.number]

    def _budget(
        self, prefilling: list[RequestState], count: int, decoding: list[RequestState]
    ) -> int:
        """Prompt tokens of a pass that `count` prefilling and all decoding requests share."""
        bounds = self._bounds
        others = sum(min(one.usual_rows, self.rows[one.number]) for one in decoding)
        if not others:
            return bounds.prefill_rows
        calm, table = (bounds.table(len(decoding) + more) for more in (0, count))
        slower = 1 + max(MAX_SLOWDOWN, len(prefilling) / others)
        usual_ms = min(slower * float(calm[min(others, len(calm) - 1)]), bounds.max_stall_ms)
        share = sum(one.prefill_rows_left for one in prefilling) // MAX_CHUNKS
        usual = max(self._chunk(table, others, usual_ms), share)
        maximum = self._chunk(table, others, bounds.max_stall_ms)
        return min(bounds.prefill_rows, max(min(usual, maximum), MIN_CHUNK))

    def _chunk(self, table: NDArray[np.float64], others: int, bound: float) -> int:
        """Prompt tokens in a pass with `others` further tokens and a bound of milliseconds."""
        rows = int(np.searchsorted(table, bound, side="right")) - 1
        if rows == len(table) - 1 and table[-1] > 0:  # extrapolate beyond the table's end
            rows = int(min(bound / table[-1] * rows, self._bounds.prefill_rows + others))
        return rows - others if table[-1] > 0 else self._bounds.prefill_rows

    def _make_room(self, one: RequestState) -> bool:
        """Allocate the minimum; preempt the last requests if needed, this one last of all."""
        while self._more(one, one.min_rows) > self._free:
            if self._release_idle(one):
                continue
            last = max(
                (other for other in self._running if self._held[other.number] or other is one),
                key=lambda other: other.rank,
            )
            self._release(last)
            if last is one:
                return False
        self._take(one, one.min_rows)
        return True

    def _release_idle(self, one: RequestState) -> bool:
        """Preempt a request that does not run, or a parked one."""
        idle = [
            other for other in self._ranked
            if other is not one and self._held[other.number]
            and (other.is_parked or other not in self._running)
        ]  # fmt: skip
        if idle:
            self._release(idle[-1])
        return bool(idle)

    def _release(self, one: RequestState) -> None:
        self._free += self._held[one.number]
        self._held[one.number] = 0
        self.rows.pop(one.number, None)
        if one.number in self.admitted:
            self.admitted.remove(one.number)
        else:
            self.preempted.append(one.number)
        if one in self._running:
            self._running.remove(one)

    def _take(self, one: RequestState, rows: int) -> int:
        """Allocate as many further positions as are free, at most `rows`."""
        own = self._rows_of(one)
        free = self._free + self._held[one.number] - own
        given = max(min(rows, free), 0)
        pages = max(self._pages(own + given), self._held[one.number])
        self._free -= pages - self._held[one.number]
        self._held[one.number] = pages
        return given

    def _more(self, one: RequestState, rows: int) -> int:
        """Positions to allocate for `rows` further tokens."""
        return max(self._pages(self._rows_of(one) + rows) - self._held[one.number], 0)

    def _rows_of(self, one: RequestState) -> int:
        """Positions of a request before the tokens granted now."""
        return one.held_rows + one.saved_rows + self.rows.get(one.number, 0)

    def _pages(self, rows: int) -> int:
        size = self._bounds.block_size
        return -(-rows // size) * size
