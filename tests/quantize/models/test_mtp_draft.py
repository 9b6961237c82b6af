"""`edgellm-quantize draft` of MTP layers: calibration, export and decoding."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from draft_runs import DraftRun, drive
from eagle_engines import draft_plan
from mtp_reference import ErnieReference, Reference, make_base, make_ernie
from quantize_cases import SIZES, decode, load, write_text
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from edgellm.build.engine import build_engine
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime import LLM, SamplingParams, SpecOptions
from edgellm.export import models
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.open_checkpoint import open_checkpoint, open_draft
from edgellm.quantize.job import Job
from edgellm.quantize.pipeline.planning import make_plan
from edgellm.quantize.pipeline.run import run_job

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.jsonl")


def _job(base: Path, text: Path, output: Path, scheme: str, **changes: object) -> Job:
    options = {"num_samples": 4, "seq_len": 24, "held_out": 2, "device": "cpu", **changes}
    return Job(
        model_dir=str(base),
        output_dir=output,
        quantization=scheme,
        base_model_dir=str(base),
        calib_dataset=str(text),
        **options,
    )


def _floats(base: Path, kind: type[Reference], rows: np.ndarray):
    """Return log-probabilities of both steps and the base's tokens, by a reference."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for row in torch.from_numpy(rows):
        with torch.no_grad():
            output = model(row[None], output_hidden_states=True)
        count, greedy = len(row) - 2, output.logits[0].argmax(-1)
        hidden = output.hidden_states[-1][0][:count]  # after the final norm
        mask = torch.ones(count, count, dtype=torch.bool).tril()
        for step in (1, 2):
            logs, hidden = kind(base).forward(
                row[step : step + count], hidden, torch.arange(count), mask
            )
            yield logs, greedy[step : step + count]


@pytest.mark.each_change("ernie4_5_moe-*")
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("qwen3_5_moe_text", {"algo": "gptq"}),
        ("ernie4_5_moe", {"block_size": 32}),
    ],
)
def test_the_layer_is_measured_and_exported(name, more, text, tmp_path):
    """Against the reference, with float and with dequantized weights."""
    sizes = {key: size for key, size in SIZES.items() if key in models.find(name).TINY}
    is_ernie = name == "ernie4_5_moe"
    make, kind = (make_ernie, ErnieReference) if is_ernie else (make_base, Reference)
    base = make(tmp_path / "base", **({} if is_ernie else {"model_type": name}), **sizes)
    job = _job(base, text, tmp_path / "out", "int4_awq", **more)
    quality = run_job(job, lambda *_: None).quality
    losses, hits = [], []
    for logs, taken in _floats(base, kind, make_plan(job).task.calibration.held_out):
        losses += (-logs.gather(1, taken[:, None])).flatten().tolist()
        hits += (logs.argmax(-1) == taken).tolist()
    assert quality.tokens == len(hits) == 2 * 2 * 22
    assert quality.perplexity_float == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)
    assert quality.accuracy_float == pytest.approx(np.mean(hits), abs=0.012)  # near-ties
    assert 0 < quality.kl_divergence < 0.3
    found, source = load(job.output_dir), load(base)
    assert all("mtp" in key for key in found)
    for key in (each for each in found if "layer" not in each and "mtp_block" not in each):
        np.testing.assert_array_equal(found[key], source[key])
    manifest = _exported(job, tmp_path / "bundle")
    assert manifest.quantization == "W4A16_AWQ"
    reference = kind(base)
    reference.tensors |= _decoded(found)
    drive(DraftRun(tmp_path / "bundle", manifest), reference)


def _exported(job: Job, bundle: Path):
    base = open_checkpoint(str(job.base_model_dir), tokenizer=False)
    return export_draft(open_draft(str(job.output_dir)), base, bundle, DraftOptions("fp32"))


def _decoded(tensors: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Dequantize layers, with smoothing folded into the weights."""
    found = {}
    for name, value in tensors.items():
        layer = name.removesuffix(".weight")
        if f"{layer}.weight_scale" in tensors:
            smooth = tensors.get(f"{layer}.pre_quant_scale", np.ones(1)).astype(np.float32)
            found[name] = torch.from_numpy(decode(tensors, layer) * smooth)
        elif "layernorm" in name:
            found[name] = torch.from_numpy(value.astype(np.float32))
    return found


@pytest.mark.each_change("mtp")
@pytest.mark.parametrize("name", ["mtp", "ernie"])
def test_speculation_with_the_quantized_layer_is_lossless(eagle_pairs, text, tmp_path, name):
    pair = eagle_pairs(name)
    job = _job(pair.base_checkpoint, text, tmp_path / "out", "int8_sq")
    run_job(job, lambda *_: None)
    _exported(job, tmp_path / "bundle")
    engine = tmp_path / "engine"
    shutil.copytree(pair.engine, engine, ignore=shutil.ignore_patterns("draft"))
    build_engine("draft", tmp_path / "bundle", engine, draft_plan(), "onnxruntime", lambda _: None)
    llm = LLM(engine, spec=SpecOptions(tree="fixed", top_k=3, verify_size=12))
    plain, found = (
        llm.generate("w20 w21", sampling=GREEDY, max_generate_length=30, speculative=drafts)
        for drafts in (False, True)
    )
    list(plain), list(found)
    assert found.token_ids == plain.token_ids
    assert max(counts.tree_size for counts in found.profile.rounds) > 2
    with pytest.raises(EdgeLLMError, match="its MTP layer uses the base's head"):
        run_job(
            _job(pair.base_checkpoint, text, tmp_path / "o", "fp8", lm_head_quantization="int8"),
            lambda *_: None,
        )


def test_an_mtp_layer_of_a_vlm_quantizes_as_that_of_a_text_model(text, tmp_path):
    plain, whole = make_base(tmp_path / "plain"), tmp_path / "whole"
    shutil.copytree(plain, whole)
    tensors = load_file(plain / "model.safetensors")
    save_file(
        {name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()},
        whole / "model.safetensors",
    )
    config = json.loads((plain / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": config}))
    for base in (plain, whole):
        job = _job(base, text, tmp_path / f"{base.name}_out", "int8_sq", num_samples=2, held_out=1)
        run_job(job, lambda *_: None)
        _exported(job, tmp_path / f"{base.name}_bundle")
    own, same = (load(tmp_path / f"{name}_out") for name in ("plain", "whole"))
    for name, value in own.items():
        np.testing.assert_array_equal(value, same[name])
