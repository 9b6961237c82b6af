"""`edgellm-quantize llm --algo gptq`: error feedback, and what it aims at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quantize_cases import decode, load, make_job, make_model, write_text

from edgellm.export.bundle import ExportOptions, export_llm
from edgellm.export.source import open_checkpoint
from edgellm.quantize.error_feedback import (
    Feedback,
    Grid,
    aimed,
    round_nearest,
    round_with_feedback,
)
from edgellm.quantize.layerwise_run import run_job

pytestmark = pytest.mark.usefixtures("one_thread")

GRID = Grid(-8, 7, 32)


@pytest.fixture
def inputs() -> torch.Tensor:
    """Correlated ones [T, K] with outlying channels."""
    chance = torch.Generator().manual_seed(0)
    mixing = torch.randn(96, 96, generator=chance) / 10 + torch.eye(96)
    scale = torch.exp(torch.randn(96, generator=chance))
    return torch.randn(600, 96, generator=chance) @ mixing * scale


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(40, 96, generator=torch.Generator().manual_seed(1))


def _error(x: torch.Tensor, found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((x @ found.T - wanted).norm() / wanted.norm())


def test_feedback_loses_less_than_the_nearest(inputs, weight):
    moments, wanted = inputs.T @ inputs / len(inputs), inputs @ weight.T
    nearest = round_nearest(weight, moments.diagonal(), GRID)
    fed_back = round_with_feedback(weight, Feedback.of(moments), GRID)
    errors = [_error(inputs, each.values(), wanted) for each in (nearest, fed_back)]
    assert errors[1] < 0.75 * errors[0]
    for each in (nearest, fed_back):
        assert (each.codes == each.codes.round()).all()
        assert -8 <= each.codes.min() <= each.codes.max() <= 7
        assert each.scales.shape == (40, 3)
        assert each.scales.min() > 0


def test_scales_weigh_what_matters(weight):
    """A block whose largest weight meets no input is scaled for the others."""
    weight[:, 5] = 30
    importance = torch.ones(96)
    importance[5] = 0
    scales = [GRID.scales(weight, each) for each in (torch.ones(96), importance)]
    assert (scales[1][:, 0] < 0.8 * scales[0][:, 0]).all()
    torch.testing.assert_close(scales[0][:, 1:], scales[1][:, 1:])


@pytest.mark.parametrize("dead", [slice(0, 3), slice(0, 96)])
def test_channels_that_are_never_used(inputs, weight, dead):
    inputs[:, dead] = 0
    feedback = Feedback.of(inputs.T @ inputs / len(inputs))
    found = round_with_feedback(weight, feedback, GRID).values()
    assert found.isfinite().all()
    assert (found - weight).norm() < 0.3 * weight.norm()


def test_what_is_aimed_at_makes_up_for_rounded_inputs(inputs, weight):
    chance = torch.Generator().manual_seed(2)
    rounded = inputs * 0.9 + 0.05 * torch.randn(inputs.shape, generator=chance)
    moments, crossed = (x.T @ rounded / len(inputs) for x in (rounded, inputs))
    wanted = inputs @ weight.T
    errors = [_error(rounded, aimed(weight, moments, crossed, trust), wanted)
              for trust in (0.0, 10.0, 1000.0)]  # fmt: skip
    assert errors[1] < 0.8 * errors[0]
    assert errors[2] < errors[1]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("feedback")
    make_model(folder / "model", "qwen3")
    write_text(folder / "text.jsonl")
    return folder


def test_a_model_and_an_interrupt(place, tmp_path):
    """Less is lost than by AWQ; an interrupted run gives the same bytes, and the result exports."""
    job = make_job(
        place / "model", place / "text.jsonl", tmp_path / "out", "int4_awq", algo="gptq",
        kv_cache_quantization="fp8", num_samples=64,
    )  # fmt: skip
    report = run_job(job, lambda *_: None)
    assert report.quantization == "int4_gptq"
    awq = run_job(replace(job, algo=None, output_dir=tmp_path / "awq"), lambda *_: None)
    assert report.quality.kl_divergence < awq.quality.kl_divergence

    def stop(_what: str, done: int, _total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    cut = replace(job, output_dir=tmp_path / "cut")
    with pytest.raises(KeyboardInterrupt):
        run_job(cut, stop)
    run_job(cut, lambda *_: None)
    name = "model.safetensors"
    assert (cut.output_dir / name).read_bytes() == (job.output_dir / name).read_bytes()
    found = load(job.output_dir)
    layer = "model.layers.1.mlp.up_proj"
    assert decode(found, layer).shape == (96, 96)
    assert "model.layers.1.self_attn.k_proj.k_scale" in found
    export_llm(open_checkpoint(str(job.output_dir)), tmp_path / "bundle", ExportOptions("fp32"))
