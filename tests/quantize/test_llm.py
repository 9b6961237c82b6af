"""`edgellm-quantize llm`: schemes and families up to the exported bundle."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from quantize_cases import decode, load, make_job, make_model, plain_sessions, write_text

from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.export.checkpoints import quantized
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.verify import run_portable
from edgellm.quantize.formats.quantized_linear import decode_linear
from edgellm.quantize.formats.schemes import HEAD_SCHEMES, SCHEMES
from edgellm.quantize.formats.tensors import read_below
from edgellm.quantize.job import Job
from edgellm.quantize.pipeline import checkpoint_writer as folder_module
from edgellm.quantize.pipeline.planning import make_plan
from edgellm.quantize.pipeline.run import run_job

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("llama", "qwen2", "qwen3")
# Relative errors of a weight rounded to nearest; normal values, blocks of 16 and 32
WORST = {"fp8": 0.03, "int8_sq": 0.02, "int4_awq": 0.14, "nvfp4": 0.11, "nvfp4_awq": 0.12}
# ONNX Runtime has no FP4 on the CPU.
RUNS_ON_ORT = ("fp8", "int8_sq", "int4_awq", "int8", "int4", "int8_tied")
FOLDED = {"self_attn.q_proj": "input_layernorm", "mlp.up_proj": "post_attention_layernorm"}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("quantize")


@pytest.fixture(scope="module")
def text(place) -> Path:
    return write_text(place / "text.jsonl")


@pytest.fixture(scope="module")
def run(place, text):
    """Quantize once for several tests."""
    reports = {}

    def get(kind: str, scheme: str, **changes: object):
        model = place / kind
        if not model.exists():
            make_model(model, kind)
        name = "-".join([kind, scheme, *map(str, changes.values())])
        job = make_job(model, text, place / name, scheme, **changes)
        if name not in reports:
            reports[name] = run_job(job, lambda *_: None)
        return job, reports[name]

    return get


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", FAMILIES)
def test_weights_are_near_the_source(run, kind, scheme):
    job, report = run(kind, scheme)
    found, source = load(job.output_dir), load(Path(job.model_dir))
    for name, norm in FOLDED.items():
        prefix = f"model.layers.1.{name}"
        weight = decode(found, prefix)
        if f"{prefix}.pre_quant_scale" in found:
            weight = weight * found[f"{prefix}.pre_quant_scale"].astype(np.float32)
        norms = [t[f"model.layers.1.{norm}.weight"].astype(np.float32) for t in (found, source)]
        weight = weight * norms[0] / norms[1]
        wanted = source[f"{prefix}.weight"].astype(np.float32)
        if (
            scheme in ("nvfp4_awq", "int8_sq") and name == "mlp.up_proj"
        ):  # and down_proj's smoothing
            weight *= (np.sum(wanted**2, 1) / np.sum(weight * wanted, 1))[:, None]
        assert np.linalg.norm(weight - wanted) < WORST[scheme] * np.linalg.norm(wanted)
    assert (
        max(error for layer in report.layers for error in layer.weight_errors.values())
        < (WORST[scheme])
    )
    embedding = "model.embed_tokens.weight"
    assert found[embedding].tobytes() == source[embedding].tobytes()


@pytest.fixture
def perplexity(tmp_path, monkeypatch):
    """Return the perplexity of the exported bundle, with ONNX Runtime."""
    plain_sessions(monkeypatch)
    return lambda job: _portable_perplexity(job, tmp_path / "bundle")


@pytest.mark.parametrize("scheme", RUNS_ON_ORT[:3])
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_bundles_perplexity_is_the_reports(run, kind, scheme, perplexity):
    """ONNX Runtime on the exported graph, against the report's torch implementation."""
    job, report = run(kind, scheme)
    found = perplexity(job)
    assert found == pytest.approx(report.quality.perplexity_quantized, rel=0.03)
    assert report.quality.perplexity_quantized != report.quality.perplexity_float
    assert 0 < report.quality.kl_divergence < 2


