"""`edgellm-quantize llm --algo gptq`: error feedback and its calibration."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from quantize_cases import decode, load, make_job, make_model, write_text

from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.quantize.activations import gradients
from edgellm.quantize.algorithms.gptq.coordinate_descent import refine
from edgellm.quantize.algorithms.gptq.float_grids import Fp8Grid, Nvfp4Grid
from edgellm.quantize.algorithms.gptq.layer import round_layer
from edgellm.quantize.algorithms.gptq.rounding import (
    Feedback,
    IntegerGrid,
    round_nearest,
    round_with_feedback,
    spread,
)
from edgellm.quantize.pipeline.planning import make_plan
from edgellm.quantize.pipeline.run import run_job

pytestmark = pytest.mark.usefixtures("one_thread")

GRID = IntegerGrid(lowest=-8, highest=7, block=32)
SIGNED = replace(GRID, has_signs=True)


@pytest.fixture
def inputs() -> torch.Tensor:
    """Return correlated inputs [T, K] with outlier channels."""
    chance = torch.Generator().manual_seed(0)
    mixing = torch.randn(96, 96, generator=chance) / 10 + torch.eye(96)
    scale = torch.exp(torch.randn(96, generator=chance))
    return torch.randn(600, 96, generator=chance) @ mixing * scale


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(40, 96, generator=torch.Generator().manual_seed(1))


def _error(x: torch.Tensor, found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((x @ found.T - wanted).norm() / wanted.norm())


def test_error_feedback_beats_rounding_to_nearest(inputs, weight):
    moments, wanted = inputs.T @ inputs / len(inputs), inputs @ weight.T
    nearest = round_nearest(weight, moments.diagonal(), GRID)
    feedback = Feedback.of(moments)
    fed_back = round_with_feedback(weight, feedback, GRID)
    refined = refine(weight, fed_back, feedback, GRID)
    every = (nearest, fed_back, refined)
    errors = [_error(inputs, each.values(), wanted) for each in every]
    assert errors[1] < 0.75 * errors[0]
    assert errors[2] < 0.97 * errors[1]
    for each in every:
        assert (each.codes == each.codes.round()).all()
        assert -8 <= each.codes.min() <= each.codes.max() <= 7
        assert each.scales.shape == (40, 3)
        assert each.scales.min() > 0


@pytest.mark.parametrize(
    "grid",
    [GRID, SIGNED, IntegerGrid(lowest=-127, highest=127, block=0), Nvfp4Grid(1e-3), Fp8Grid(0.01)],
)
def test_each_sweep_reduces_the_output_error(inputs, weight, grid):
    """All scales and values stay representable."""
    feedback = Feedback.of(inputs.T @ inputs / len(inputs))
    found = [round_nearest(weight, feedback.importance, grid)]
    for _ in range(3):
        found.append(refine(weight, found[-1], feedback, grid, 1))
    lost = [each.values() - weight for each in found]
    errors = [float(((each @ feedback.moments) * each).sum()) for each in lost]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.8 * errors[0]
    last = found[-1]
    assert last.scales.abs().min() > 0
    assert (last.scales.sign() == found[0].scales.sign()).all()
    assert (last.scales < 0).any() == (grid is SIGNED)
    assert (grid.near(last.scales, last.scales) == last.scales).all()
    again = grid.nearest(last.values(), spread(last.scales, weight.shape[1]))
    torch.testing.assert_close(again, last.codes)


def test_negative_scales_use_the_value_minus_eight(weight):
    """The largest weight of a block may become -8."""
    plain, signed = (round_nearest(weight, torch.ones(96), grid) for grid in (GRID, SIGNED))
    errors = [float((each.values() - weight).norm()) for each in (plain, signed)]
    assert errors[1] < 0.97 * errors[0]
    blocks = weight.unflatten(1, (-1, 32))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))[..., 0]
    used = signed.codes.unflatten(1, (-1, 32)).amin(-1) == -8
    assert (signed.scales.sign()[used] == -largest.sign()[used]).float().mean() > 0.9


def test_scales_ignore_weights_of_unused_inputs(weight):
    """A block whose largest weight has no input is scaled for the other weights."""
    weight[:, 5] = 30
    importance = torch.ones(96)
    importance[5] = 0
    scales = [GRID.scales(weight, each) for each in (torch.ones(96), importance)]
    assert (scales[1][:, 0] < 0.8 * scales[0][:, 0]).all()
    torch.testing.assert_close(scales[0][:, 1:], scales[1][:, 1:])


@pytest.mark.parametrize("dead", [slice(0, 3), slice(0, 96)])
def test_unused_channels_are_rounded(inputs, weight, dead):
    inputs[:, dead] = 0
    feedback = Feedback.of(inputs.T @ inputs / len(inputs))
    found = round_with_feedback(weight, feedback, GRID).values()
    assert found.isfinite().all()
    assert (found - weight).norm() < 0.3 * weight.norm()


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("feedback")
    make_model(folder / "model", "qwen3")
    write_text(folder / "text.jsonl")
    return folder


def test_gptq_beats_awq_and_resumes(place, tmp_path):
    """An interrupted run gives the same bytes, and the result exports."""
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
    export_llm(
        open_checkpoint(str(job.output_dir)), tmp_path / "bundle", ExportOptions(dtype="fp32")
    )


@pytest.mark.each_change("nvfp4")
@pytest.mark.parametrize("scheme", ["fp8", "nvfp4"])
def test_gptq_of_fp8_and_nvfp4_beats_rounding_to_nearest(place, tmp_path, scheme):
    """Values and scales have the layout's types."""
    job = make_job(
        place / "model", place / "text.jsonl", tmp_path / "out", scheme, num_samples=64,
        kv_cache_quantization="fp8",
    )  # fmt: skip
    nearest = run_job(replace(job, output_dir=tmp_path / "nearest"), lambda *_: None)
    report = run_job(replace(job, algo="gptq"), lambda *_: None)
    assert report.quality.kl_divergence < 0.9 * nearest.quality.kl_divergence
    assert report.bits_per_weight == nearest.bits_per_weight
    found, theirs = load(job.output_dir), load(tmp_path / "nearest")
    assert {name: each.shape for name, each in found.items()} == {
        name: each.shape for name, each in theirs.items()
    }
    layer = "model.layers.1.mlp.up_proj"
    wanted = load(place / "model")[f"{layer}.weight"].astype("float32")
    error = np.linalg.norm(decode(found, layer) - wanted) / np.linalg.norm(wanted)
    assert error < {"fp8": 0.05, "nvfp4": 0.2}[scheme]
    said = [
        json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
        for folder in (job.output_dir, tmp_path / "nearest")
    ]
    assert said[0]["quant_algo"] == said[1]["quant_algo"]
    export_llm(
        open_checkpoint(str(job.output_dir)), tmp_path / "bundle", ExportOptions(dtype="fp32")
    )


