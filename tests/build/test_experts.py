"""Engines of mixtures of experts on the CPU, and backends without experts."""

from __future__ import annotations

import dataclasses

import cuda_on_cpu
import numpy as np
import onnx
import pytest
from conftest import make_checkpoint
from cuda_on_cpu import CUDA
from harness.models.checkpoints import round_checkpoint
from model_configs import GEMMA4_EXPERTS
from portable import open_portable

from edgellm.build.engine import build_engine
from edgellm.build.lowering.experts import ExpertLayer, touched
from edgellm.build.onnxruntime_cpu.edgellm_kernels import experts
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.onnxruntime_cuda import experts as cuda_experts
from edgellm.build.onnxruntime_cuda import kernel_choice
from edgellm.build.plan import Plan
from edgellm.build.resource_estimate import predict
from edgellm.core.errors import (
    EdgeLLMError,
    UnsupportedModelError,
)
from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.device_runtime.networks.decoder import open_decoder
from edgellm.device_runtime.runners.onnxruntime_cuda import provider
from edgellm.export import models
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.tools.inspection.sources.detect import inspect

PLAN = Plan(
    max_input_len=48,
    kv_capacity=64,
    threads=1,
    max_verify_tree_size=12,
    options=CpuOptions("edgellm"),
)
IDS = np.random.default_rng(5).integers(9, 96, 40)
TINY = {**models.find("qwen3_moe").TINY, "num_experts": 9, "mlp_only_layers": [1]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("experts") / "checkpoint", **TINY)


def export(checkpoint):
    """A float32 bundle next to the checkpoint."""
    folder = checkpoint.parent / "bundle"
    export_llm(open_checkpoint(str(checkpoint)), folder, ExportOptions(dtype="fp32"))
    return folder


@pytest.fixture(scope="module")
def bundle(checkpoint):
    return export(checkpoint)


@pytest.fixture(scope="module")
def gemma_bundle(tmp_path_factory):
    """Experts with GELU and a router with a norm of its own."""
    checkpoint = tmp_path_factory.mktemp("gemma") / "checkpoint"
    return export(make_checkpoint(checkpoint, **{**GEMMA4_EXPERTS, "num_experts": 9}))


def build(bundle, engine, backend="onnxruntime", **changes):
    plan = dataclasses.replace(PLAN, **changes)
    return build_engine("llm", bundle, engine, plan, backend, lambda _: None)


def logits(session, sizes) -> np.ndarray:
    found, begin = [], 0
    for size in sizes:
        rows = IDS[begin : begin + size]
        found.append(session.run(rows, begin, np.arange(len(rows))).logits.copy())
        begin += size
    return np.concatenate(found)


@pytest.mark.each_change("bundle-2-*", "gemma_bundle-6-int4")
@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
@pytest.mark.parametrize(("name", "layers"), [("bundle", 2), ("gemma_bundle", 6)])
def test_experts_are_batch_invariant(name, layers, quantize, request, tmp_path):
    """The build compares the engine with the portable graph."""
    bundle = request.getfixturevalue(name)
    manifest = build(bundle, tmp_path / "engine", quantize=quantize)
    assert manifest.main_graphs[0].precision == {"none": "fp32"}.get(quantize, quantize)
    assert f"{9 * layers} experts, each alone, relative error" in manifest.options["checks"][0]
    session = open_decoder(tmp_path / "engine", manifest)
    whole = logits(session, [len(IDS)])
    if quantize != "none":  # layers of 32 bits are products of ONNX Runtime's
        for sizes in ([1] * len(IDS), [7, 1, 13, 1, 1, 17]):
            assert logits(session, sizes).tobytes() == whole.tobytes()
    nodes = onnx.load(tmp_path / "engine" / "decode.onnx", load_external_data=False).graph.node
    assert [node.op_type for node in nodes].count("Experts") == layers


@pytest.mark.parametrize(("quantize", "is_half"), [("none", True), ("int8", True), ("none", False)])
def test_experts_in_float16_int8_and_stored_int4_equal_the_portable_graph(
    quantize, is_half, checkpoint, tmp_path
):
    """Weights of 16 bits as they are and rounded, INT4 of a checkpoint."""
    source = checkpoint
    if not is_half:
        round_checkpoint(str(checkpoint), tmp_path / "rounded", 16)
        source = tmp_path / "rounded"
    dtype = "fp16" if is_half else "fp32"
    export_llm(open_checkpoint(str(source)), tmp_path / "bundle", ExportOptions(dtype=dtype))
    manifest = build(tmp_path / "bundle", tmp_path / "engine", quantize=quantize)
    expected = ("int8" if quantize == "int8" else "fp16") if is_half else "int4"
    assert manifest.main_graphs[0].precision == expected


def test_a_prediction_counts_the_experts_that_a_token_takes(bundle):
    manifest = load_bundle(bundle, LLM_BUNDLE)
    estimate = predict(bundle, manifest, PLAN, "onnxruntime", bundle).estimate
    one_expert = 3 * TINY["hidden_size"] * TINY["moe_intermediate_size"] * 4
    rest = estimate.engine_bytes - 2 * 9 * one_expert
    assert estimate.decode_bytes < rest + 2 * 2 * one_expert
    assert estimate.decode_bytes > 2 * 2 * one_expert
    for path in (bundle.parent / "checkpoint", bundle):
        report = inspect(path)
        halves = 2 if path == bundle.parent / "checkpoint" else 1  # as fp16 will hold them
        assert 2 * 2 * one_expert < halves * report.read_bytes < rest + 2 * 2 * one_expert
        assert int(report.facts["parameters"].replace(",", "")) > 2 * 9 * one_expert / 4
    assert touched(9, 2, 1) == pytest.approx(2)
    assert touched(128, 8, 16) == pytest.approx(128 * (1 - (120 / 128) ** 16))


