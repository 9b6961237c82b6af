"""Progress of a build: phases, percentages, a line every few seconds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edgellm.build.cli import llm_build
from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan


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
