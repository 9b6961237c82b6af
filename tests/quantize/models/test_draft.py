"""`edgellm-quantize draft`: every layout, calibrated with its base's hidden states."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_checkpoint
from draft_runs import DraftRun, drive
from eagle_engines import EAGLE1, EAGLE3, LOW_RANK, WINDOW
from eagle_reference import Layout, Reference, make_draft
from medusa_heads import make_heads
from quantize_cases import decode, load, write_text
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from edgellm.core.errors import (
    EdgeLLMError,
    UnsupportedModelError,
)
from edgellm.export import models
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.quantize.formats.schemes import SCHEMES
from edgellm.quantize.job import Job
from edgellm.quantize.pipeline.planning import make_plan
from edgellm.quantize.pipeline.run import run_job
from edgellm.quantize.pipeline.search import draft as draft_recipes
from edgellm.quantize.pipeline.search.draft import search_precisions
from edgellm.quantize.report.notes import notes

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"num_hidden_layers": 8, "intermediate_size": 96}
LAYOUTS = {
    "eagle3": EAGLE3,
    "eagle1": EAGLE1,
    "speculators": Layout(
        {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
         "draft_vocab_size": 40, "norm_before_residual": True, "model_type": "speculator_model"},
        inner_config={"model_type": "llama"}, first="layers.0", norm_before_residual=True,
    ),
    "everything": Layout(
        {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40,
         "norm_output": True, "fc_norm": True},
        layers=2, qkv_bias=True, qk_norm=True, fc_norm=True, norm_output=True, own_embedding=True,
        file="pytorch_model.bin",
    ),
}  # fmt: skip
WINDOWED = {"window": WINDOW, "window_norms": replace(WINDOW, qk_norm=True)}
ALL = {**LAYOUTS, **WINDOWED, "low_rank": replace(LOW_RANK, candidates=40)}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("drafts")
    write_text(folder / "text.jsonl")
    for tied in (True, False):
        sizes = {**models.find("llama").TINY, **SIZES, "tie_word_embeddings": tied}
        make_checkpoint(folder / f"base-{tied}", **sizes)
    return folder


@pytest.fixture(scope="module")
def make(place):
    def job(name: str, scheme: str = "fp8", output: Path | None = None, **changes: object) -> Job:
        draft, layout = place / name, ALL[name]
        if not draft.exists():
            make_draft(draft, layout)
        changes = {"num_samples": 6, "seq_len": 32, "held_out": 2, "device": "cpu", **changes}
        return Job(
            model_dir=str(draft),
            output_dir=output or place / f"{name}-{scheme}",
            quantization=scheme,
            base_model_dir=str(place / f"base-{layout.tied_base}"),
            calib_dataset=str(place / "text.jsonl"),
            **changes,
        )

    return job


def _quiet(*_: object) -> None:
    pass


def _float_outputs(job: Job, layout: Layout, rows: np.ndarray):
    """Return log-probabilities of both steps and the base's tokens, by a reference."""
    base = AutoModelForCausalLM.from_pretrained(job.base_model_dir, dtype=torch.float32)
    for row in torch.from_numpy(rows):
        with torch.no_grad():
            output = base(row[None], output_hidden_states=True)
        taps = torch.cat([output.hidden_states[tap][0] for tap in layout.taps], -1)
        greedy = output.logits[0].argmax(-1)
        count = len(row) - 2
        mask, places = torch.ones(count, count, dtype=torch.bool).tril(), torch.arange(count)
        hidden = taps if layout.eagle1 else _reference(job, layout).fuse(taps)
        hidden = hidden[:count]
        for step in (1, 2):
            reference = _reference(job, layout)
            logs, hidden = reference.forward(row[step : step + count], hidden, places, mask)
            yield logs, reference.targets, greedy[step : step + count]


def _reference(job: Job, layout: Layout) -> Reference:
    return Reference(Path(job.model_dir), Path(job.base_model_dir), layout)


@pytest.mark.each_change("eagle3", "eagle1", "everything", "window_norms")
@pytest.mark.parametrize("name", ALL)
def test_the_report_agrees_with_the_reference(make, name):
    """Perplexity and accepted candidates of the float draft."""
    job, layout = make(name), ALL[name]
    report = run_job(job, _quiet)
    rows = make_plan(job).task.calibration.held_out
    losses, hits = [], []
    for logs, targets, taken in _float_outputs(job, layout, rows):
        known = {int(target): at for at, target in enumerate(targets)}
        ids = [known.get(int(token), -1) for token in taken]
        losses += [-float(logs[at, i]) for at, i in enumerate(ids) if i >= 0]
        hits += [int(logs[at].argmax()) == i for at, i in enumerate(ids)]
    quality = report.quality
    assert quality.tokens == len(hits) == 2 * len(rows) * (rows.shape[1] - 2)
    assert quality.perplexity_float == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)
    assert quality.accuracy_float == pytest.approx(np.mean(hits), abs=0.011)  # near-ties
    assert 0 < quality.kl_divergence < 0.1
    assert quality.perplexity_quantized != quality.perplexity_float
    assert report.subject == "draft"