def test_float_layers_are_unchanged(run, perplexity):
    job, report = run("llama", "int8_sq", keep_layers=(1,))
    found, source = load(job.output_dir), load(Path(job.model_dir))
    names = [name for name in source if name.startswith("model.layers.1.")]
    assert names
    assert all(found[name].tobytes() == source[name].tobytes() for name in names)
    assert found["model.layers.0.mlp.up_proj.weight"].dtype == np.int8
    described = json.loads((job.output_dir / "hf_quant_config.json").read_text())["quantization"]
    assert "model.layers.1.mlp.down_proj" in described["exclude_modules"]
    assert report.quantized_modules == 14
    assert report.layers[1].output_error == 0
    assert report.layers[1].stream_error > 0
    assert ">float<" in (job.output_dir / "edgellm_quant.html").read_text()
    assert perplexity(job) == pytest.approx(report.quality.perplexity_quantized, rel=0.03)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"keep_layers": (0, 3)}, "--keep_layers 0,3: the model has layers 0 to 2"),
        ({"keep_layers": (0, 1, 2)}, "leaves no layer to quantize"),
        ({"keep_layers": (0,), "kv_cache_quantization": "fp8"}, "KV cache scales are calibrated"),
    ],
)
def test_invalid_float_layers_are_rejected(run, place, text, changes, words):
    run("llama", "fp8")
    job = make_job(place / "llama", text, place / "refused", "fp8", **changes)
    with pytest.raises(EdgeLLMError, match=words):
        run_job(job, lambda *_: None)
    assert not job.output_dir.exists()


def test_the_report_names_outlier_layers(run):
    _, report = run("llama", "fp8")
    layers = [
        dataclasses.replace(report.layers[0], index=index, output_error=0.3 if index == 4 else 0.1)
        for index in range(6)
    ]
    assert dataclasses.replace(report, layers=tuple(layers)).outliers == [4]
    assert dataclasses.replace(report, layers=tuple(layers[:4])).outliers == []


@pytest.mark.each_change("int4_awq-int8", "fp8-int4")
@pytest.mark.parametrize("head", HEAD_SCHEMES)
@pytest.mark.parametrize("scheme", ["fp8", "int4_awq"])
def test_a_quantized_head_is_untied(run, scheme, head, perplexity):
    """The head of a tied model becomes a separate tensor."""
    job, report = run("llama", scheme, lm_head_quantization=head)
    if head in RUNS_ON_ORT:
        assert perplexity(job) == pytest.approx(report.quality.perplexity_quantized, rel=0.03)
    described = json.loads((job.output_dir / "hf_quant_config.json").read_text())["quantization"]
    same = HEAD_SCHEMES[head] is SCHEMES[scheme]
    expected = SCHEMES[scheme].algorithm if same else "MIXED_PRECISION"
    assert described["quant_algo"] == expected
    assert "lm_head" not in described.get("exclude_modules", [])
    assert report.quantized_modules == 22
    without = report.quality.kl_float_head
    assert without is not None
    assert without != report.quality.kl_divergence


@pytest.mark.parametrize("changes", [{"tie_word_embeddings": False}, {"hidden_size": 48}])
def test_int8_tied_needs_a_tied_head_and_whole_groups(tmp_path, text, changes):
    model = make_model(tmp_path / "model", "llama", **changes)
    job = make_job(model, text, tmp_path / "out", "fp8", lm_head_quantization="int8_tied")
    with pytest.raises(EdgeLLMError, match="--lm_head_quantization int8_tied"):
        run_job(job, lambda *_: None)
    assert sorted(tmp_path.iterdir()) == [model]


def _portable_perplexity(job: Job, bundle: Path) -> float:
    export_llm(open_checkpoint(str(job.output_dir)), bundle, ExportOptions(dtype="fp32"))
    manifest = load_bundle(bundle, LLM_BUNDLE)
    losses = []
    for row in make_plan(job).task.calibration.held_out:
        logits = run_portable(bundle, manifest, row, len(row) - 2).astype(np.float64)
        logs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1))[:, None]
        logs -= logits.max(-1, keepdims=True)
        losses += [-logs[at, token] for at, token in enumerate(row[1:])]
    return math.exp(np.mean(losses))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_graph_dequantizes_bit_for_bit_as_the_reader(run, scheme):
    job, _ = run("llama", scheme)
    checkpoint = open_checkpoint(str(job.output_dir))
    tensors = read_below(checkpoint.tensors, "")
    for name, shape in (("self_attn.o_proj", (96, 96)), ("mlp.down_proj", (96, 96))):
        prefix = f"model.layers.2.{name}"
        ours = decode_linear(tensors, prefix, shape, SCHEMES[scheme].rounds_input)
        weights = Weights(
            source=checkpoint.tensors, quantization=checkpoint.quant_config, prefix=f"{prefix}."
        )
        operand = quantized.find(weights, shape, ir.DataType.FLOAT)
        assert operand is not None
        np.testing.assert_array_equal(_operand(operand), ours.weight)
        assert (operand.input is not None) == bool(ours.input_type)
        if operand.input is not None:
            assert np.float32(operand.input.scale) == np.float32(ours.input_scale)


