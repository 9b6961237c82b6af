"""Progress of long work: phases, percentages, a line every few seconds."""

from __future__ import annotations

import io
import re
import sys
from types import SimpleNamespace

import pytest

from edgellm.core.commands import progress
from edgellm.core.commands.progress import EVERY_S, Lines, part_of, share_of, shown


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_printed_as_lines_without_a_terminal():
    """A phase is printed at once, then its newest step every few seconds."""
    clock, written = Clock(), []
    lines = Lines(written.append, clock)
    lines.tick()
    notify = part_of(lines.report, "packing", 200)
    for step in range(1, 121):
        clock.now_s = 100 + step / 10
        notify(step)
        lines.tick()
    lines.report("timing")
    clock.now_s += EVERY_S / 2
    lines.tick()
    assert written == ["packing: 0%", "packing: 26% (5 s)", "packing: 50% (10 s)", "timing"]


def test_each_part_of_a_phase_has_a_line():
    written = []
    lines = Lines(written.append, Clock())
    for done, part in ((0, "layer 0"), (1, "layer 1"), (2, "layer 1"), (2, "")):
        lines.report(share_of("quantizing", done, 4, part))
    assert written == ["quantizing: 0%, layer 0", "quantizing: 25%, layer 1", "quantizing: 50%"]


def test_progress_beyond_the_expected_total_is_100_percent():
    written = []
    notify = part_of(written.append, "packing", 10)
    for done in (0, 5, 11):
        notify(done)
    part_of(written.append, "hashing", 0)(0)
    assert written == ["packing: 0%", "packing: 50%", "packing: 100%", "hashing: 0%"]


def test_a_terminal_has_one_line_with_percent_and_time_left(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with shown() as report:
        report("opening [model]")
        report(share_of("packing", 1, 4, "part [b]"))
        sys.stderr.write("a note\n")
        report(share_of("packing", 3, 4, "part [b]"))
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", terminal.getvalue())
    last = [line.strip() for line in re.split(r"[\r\n]+", plain) if "packing" in line][-1]
    assert re.search(r"packing, part \[b\] .* 75% (-|\d):", last)
    assert "a note\n" in plain
    assert terminal.getvalue().endswith("\x1b[2K")  # the line is gone


@pytest.mark.parametrize("lines", [True, False])
def test_without_rich_and_terminals_lines_are_plain(monkeypatch, lines):
    for stream, found in ((Terminal(), None), (io.StringIO(), SimpleNamespace())):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(progress, "find_spec", lambda _name, found=found: found)
        with shown(lines=lines) as report:
            report("packing: 5%")
        assert stream.getvalue() == ("packing: 5%\n" if lines else "")