@pytest.mark.each_change("eagle3")
@pytest.mark.parametrize("name", ["eagle3", "eagle1"])
def test_acceptance_with_both_bases_equals_separate_runs(make, tmp_path, name):
    """Acceptance with both bases equals that of a draft's run with each."""
    own = make(name)
    if not own.output_dir.exists():
        run_job(own, _quiet)
    accuracy = json.loads((own.output_dir / "edgellm_quant.json").read_text())["quality"]
    models = {"model_dir": own.base_model_dir, "draft_model_dir": own.model_dir}
    models["base_model_dir"] = None
    changes = {"quantization": "int4_awq", "output_dir": tmp_path / "base", "num_samples": 2}
    job = replace(own, **models, **changes)
    found = run_job(job, _quiet).quality.drafted
    assert found.by_floats == pytest.approx(accuracy["accuracy_float"])
    floats = _in_floats(job.output_dir, tmp_path / "floats")
    again = replace(job, model_dir=str(floats), output_dir=tmp_path / "again", quantization="fp8")
    assert found.by_quantized == pytest.approx(run_job(again, _quiet).quality.drafted.by_floats)
    with pytest.raises(EdgeLLMError, match="rotates the draft's input"):
        run_job(replace(job, rotate="residual", output_dir=tmp_path / "turned"), _quiet)
    assert not (tmp_path / "turned.quantizing").exists()


