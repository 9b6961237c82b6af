"""Engines of a GGUF file with all formats, against its dequantized floats."""

from __future__ import annotations

import dataclasses

import cuda_on_cpu
import numpy as np
import onnx_ir as ir
import pytest
from mixed_gguf import KINDS, write_mixed
from portable import open_portable
from typer.testing import CliRunner

from edgellm.build.engine import build_engine
from edgellm.build.lowering.linears.weights import layer_name, linear_layers
from edgellm.build.lowering.weights import WeightFile
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.plan import Plan
from edgellm.build.tensorrt.lowering.downgrade_ops import adapt
from edgellm.build.tensorrt.lowering.int4_blocks import notes_of_blocks
from edgellm.build.tensorrt.lowering.lower import lower
from edgellm.device_runtime.networks.decoder import open_decoder
from edgellm.export.cli import app
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")
PLAN = Plan(max_input_len=48, kv_capacity=64, threads=1, prefill="same", quantize="auto")
IDS = np.random.default_rng(5).integers(9, 96, 40)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    return write_mixed(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="module")
def bundles(gguf_file):
    """Blocks with activations of 16 and 32 bits, and floats."""
    folder, checkpoint = gguf_file.parent, open_checkpoint(str(gguf_file))
    kept = dataclasses.replace(checkpoint, tensors=checkpoint.blocks)
    for name, source, dtype in (
        ("halves", checkpoint, "fp16"),
        ("kept", kept, "fp32"),
        ("floats", checkpoint, "fp32"),
    ):
        export_llm(source, folder / name, ExportOptions(dtype=dtype))
    return {name: folder / name for name in ("halves", "kept", "floats")}


@pytest.fixture(scope="module")
def expected(bundles):
    return logits(open_portable(bundles["floats"], 64))


def logits(session) -> np.ndarray:
    return session.run(IDS, 0, np.arange(len(IDS))).logits.copy()


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def test_the_portable_graph_computes_the_decoded_floats(bundles, expected):
    assert distance(logits(open_portable(bundles["kept"], 64)), expected) < 2e-6


def test_a_bundle_has_the_codes_of_the_file(bundles, gguf_file, expected):
    """fp16 is the default, and keeps blocks; its graph rounds activations only."""
    checkpoint = open_checkpoint(str(gguf_file))
    graph = ir.load(bundles["halves"] / "model.onnx").graph
    kinds = {layer_name(node).split(".")[-1]: weight for node, weight in linear_layers(graph)}
    assert {name: KINDS[name] for name in kinds} == {
        name: kind for name, kind in KINDS.items() if name != "embed_tokens"
    }
    for node, weight in linear_layers(graph):
        name = layer_name(node).split(".", 1 if "lm_head" in layer_name(node) else 2)[-1]
        floats = checkpoint.tensors.stream(f"{name}.weight")
        values = np.concatenate([np.frombuffer(piece, np.float32) for piece in floats])
        np.testing.assert_array_equal(weight.dense().T.reshape(-1), values)
    assert distance(logits(open_portable(bundles["halves"], 64)), expected) < 0.01


@pytest.mark.parametrize("kernels", ["edgellm", "onnxruntime"])
def test_engines_for_the_cpu_equal_the_decoded_floats(bundles, expected, tmp_path, kernels):
    """Inputs are rounded to int8, and the weights of MatMulNBits that have minima."""
    plan = dataclasses.replace(PLAN, options=CpuOptions(kernels))
    engine = tmp_path / "engine"
    built = build_engine("llm", bundles["halves"], engine, plan, "onnxruntime", lambda _: None)
    assert built.graphs["decoder"][0].precision == "int4+int8"
    assert distance(logits(open_decoder(engine, built)), expected) < 0.03
    if kernels == "edgellm":  # no copy is as large as floats
        size = sum(path.stat().st_size for path in engine.glob("*.data"))
        assert size < 0.3 * (bundles["floats"] / "model.weights").stat().st_size


def test_an_engine_for_cuda_equals_the_decoded_floats(bundles, expected, tmp_path):
    cuda_on_cpu.build_base(bundles["kept"], tmp_path / "cuda", PLAN)
    found = logits(cuda_on_cpu.open_base(tmp_path / "cuda"))
    assert distance(found, expected) < 0.02  # weights with minima are rounded to int8


def test_the_graph_for_tensorrt_equals_the_decoded_floats(bundles, expected, tmp_path):
    """Scales of Q4_0 have signs; blocks of 32 and of 16, with and without minima."""
    model, weights = ir.load(bundles["kept"] / "model.onnx"), WeightFile(tmp_path / "weights")
    layers = [weight for _, weight in linear_layers(model.graph)]
    found = {note.split(" ", 1)[1][:20] for note in notes_of_blocks(layers)}
    assert found == {"layers of INT4 take ", "layers are floats: T"}
    lower(model, weights, ir.DataType.FLOAT, 64)
    weights.close()
    adapt(model.clone(), (10, 3))
    ir.save(model, tmp_path / "model.onnx")
    session = open_portable(bundles["kept"], 64, tmp_path / "model.onnx")
    assert distance(logits(session), expected) < 2e-6


def test_the_export_prints_dtype_and_quantization(gguf_file, tmp_path):
    arguments = ["llm", "--model_dir", str(gguf_file), "--output_dir"]
    found = CliRunner().invoke(app, [*arguments, str(tmp_path / "kept")])
    assert "fp16, quantization gguf" in found.output
    found = CliRunner().invoke(app, [*arguments, str(tmp_path / "wide"), "--dtype", "fp32"])
    assert "fp32, quantization none" in found.output