def _operand(linear) -> np.ndarray:
    """Return the dequantized operand of DequantizeLinear as [out, in]."""
    data = [b"".join(map(bytes, part.stream())) for part in (linear.codes, linear.scales)]
    dtype = linear.codes.dtype
    raw = np.frombuffer(data[0], np.uint8)
    if dtype.bitwidth == 4:
        raw = np.stack([raw & 15, raw >> 4], -1).reshape(-1)
        codes = np.where(raw > 7, raw.astype(np.int8) - 16, raw).astype(np.float32)
        if dtype == ir.DataType.FLOAT4E2M1:
            magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
            codes = np.where(raw > 7, -1, 1).astype(np.float32) * magnitudes[raw & 7]
    else:
        codes = np.frombuffer(data[0], dtype.numpy()).astype(np.float32)
    codes = codes.reshape(linear.codes.shape)
    scales = np.frombuffer(data[1], linear.scales.dtype.numpy()).astype(np.float32)
    scales = scales.reshape(linear.scales.shape)
    if linear.global_scale is not None:
        floats = scales * np.float32(linear.global_scale)
        return codes * np.repeat(floats, linear.block_size, axis=1)
    if linear.block_size:
        return (codes * np.repeat(scales, linear.block_size, axis=0)).T
    return (codes * scales).T


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_a_quantized_kv_cache_has_scales_and_exports(run, perplexity, kind, tmp_path):
    job, report = run("qwen3", "fp8", kv_cache_quantization=kind)
    found = load(job.output_dir)
    _, plain = run("qwen3", "fp8")
    assert report.quality.perplexity_quantized != plain.quality.perplexity_quantized
    assert json.loads((job.output_dir / "hf_quant_config.json").read_text())["quantization"][
        "kv_cache_quant_algo"] == kind.upper()  # fmt: skip
    perplexity(job)  # with a float KV cache
    ranges = load_bundle(tmp_path / "bundle", LLM_BUNDLE).decoder.kv.ranges
    assert ranges.calibrated_for == kind
    scale = found["model.layers.1.self_attn.k_proj.k_scale"]
    assert ranges.keys[1] == pytest.approx({"fp8": 448, "int8": 127}[kind] * scale)
    # Keys of this family are normed, so all ranges are close.
    assert 0.5 < ranges.keys[0] / ranges.keys[1] < 2


def test_fp8_and_int8_kv_cache_ranges_agree(run):
    """ModelOpt's and edgellm's calibration over the same text."""
    scales = [load(run("qwen3", "fp8", kv_cache_quantization=kind)[0].output_dir)
              for kind in ("fp8", "int8")]  # fmt: skip
    for name in ("k_proj.k_scale", "v_proj.v_scale"):
        theirs, ours = (found[f"model.layers.2.self_attn.{name}"] for found in scales)
        assert 448 * theirs == pytest.approx(127 * ours, rel=1e-3)


def test_the_output_folder_has_all_files_and_their_facts(run):
    job, report = run("qwen2", "int4_awq")
    names = {path.name for path in job.output_dir.iterdir()}
    assert names == {
        "model.safetensors", "config.json", "generation_config.json", "hf_quant_config.json",
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "edgellm_quant.json",
        "edgellm_quant.html", ".made_by.json",
    }  # fmt: skip
    config = json.loads((job.output_dir / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "modelopt"
    assert config["quantization_config"]["quant_algo"] == "W4A16_AWQ"
    described = json.loads((job.output_dir / "hf_quant_config.json").read_text())
    assert described["quantization"]["group_size"] == 32
    side = json.loads((job.output_dir / "edgellm_quant.json").read_text())
    assert side["calibration"]["rows"] == 12
    assert set(side["files"]) == names - {".made_by.json"}
    assert len(side["calibration"]["sha256"]) == 64
    assert 4 < side["bits_per_weight"] < 6
    assert side["bytes_after"] < side["bytes_before"]
    page = (job.output_dir / "edgellm_quant.html").read_text()
    assert page.count("<rect") == 3
    assert "@" not in page.replace("@media", "")
    assert "<script" not in page
    assert not job.work_dir.exists()
    assert len(report.worst_layers) == 3
    run_job(job, lambda *_: None)  # replaces its own folder
    assert {path.name for path in job.output_dir.iterdir()} == names


def test_shards_have_an_index(run, place, text, monkeypatch, tmp_path):
    job, _ = run("llama", "fp8")
    monkeypatch.setattr(folder_module, "_SHARD_BYTES", 60_000)
    sharded = make_job(place / "llama", text, tmp_path / "out", "fp8")
    run_job(sharded, lambda *_: None)
    index = json.loads((sharded.output_dir / "model.safetensors.index.json").read_text())
    whole = open_checkpoint(str(job.output_dir)).tensors
    parts = open_checkpoint(str(sharded.output_dir)).tensors
    assert len(set(index["weight_map"].values())) > 2
    assert parts.infos() == whole.infos()
    for name in whole.infos():
        assert b"".join(map(bytes, parts.stream(name))) == b"".join(map(bytes, whole.stream(name)))