def test_gradients_do_not_depend_on_the_batch_size(place, monkeypatch):
    """Gradients of a sample are the same in any batch."""
    job = make_job(place / "model", place / "text.jsonl", place / "none", "fp8", num_samples=5)
    plan = make_plan(job)
    rows, found = plan.task.calibration.rows, []
    for kept in (1 << 29, 1):
        monkeypatch.setattr(gradients, "_STATES_BYTES", kept)
        traced = gradients.trace(plan.subject, rows, plan.task.device)
        found.append({(each.layer, each.row): each.gradients["mlp.up_proj"] for each in traced})
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) == len(rows) * len(plan.subject.layers)
    for key, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][key])


def test_tokens_of_weight_zero_do_not_affect_the_result(place):
    """A layer is quantized alike for any inputs of such tokens."""
    plan = make_plan(
        make_job(place / "model", place / "text.jsonl", place / "none", "int4_awq", algo="gptq")
    )
    source = {name: each.floats() for name, each in plan.subject.layer_source(0).items()}
    states = next(plan.subject.reader.embedded(plan.task.calibration.rows[:4], 4))
    changed = states.clone()
    changed[:, -9:] *= 30  # no earlier token attends to them
    results = []
    for each, count in ((states, 0.0), (changed, 0.0), (changed, 1.0)):
        weights = torch.ones(states.shape[1])
        weights[-9:] = count
        names = (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        )
        model = plan.subject.layer_model(0, source, plan.task.device)
        found = round_layer(
            model, plan.recipe, [each], plan.subject.family, dict.fromkeys(names, weights)
        )
        results.append(found.tensors["model.layers.0.mlp.down_proj.weight"].data)
    assert results[0] == results[1]
    assert results[0] != results[2]
