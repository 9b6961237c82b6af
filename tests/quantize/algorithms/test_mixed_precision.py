"""`edgellm-quantize llm --quantization mixed`: the least divergence for a size."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from quantize_cases import load, make_job, make_model, write_text

from edgellm.core.errors import EdgeLLMError
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.quantize.algorithms.gptq.rounding import IntegerGrid, round_nearest
from edgellm.quantize.algorithms.mixed_precision import search
from edgellm.quantize.algorithms.mixed_precision.allocation import Form, Unit, choose_point, curve
from edgellm.quantize.algorithms.mixed_precision.sensitivity import estimate
from edgellm.quantize.models.one_layer_model import linears, run_layer
from edgellm.quantize.pipeline.planning import make_plan
from edgellm.quantize.pipeline.run import run_job

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mixing")
    make_model(folder / "model", "qwen3")
    write_text(folder / "text.jsonl")
    return folder


@pytest.fixture
def mixed(place, tmp_path):
    return make_job(
        place / "model", place / "text.jsonl", tmp_path / "out", "mixed", target_bits=8.0
    )


def test_the_curve_is_optimal():
    """No combination of the same size beats a point."""
    chance = np.random.default_rng(0)
    units = []
    for layer in range(5):
        costs = sorted(chance.random(2))
        forms = Form("4", 40, costs[1]), Form("8", 80, costs[0]), Form("16", 160, 0.0)
        units.append(Unit(layer=layer, names=(str(layer),), weights=10, forms=forms))
    whole = list(itertools.product(*(unit.forms for unit in units)))
    points = curve(units)
    assert points[0].bits_per_weight == 4
    assert points[-1].divergence == 0
    for point in points:
        fitting = [
            math.fsum(form.divergence for form in forms)
            for forms in whole
            if sum(form.bits for form in forms) <= point.bits_per_weight * 50 + 1e-9
        ]
        assert point.divergence == pytest.approx(min(fitting))
    assert choose_point(points, points[2].bits_per_weight, None) == points[2]
    assert choose_point(points, 1.0, None) == points[0]
    assert choose_point(points, None, points[3].divergence) == points[3]


def test_the_estimate_is_near_the_divergence(mixed):
    """Quantizing one unit alone, measured with the whole model, against the estimate."""
    plan = make_plan(replace(mixed, target_bits=4.5, num_samples=4))
    torch.manual_seed(0)
    grid = IntegerGrid(lowest=-8, highest=7, block=32)
    units = estimate(plan.subject, plan.task, {"int4": grid})
    foretold = [unit.forms[1].divergence for unit in units]
    measured = [_divergence(plan, unit, grid) for unit in units]
    ranks = [np.argsort(np.argsort(values)) for values in (foretold, measured)]
    assert np.corrcoef(*ranks)[0, 1] > 0.8
    assert 0.4 < sum(foretold) / sum(measured) < 2.5


def _divergence(plan, unit: Unit, grid: IntegerGrid) -> float:
    subject, task = plan.subject, plan.task
    weight = load(Path(plan.job.model_dir))["model.embed_tokens.weight"]  # tied to the head
    head = torch.from_numpy(weight.astype(np.float32))
    logs = []
    for is_rounded in (False, True):
        states = next(subject.reader.embedded(task.calibration.rows, 99))
        for index in range(len(subject.layers)):
            source = {name: each.floats() for name, each in subject.layer_source(index).items()}
            model = subject.layer_model(index, source, task.device)
            for name, module in linears(model).items():
                if is_rounded and index == unit.layer and name in unit.names:
                    rounded = round_nearest(module.weight, torch.ones(module.in_features), grid)
                    module.weight.copy_(rounded.values())
            states = run_layer(model, states)
        logs.append(torch.log_softmax(run_layer(subject.norm_model(None, task.device), states)
                                      @ head.T, -1))  # fmt: skip
    return float((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean())


def test_a_mixed_precision_model_exports(mixed, tmp_path):
    report = run_job(mixed, lambda *_: None)
    found = load(mixed.output_dir)
    described = json.loads((mixed.output_dir / "hf_quant_config.json").read_text())["quantization"]
    assert described["quant_algo"] == "MIXED_PRECISION"
    kinds = {}
    for name in load(Path(mixed.model_dir)):
        module = name.removesuffix(".weight")
        if name.startswith("model.layers.") and name.endswith("proj.weight"):
            form = described["quantized_layers"].get(module, {}).get("quant_algo", "float")
            kinds[form] = kinds.get(form, 0) + 1
            has_scale = f"{name}_scale" in found
            assert has_scale == (form != "float")
            assert found[name].dtype == {"W4A16_AWQ": np.uint8, "W8A16": np.int8}.get(
                form, found[name].dtype
            )
    assert len(kinds) >= 2
    small = run_job(replace(mixed, output_dir=tmp_path / "small", target_bits=4.5), lambda *_: None)
    assert small.quality.kl_divergence > report.quality.kl_divergence
    assert small.bytes_after < report.bytes_after
    assert report.mixture is not None
    assert report.mixture.chosen.bits_per_weight <= 8
    page = (mixed.output_dir / "edgellm_quant.html").read_text()
    assert "bits a weight" in page
    export_llm(
        open_checkpoint(str(mixed.output_dir)), tmp_path / "bundle", ExportOptions(dtype="fp32")
    )


def test_a_resumed_run_uses_the_stored_forms(mixed, tmp_path, monkeypatch):
    whole = replace(mixed, output_dir=tmp_path / "whole", target_kl=0.1, target_bits=None)
    run_job(whole, lambda *_: None)

    def stop(_what: str, done: int, _total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    cut = replace(whole, output_dir=tmp_path / "cut")
    with pytest.raises(KeyboardInterrupt):
        run_job(cut, stop)
    monkeypatch.setattr(search, "estimate", None)  # not called again
    run_job(cut, lambda *_: None)
    name = "model.safetensors"
    assert (cut.output_dir / name).read_bytes() == (whole.output_dir / name).read_bytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target_bits": None}, "needs one target"),
        ({"target_kl": 0.1}, "needs one target"),
        ({"quantization": "fp8"}, "are for mixed precision"),
        ({"algo": "awq"}, "has no choice of algorithms"),
        ({"base_model_dir": "base"}, "does not support drafts"),
        ({"target_bits": 4.2}, "has 4.5 bits a weight"),
    ],
)
def test_invalid_options_are_rejected(mixed, change, words):
    with pytest.raises(EdgeLLMError) as caught:
        run_job(replace(mixed, **change), lambda *_: None)
    assert words in f"{caught.value} {caught.value.hint}"
    assert not mixed.work_dir.exists()
