"""Progress of a build for users: a spinner on a terminal, else plain lines.

A step is a text, "lowering the decode graph: 37 %"; the part before the colon is its phase.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from edgellm.build.plan import Report

EVERY_S = 5.0  # between lines of one phase


def part_of(report: Report, phase: str, total: int) -> Callable[[int], None]:
    """A callback that reports the finished share of a phase; `total` may be an estimate."""

    def on_progress(done: int) -> None:
        report(f"{phase}: {min(done / max(total, 1), 1):.0%}")

    return on_progress


class Lines:
    """A line for each phase, and one every few seconds while it lasts."""

    def __init__(
        self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write, self._clock, self._lock = write, clock, threading.Lock()
        self._step = self._phase = ""
        self._begun_s = self._written_s = clock()

    def report(self, step: str) -> None:
        """Show the newest step, see `Report`."""
        with self._lock:
            phase, now = step.partition(":")[0], self._clock()
            self._step = step
            if phase != self._phase:
                self._phase, self._begun_s = phase, now
                self._line(step, now)

    def tick(self) -> None:
        """Print the step again if `EVERY_S` has passed."""
        with self._lock:
            now = self._clock()
            if self._phase and now - self._written_s >= EVERY_S:
                self._line(f"{self._step} ({now - self._begun_s:.0f} s)", now)

    def _line(self, text: str, now: float) -> None:
        self._written_s = now
        self._write(text)


@contextlib.contextmanager
def shown(*, lines: bool = True) -> Iterator[Report]:
    """Show steps on stderr: a spinner on a terminal; elsewhere plain lines, or nothing."""
    if sys.stderr is not None and sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status("starting") as spinner:
            yield lambda step: spinner.update(step)
        return
    if not lines or sys.stderr is None:
        yield lambda _step: None
        return
    with _plain_lines() as report:
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