def test_backends_without_experts_reject_them(bundle, tmp_path):
    with pytest.raises(UnsupportedModelError, match="--kernels onnxruntime does not compute mix"):
        build(bundle, tmp_path / "engine", options=CpuOptions("onnxruntime"))
    assert not (tmp_path / "engine").exists()


FOR_CUDA = {"options": Plan().options, "prefill": "auto"}


def test_cuda_needs_a_version_with_operators_for_experts(bundle, tmp_path, monkeypatch):
    """Older kernels would compute another gate without a word."""
    manifest = build(bundle, tmp_path / "engine", CUDA, **FOR_CUDA)
    assert manifest.options["minimum_onnxruntime"] == "1.28"
    cuda_on_cpu.open_base(tmp_path / "engine")
    monkeypatch.setattr(provider.ort, "__version__", "1.27.1")
    with pytest.raises(EdgeLLMError, match=r"1\.27\.1 does not compute all that this engine has"):
        cuda_on_cpu.open_base(tmp_path / "engine")


def test_cuda_keeps_experts_as_floats(checkpoint, tmp_path):
    """In halves every node has a kernel; their bytes are counted, those of a token apart."""
    round_checkpoint(str(checkpoint), tmp_path / "int4", 16)
    for source, dtype in ((checkpoint, "fp16"), (tmp_path / "int4", "fp32")):
        folder = tmp_path / dtype
        export_llm(open_checkpoint(str(source)), folder, ExportOptions(dtype=dtype))
        plan = dataclasses.replace(PLAN, **FOR_CUDA)
        estimate = predict(folder, load_bundle(folder, LLM_BUNDLE), plan, CUDA, tmp_path).estimate
        build(folder, tmp_path / f"{dtype}.engine", CUDA, **FOR_CUDA)
        stored = (tmp_path / f"{dtype}.engine" / "llm.data").stat().st_size
        assert estimate.engine_bytes == pytest.approx(stored, rel=0.05)
        assert estimate.decode_bytes < 0.7 * estimate.engine_bytes
    exact = open_portable(tmp_path / "fp32", 64, tmp_path / "fp32" / "model.onnx")  # not fused
    found = logits(cuda_on_cpu.open_base(tmp_path / "fp32.engine"), [20, 1, 9])
    np.testing.assert_allclose(found, logits(exact, [20, 1, 9]), atol=2e-4)


def test_integer_experts_on_cuda_equal_float_ones(tmp_path, monkeypatch):
    """QMoE gives what MoE gives of the floats that the codes stand for, in half the graphs."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2}
    checkpoint = make_checkpoint(tmp_path / "checkpoint", **{**TINY, **sizes})
    export_llm(open_checkpoint(str(checkpoint)), tmp_path / "bundle", ExportOptions(dtype="fp16"))
    plan = dataclasses.replace(PLAN, quantize="int4", **FOR_CUDA)
    bundle = load_bundle(tmp_path / "bundle", LLM_BUNDLE)
    estimate = predict(tmp_path / "bundle", bundle, plan, CUDA, tmp_path).estimate
    for bits in (4, 8):
        built = build(
            tmp_path / "bundle", tmp_path / f"{bits}", CUDA, quantize=f"int{bits}", **FOR_CUDA
        )
        assert [graph.path for graph in built.main_graphs] == ["llm.onnx"]
        assert any("operator QMoE" in note for note in built.options["notes"])
    stored = (tmp_path / "4" / "llm.data").stat().st_size
    assert estimate.engine_bytes == pytest.approx(stored, rel=0.1)
    found = {
        bits: logits(cuda_on_cpu.open_base(tmp_path / f"{bits}"), [20, 1, 9]) for bits in (4, 8)
    }
    for module in (cuda_experts, kernel_choice):
        monkeypatch.setattr(module, "integer_form", lambda *_: None)
    build(tmp_path / "bundle", tmp_path / "floats", CUDA, quantize="int4", **FOR_CUDA)
    floats = logits(cuda_on_cpu.open_base(tmp_path / "floats"), [20, 1, 9])
    size = np.linalg.norm(floats)
    assert np.linalg.norm(found[4] - floats) < 0.01 * size < np.linalg.norm(found[8] - floats)


@pytest.mark.parametrize("quantize", ["none", "int4"])
def test_a_fault_in_experts_stops_the_build(quantize, bundle, tmp_path, monkeypatch):
    """Also if rounding may route single tokens to other experts."""
    monkeypatch.setattr(experts, "gated_order", lambda width: np.arange(2 * width))
    with pytest.raises(EdgeLLMError, match="computes something else than the portable one"):
        build(bundle, tmp_path / "engine", quantize=quantize)


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_a_fault_in_one_expert_is_found(quantize, bundle, tmp_path, monkeypatch):
    """One of nine has the downs of its neighbour, in one layer."""

    def swapped(layer):
        weights = list(plain(layer))
        if "layers.2" in layer.name:
            weights[5] = weights[4]
        return iter(weights)

    plain = ExpertLayer.downs
    monkeypatch.setattr(ExpertLayer, "downs", swapped)
    with pytest.raises(EdgeLLMError, match=r"expert 5 of model\.layers\.2\.mlp\.experts computes"):
        build(bundle, tmp_path / "engine", quantize=quantize)
    assert not (tmp_path / "engine").exists()