def _in_floats(source: Path, output: Path) -> Path:
    """Write a dequantized base."""
    shutil.copytree(source, output, ignore=shutil.ignore_patterns("*quant*"))
    tensors = load(source)
    for name in [name.removesuffix("_scale") for name in tensors if name.endswith("weight_scale")]:
        layer = name.removesuffix(".weight")
        smooth = tensors.get(f"{layer}.pre_quant_scale", np.ones(1)).astype(np.float32)
        tensors[name] = decode(tensors, layer) * smooth
    kept = {name: value for name, value in tensors.items() if not name.endswith("scale")}
    save_file(kept, output / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (output / "config.json").write_text(json.dumps(config))
    return output


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_are_near_the_source(make, scheme):
    job = make("eagle3", scheme)
    report = run_job(job, _quiet)
    found, source = load(job.output_dir), load(Path(job.model_dir))
    worst = {"fp8": 0.03, "int8_sq": 0.02, "int4_awq": 0.14, "nvfp4": 0.11, "nvfp4_awq": 0.12}
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"):
        prefix = f"midlayer.{name}"
        weight = decode(found, prefix)
        if f"{prefix}.pre_quant_scale" in found:
            weight = weight * found[f"{prefix}.pre_quant_scale"].astype(np.float32)
        wanted = source[f"{prefix}.weight"].astype(np.float32)
        if scheme in ("nvfp4_awq", "int8_sq") and f"{prefix}.pre_quant_scale" not in found:
            continue  # smoothing changes two matrices
        if scheme == "int8_sq" and name == "self_attn.v_proj":  # includes o_proj's smoothing
            weight *= (np.sum(wanted**2, 1) / np.sum(weight * wanted, 1))[:, None]
        assert np.linalg.norm(weight - wanted) < worst[scheme] * np.linalg.norm(wanted)
    for name in ("fc.weight", "lm_head.weight", "norm.weight", "d2t", "midlayer.hidden_norm.weight",
                 "midlayer.input_layernorm.weight"):  # fmt: skip
        np.testing.assert_array_equal(found[name], source[name])
    assert report.quantized_modules == 7
    described = json.loads((job.output_dir / "hf_quant_config.json").read_text())["quantization"]
    assert described["exclude_modules"] == ["embed_tokens", "fc", "lm_head"]


@pytest.mark.each_change("eagle3-None", "eagle1-int8", "speculators-int4", "everything-int8")
@pytest.mark.parametrize("head", [None, "int8", "int4"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_bundle_computes_with_the_quantized_weights(make, name, head, tmp_path):
    job = make(name, "int4_awq", tmp_path / "draft", lm_head_quantization=head)
    run_job(job, _quiet)
    checkpoints = (open_checkpoint(str(job.output_dir), tokenizer=False),
                   open_checkpoint(job.base_model_dir, tokenizer=False))  # fmt: skip
    manifest = export_draft(*checkpoints, tmp_path / "bundle", DraftOptions("fp32"))
    mixed = "MIXED_PRECISION" if head == "int8" else "W4A16_AWQ"
    assert manifest.quantization == mixed
    reference = _reference(job, LAYOUTS[name])
    reference.tensors |= _decoded(load(job.output_dir))
    reference.head = reference.tensors.get("lm_head.weight", reference.head)
    drive(DraftRun(tmp_path / "bundle", manifest), reference)


def test_a_low_rank_head_stays_float(make, tmp_path):
    """Its head, whose rows it looks up, as well."""
    job = make("low_rank", "int4_awq", tmp_path / "draft")
    run_job(job, _quiet)
    found, source = load(job.output_dir), load(Path(job.model_dir))
    own = ["lm_head", "efficient_lm_head", "efficient_lm_head_down_proj"]
    for name in own:
        np.testing.assert_array_equal(found[f"{name}.weight"], source[f"{name}.weight"])
    described = json.loads((job.output_dir / "hf_quant_config.json").read_text())["quantization"]
    assert described["exclude_modules"] == ["embed_tokens", "fc", *own]
    refused = replace(job, lm_head_quantization="int8", output_dir=tmp_path / "refused")
    with pytest.raises(EdgeLLMError, match="looks up rows of the float head"):
        run_job(refused, _quiet)
    assert not refused.output_dir.exists()


def _decoded(tensors: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Dequantize weights, with smoothing folded into them."""
    found = {}
    for name, value in tensors.items():
        layer = name.removesuffix(".weight")
        if f"{layer}.weight_scale" in tensors:
            smooth = tensors.get(f"{layer}.pre_quant_scale", np.ones(1)).astype(np.float32)
            found[name] = torch.from_numpy(decode(tensors, layer) * smooth)
        elif name.endswith(("norm.weight", "proj.bias")):
            found[name] = torch.from_numpy(value.astype(np.float32))
    return found


def test_interrupts_do_not_change_the_result(make, tmp_path, monkeypatch):
    """Interrupt when the first, second, ... file is finished, and resume."""
    whole = make("everything", "int8_sq", tmp_path / "whole", lm_head_quantization="fp8")
    run_job(whole, _quiet)
    cut = replace(whole, output_dir=tmp_path / "cut")
    move, attempts, calls = Path.replace, 0, 0

    def stop(path, target):
        nonlocal calls
        calls += cut.work_dir in path.parents
        if calls == attempts:
            raise KeyboardInterrupt
        return move(path, target)

    while not cut.output_dir.exists():
        attempts, calls = attempts + 1, 0
        assert attempts < 30
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(Path, "replace", stop)
            run_job(cut, _quiet)
    assert attempts > 6
    for file in ("model.safetensors", "config.json", "hf_quant_config.json"):
        assert (cut.output_dir / file).read_bytes() == (whole.output_dir / file).read_bytes()


def test_recipes_are_chosen_by_acceptance(make, tmp_path, monkeypatch):
    """The smallest within the allowed drop, or the one with the smallest drop."""
    monkeypatch.setattr(draft_recipes, "_RECIPES", draft_recipes._RECIPES[::3])
    job = make("eagle3", "auto", tmp_path / "small", num_samples=4)
    report = search_precisions(job, 100.0, _quiet)
    assert list(report.tried or ()) == ["int4, head int4"]
    assert "W4A16_AWQ" in (job.output_dir / "hf_quant_config.json").read_text()
    best = search_precisions(replace(job, output_dir=tmp_path / "best"), -100.0, _quiet)
    tried = best.tried or {}
    assert list(tried) == ["int4, head int4", "int8, head int8"]
    assert best.quality.accuracy_quantized == max(one.accuracy for one in tried.values())
    assert tried["int4, head int4"].num_bytes == min(one.num_bytes for one in tried.values())
    assert any("first candidates that the base accepts, by candidate" in one for one in notes(best))


def test_invalid_drafts_are_rejected(make, place, tmp_path):
    job = make("eagle3", output=tmp_path / "out")
    quantized = make("eagle3", "int8_sq")
    run_job(quantized, _quiet)
    for change, error, words in (
        ({"model_dir": job.base_model_dir}, EdgeLLMError, "is not a draft"),
        (
            {"model_dir": str(make_heads(place / "heads"))},
            UnsupportedModelError,
            "is a medusa draft, for which calibration is unsupported",
        ),
        ({"base_model_dir": job.model_dir}, EdgeLLMError, "is a draft, not a base"),
        ({"model_dir": str(quantized.output_dir)}, UnsupportedModelError, "quantized already"),
        ({"base_model_dir": str(place / "small")}, UnsupportedModelError, "too small|taps|layers"),
    ):
        make_checkpoint(place / "small", **{**models.find("llama").TINY, **SIZES,
                                            "num_hidden_layers": 3})  # fmt: skip
        with pytest.raises(error, match=words):
            run_job(replace(job, **change), _quiet)
        assert list(tmp_path.iterdir()) == []


def test_the_command_prints_a_summary(command_here, make, tmp_path):
    job = make("eagle3")
    result = command_here(
        "edgellm-quantize", "draft", "--draft_model_dir", job.model_dir, "--base_model_dir",
        job.base_model_dir, "--output_dir", tmp_path / "out", "--num_samples", 6, "--seq_len", 32,
        "--calib_dataset", job.calib_dataset, "--quantization", "auto", "--max_loss", 100,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "first candidates that the base accepts" in result.stdout
    assert "8 layers at " in result.stdout
    assert "int4, head int4: base layer 7 (8/11)" in result.stderr
    assert "int4, head int4: layer 0 (10/11)" in result.stderr
    page = (tmp_path / "out" / "edgellm_quant.html").read_text()
    assert "draft: int4" in page
