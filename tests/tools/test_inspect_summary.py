"""`edgellm-inspect`: one screen by default, `--all` for the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm.tools.inspection.output.summary import COLUMNS, LINES, summary
from edgellm.tools.inspection.output.tables import size
from edgellm.tools.inspection.sources.detect import inspect
from edgellm.tools.inspection.sources.tensors import bytes_by_part

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def sources(eagle_pair) -> dict[str, Path]:
    return {
        "checkpoint": eagle_pair.base_checkpoint,
        "draft checkpoint": eagle_pair.draft_checkpoint,
        "bundle": eagle_pair.bundle,
        "draft bundle": eagle_pair.draft_bundle,
        "engine": eagle_pair.engine,
        "draft engine": eagle_pair.engine / "draft",
        "images": EXAMPLES / "synthetic-vlm",
        "trained draft": EXAMPLES / "smollm2-135m-instruct-eagle3",
    }


def test_a_summary_fits_a_screen_and_its_figures_are_those_of_the_tables(sources):
    for what, path in sources.items():
        report = inspect(path)
        for ending in ("", ", all hashes right"):
            lines = summary(report, 1024, ending)
            assert len(lines) <= LINES, what
            assert max(map(len, lines)) <= COLUMNS, what
        text = " ".join(" ".join(lines).split())
        assert "all hashes right" in text
        for part, num_bytes in bytes_by_part(report.tensors).items():
            (row,) = [line for line in lines if line.split()[:1] == [part] and "%" in line]
            assert size(num_bytes) in row, what
        if report.kv_bytes_per_token:
            assert f"{size(report.kv_bytes_per_token)} a token" in text, what


def test_the_summary_of_an_engine_has_speed_limits_and_draft(sources):
    lines = summary(inspect(sources["engine"]), 16)
    starts = {line.split("  ")[0] for line in lines}
    expected = {"backend", "longest prompt", "KV cache", "largest verified tree", "weights"}
    assert expected | {"memory", "speed", "draft", "from checkpoint"} <= starts
    assert any(line.startswith("draft") and "eagle3" in line for line in lines)


def test_the_command_prints_a_screen_and_with_all_the_tables(command_here, sources):
    short = command_here("edgellm-inspect", sources["engine"], "--verify")
    assert short.returncode == 0, short.stderr
    assert len(short.stdout.splitlines()) <= LINES
    assert "--all shows layers" in short.stdout
    assert "Inputs and outputs" not in short.stdout
    whole = command_here("edgellm-inspect", sources["engine"], "--all")
    for title in ("Weights by part", "Layers", "Inputs and outputs of", "Memory", "Origin"):
        assert title in whole.stdout
