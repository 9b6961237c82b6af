"""Progress of long work: one line on a terminal, else plain lines, one for each phase.

A step is a text of `share_of`: "packing weights: 37%". The part before the colon is its phase.
After the percentage it may name a part: "quantizing: 50%, layer 2 (3/4)".
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import NamedTuple

EVERY_S = 5.0  # between lines of one phase
Report = Callable[[str], None]  # called with the current step
_STEP = re.compile(r"(?P<phase>.*?): (?P<percent>\d+) ?%(?:, (?P<part>.*))?")


class _Step(NamedTuple):
    phase: str
    percent: int | None = None  # of the phase; None: unknown
    part: str = ""


def _parse(text: str) -> _Step:
    if found := _STEP.fullmatch(text):
        return _Step(found["phase"], int(found["percent"]), found["part"] or "")
    return _Step(text.partition(":")[0])


def share_of(phase: str, done: float, total: float, part: str = "") -> str:
    """The step in which `done` of `total` is finished; `total` may be an estimate."""
    ending = f", {part}" if part else ""
    return f"{phase}: {min(done / max(total, 1), 1):.0%}{ending}"


def part_of(report: Report, phase: str, total: int) -> Callable[[int], None]:
    """A callback that reports the finished share of a phase; `total` may be an estimate."""

    def on_progress(done: int) -> None:
        report(share_of(phase, done, total))

    return on_progress


class Lines:
    """A line for each phase and part, and one every few seconds while it lasts."""

    def __init__(
        self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write, self._clock, self._lock = write, clock, threading.Lock()
        self._text, self._step = "", _Step("")
        self._begun_s = self._written_s = clock()

    def report(self, text: str) -> None:
        """Show the newest step, see `Report`."""
        with self._lock:
            step, now = _parse(text), self._clock()
            is_new = (step.phase, step.part) != (self._step.phase, self._step.part)
            self._text, self._step = text, step
            if is_new:
                self._begun_s = now
                self._line(text, now)

    def tick(self) -> None:
        """Print the step again if `EVERY_S` has passed."""
        with self._lock:
            now = self._clock()
            if self._text and now - self._written_s >= EVERY_S:
                self._line(f"{self._text} ({now - self._begun_s:.0f} s)", now)

    def _line(self, text: str, now: float) -> None:
        self._written_s = now
        self._write(text)


@contextlib.contextmanager
def shown(*, lines: bool = True) -> Iterator[Report]:
    """Show steps on stderr: one line with percent and time left on a terminal.

    Elsewhere, or without rich, steps are plain lines, or nothing if `lines` is false.
    """
    if sys.stderr is not None and sys.stderr.isatty() and find_spec("rich"):
        with _bar() as report:
            yield report
            return
    if not lines or sys.stderr is None:
        yield lambda _step: None
        return
    with _plain_lines() as report:
        yield report


@contextlib.contextmanager
def _bar() -> Iterator[Report]:
    """One line on the terminal, which is gone at the end; other lines are printed above it."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        SpinnerColumn,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    # The current stderr: a command may redirect it while the line is shown.
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        phase = ""

        def report(text: str) -> None:
            nonlocal task, phase
            step = _parse(text)
            if step.phase != phase:  # its time left is computed from its own steps
                phase = step.phase
                bar.remove_task(task)
                task = bar.add_task(phase, total=None)
            shown_part = f", {step.part}" if step.part else ""
            described = text if step.percent is None else step.phase + shown_part
            total = None if step.percent is None else 100
            bar.update(task, description=described, completed=step.percent or 0, total=total)

        yield report


@contextlib.contextmanager
def _plain_lines() -> Iterator[Report]:
    stream, over = sys.stderr, threading.Event()
    found = Lines(lambda text: print(text, file=stream, flush=True))

    def watch() -> None:
        while not over.wait(1.0):
            found.tick()

    watcher = threading.Thread(target=watch, name="progress", daemon=True)
    watcher.start()
    try:
        yield found.report
    finally:
        over.set()
        watcher.join()
