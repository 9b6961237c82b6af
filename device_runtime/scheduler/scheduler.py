"""Which answers share the next pass, with how many rows each: a function of how they stand.

Answers are admitted in line, by priority and arrival, while there are places and the pool has
room for their prompts; what they may generate beyond is given row by row. When the pool is full
the last in line gives its rows back, and has them again when it is admitted again. The first
in line therefore always goes on, and whoever waits becomes the first. A prompt is read in pieces
that let a pass take a quarter longer than without them, so that the answers beside it do not stall.
They are larger where more read than decode, and of a long prompt, but never is a bound exceeded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgellm.device_runtime.runners.batch_costs import SharedCosts

AGING_S = 30.0  # of waiting outweigh one level of priority: nobody starves
LEAST_PIECE = 8  # rows of a prompt that a pass takes, whatever the bound
LONGER = 0.25  # that a pass may be with a piece, beside one without
MAX_PIECES = 16  # of prompts


@dataclass(frozen=True, slots=True)
class Bounds:
    """What passes are held to."""

    max_running: int  # answers that share a pass
    prefill_rows: int  # of prompts in a pass
    tree_rows: int = 1  # that a round of an answer which is drafted for takes at most
    page_rows: int = 1  # in which the pool gives rows
    max_stall_ms: float = math.inf
    pass_ms: NDArray[np.float64] = field(default_factory=lambda: np.zeros(2))  # by rows (index)
    together: SharedCosts | None = None  # of passes that several share, if measured

    def table(self, answers: int) -> NDArray[np.float64]:
        """Milliseconds of passes that so many share, by the rows of all (index)."""
        return self.pass_ms if self.together is None else self.together.by_rows(answers)


@dataclass(frozen=True, slots=True)
class RequestState:
    """One answer as the scheduler sees it."""

    number: int  # of arrival, or of the return into line
    priority: int = 0  # smaller goes first
    waited_s: float = 0.0  # since it came
    is_admitted: bool = False
    is_due: bool = True  # its next step is wanted
    is_parked: bool = False  # nobody has wanted its next step for long: others may have its place
    held_rows: int = 0  # of the pool
    saved_rows: int = 0  # that it gave back, and needs again before it goes on
    unread_rows: int = 0  # of its prompt; 0: it decodes
    tree_rows: int = 1  # that a decoding step would like at most
    usual_rows: int = 1  # that it lately took

    @property
    def rank(self) -> tuple[float, int]:
        """Smaller goes first."""
        return self.priority - math.floor(self.waited_s / AGING_S), self.number


@dataclass(frozen=True, slots=True)
class Plan:
    """The next step, answers by their numbers."""

    rows: dict[int, int] = field(default_factory=dict)  # that each which steps may write at most
    admitted: tuple[int, ...] = ()  # newly
    overtaken: tuple[int, ...] = ()  # others have their place
    released: tuple[int, ...] = ()  # give their rows back


def plan(standings: Sequence[RequestState], free_rows: int, bounds: Bounds) -> Plan:
    """The next step of those that are due; nobody steps while only the line before them moves.

    Args:
        standings: all answers in the works.
        free_rows: of the pool, whole pages.
        bounds: of passes. The pool holds the rows of any one answer.
    """
    line = _Line(sorted(standings, key=lambda one: one.rank), free_rows, bounds)
    line.admit()
    line.grant()
    return Plan(line.rows, tuple(line.admitted), tuple(line.overtaken), tuple(line.released))


class _Line:
    """A plan in the making."""

    def __init__(self, ranked: list[RequestState], free_rows: int, bounds: Bounds) -> None:
        self._ranked, self._free, self._bounds = ranked, free_rows, bounds
        self._running = [one for one in ranked if one.is_admitted]
        self._held = {one.number: self._pages(one.held_rows) for one in ranked}
        self.rows: dict[int, int] = {}
        self.admitted: list[int] = []
        self.overtaken: list[int] = []
        self.released: list[int] = []

    def admit(self) -> None:
        """Let those in who are due, in line, while there are places and rows."""
        for one in self._ranked:
            if one.is_admitted or not one.is_due:
                continue
            if not (self._has_place() and self._has_room(one)):
                return
            self._running.append(one)
            self.admitted.append(one.number)

    def _has_place(self) -> bool:
        """Whether one more may run; who is parked makes way."""
        if len(self._running) < self._bounds.max_running:
            return True
        parked = [one for one in self._running if one.is_parked]
        if parked:
            self._running.remove(parked[-1])
            self.overtaken.append(parked[-1].number)
        return bool(parked)

    def _has_room(self, one: RequestState) -> bool:
        """Whether the pool holds a prompt, beside a further page of each that runs."""
        rows = one.held_rows + one.saved_rows + one.unread_rows + 1
        while self._free - self._reserve() < self._pages(rows) - self._held[one.number]:
            if not self._release_idle(one):
                return not self._running
        self._free -= self._pages(rows) - self._held[one.number]
        self._held[one.number] = self._pages(rows)
        return True

    def _reserve(self) -> int:
        """Rows that those who run need for their prompts and a step."""
        return sum(self._more(one, one.unread_rows + 1) for one in self._running)

    def grant(self) -> None:
        """Give rows to those that are due: the first in line first, tokens before prompts."""
        due = [one for one in sorted(self._running, key=lambda one: one.rank) if one.is_due]
        for one in due:  # a row each, before anybody has more
            if one in self._running and self._make_room(one):
                self.rows[one.number] = 1
        due = [one for one in due if one.number in self.rows]
        decoding = [one for one in due if not one.unread_rows]
        for one in decoding:
            self.rows[one.number] += self._take(one, one.tree_rows - 1)
        self._grant_pieces([one for one in due if one.unread_rows], decoding)

    def _grant_pieces(self, readers: list[RequestState], decoding: list[RequestState]) -> None:
        given = 0
        for count, one in enumerate(readers, 1):
            piece = min(one.unread_rows, self._budget(readers, count, decoding) - given)
            if piece < 1:
                del self.rows[one.number]  # it reads when those before have read
                continue
            self.rows[one.number] += self._take(one, piece - 1)
            given += self.rows[one.number]

    def _budget(self, readers: list[RequestState], count: int, decoding: list[RequestState]) -> int:
        """Rows of prompts in a pass that `count` of those who read share with those who decode."""
        bounds = self._bounds
        beside = sum(min(one.usual_rows, self.rows[one.number]) for one in decoding)
        if not beside:
            return bounds.prefill_rows
        calm, table = (bounds.table(len(decoding) + more) for more in (0, count))
        slower = 1 + max(LONGER, len(readers) / beside)
        usual_ms = min(slower * float(calm[min(beside, len(calm) - 1)]), bounds.max_stall_ms)
        share = sum(one.unread_rows for one in readers) // MAX_PIECES
        usual = max(self._piece(table, beside, usual_ms), share)
        maximum = self._piece(table, beside, bounds.max_stall_ms)
        return min(bounds.prefill_rows, max(min(usual, maximum), LEAST_PIECE))

    def _piece(self, table: NDArray[np.float64], beside: int, bound: float) -> int:
        """Rows of prompts beside so many others, in a pass that keeps a bound of milliseconds."""
        rows = int(np.searchsorted(table, bound, side="right")) - 1
        if rows == len(table) - 1 and table[-1] > 0:  # beyond its end time grows as before it
            rows = int(min(bound / table[-1] * rows, self._bounds.prefill_rows + beside))
        return rows - beside if table[-1] > 0 else self._bounds.prefill_rows

    def _make_room(self, one: RequestState) -> bool:
        """Find a row for one; who comes last makes way, itself the last of all."""
        while self._more(one, 1) > self._free:
            if self._release_idle(one):
                continue
            last = max(
                (other for other in self._running if self._held[other.number] or other is one),
                key=lambda other: other.rank,
            )
            self._release(last)
            if last is one:
                return False
        self._take(one, 1)
        return True

    def _release_idle(self, one: RequestState) -> bool:
        """Take the rows of somebody who does not run, or whom nobody asks to."""
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
            self.released.append(one.number)
        if one in self._running:
            self._running.remove(one)

    def _take(self, one: RequestState, rows: int) -> int:
        """As many more rows for one as there are, at most `rows`."""
        own = self._rows_of(one)
        free = self._free + self._held[one.number] - own
        given = max(min(rows, free), 0)
        pages = max(self._pages(own + given), self._held[one.number])
        self._free -= pages - self._held[one.number]
        self._held[one.number] = pages
        return given

    def _more(self, one: RequestState, rows: int) -> int:
        """Rows of the pool that one lacks for `rows` rows more."""
        return max(self._pages(self._rows_of(one) + rows) - self._held[one.number], 0)

    def _rows_of(self, one: RequestState) -> int:
        """That one will have before what is given now is written."""
        return one.held_rows + one.saved_rows + self.rows.get(one.number, 0)

    def _pages(self, rows: int) -> int:
        size = self._bounds.page_rows
        return -(-rows // size) * size
