"""Progress of a build: phases, percentages, a line every few seconds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edgellm.build.cli import llm_build
from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.build.progress import EVERY_S, Lines, part_of


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


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


def test_progress_beyond_the_expected_total_is_100_percent():
    written = []
    notify = part_of(written.append, "packing", 10)
    for done in (0, 5, 11):
        notify(done)
    part_of(written.append, "hashing", 0)(0)
    assert written == ["packing: 0%", "packing: 50%", "packing: 100%", "hashing: 0%"]


@pytest.mark.parametrize("quantize", ["auto", "int4"])
def test_percentages_of_all_phases_rise_to_the_end(tiny_bundle, tmp_path, quantize):
    steps = []
    plan = Plan(max_input_len=48, kv_capacity=64, threads=1, quantize=quantize)
    build_engine("llm", tiny_bundle, tmp_path / "e", plan, "onnxruntime", steps.append)
    phases: dict[str, list[int]] = {}
    for step in steps:
        phase, _, rest = step.partition(":")
        phases.setdefault(phase, []).extend(int(n) for n in re.findall(r"(\d+)%", rest))
    expected = [
        "checking the bundle",
        "computing a few tokens with the portable decoder graph",
        "packing weights of the decode graph",
        "optimizing and prepacking the decode graph",
        "comparing the decoder graph with the portable one",
        "timing forward passes",
        "hashing the engine",
    ]
    assert [phase for phase in phases if phase in expected] == expected
    assert ("rounding weights to INT4" in phases) is (quantize == "int4")
    for phase in (*expected[:3], expected[-1]):
        assert phases[phase] == sorted(phases[phase])
    for phase in (*expected[:2], expected[-1]):
        assert phases[phase][-1] == 100
    assert (
        phases["packing weights of the decode graph"][-1] > 40
    )  # of an estimate with what ONNX Runtime packs


def test_the_command_prints_lines_without_a_terminal(tiny_bundle, tmp_path, capsys):
    llm_build(Path(tiny_bundle), tmp_path / "engine", max_input_len=48, kv_capacity=64)
    said = capsys.readouterr()
    assert "checking the bundle" in said.err
    assert "timing forward passes" in said.err
    assert "timing" not in said.out
