"""Graphs for ONNX Runtime's CUDA provider: every precision, and no node without a kernel.

Architectures, drafts and encoders against their references: `tests/export`, `tests/build`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import cuda_on_cpu
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from conftest import make_checkpoint
from cuda_on_cpu import attention_alone
from portable import open_portable
from tensorrt_bundles import Bundles

from edgellm.build import onnxruntime_cuda
from edgellm.build.artifact_kinds import read_bundle
from edgellm.build.engine import build_engine
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.rounded_inputs import lower_inputs
from edgellm.build.lowering.linears.weights import Blocks
from edgellm.build.lowering.weights import WeightFile
from edgellm.build.onnxruntime_cpu.linears import RowInt8Kernel
from edgellm.build.onnxruntime_cuda import linears as cuda_linears
from edgellm.build.onnxruntime_cuda.attention import Form
from edgellm.build.onnxruntime_cuda.kernel_table import KERNELS, check_kernels
from edgellm.build.onnxruntime_cuda.lower import GraphTraits, lower_for_cuda
from edgellm.build.onnxruntime_cuda.options import CudaOptions
from edgellm.build.plan import Plan
from edgellm.core.errors import (
    EdgeLLMError,
    UnsupportedModelError,
)
from edgellm.core.manifest import Engine
from edgellm.device_runtime.runners.onnxruntime_cuda.attention_inputs import fill_visible
from edgellm.export import models
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")
PLAN = Plan(max_input_len=48, kv_capacity=64, threads=1, prefill="same", quantize="none")
# How far float32 activations are from the portable graph whose inputs are not rounded: FP8 weights
# become int8, and NVFP4's are compared with the CPU engine, which rounds inputs.
DISTANCES = {"fp16": 1e-5, "int4_awq": 1e-5, "int8_sq": 1e-5, "fp8": 0.08, "nvfp4": 0.1}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory) -> Bundles:
    return Bundles(tmp_path_factory.mktemp("cuda"))


def _logits(session) -> np.ndarray:
    """Of a prompt and of a tree after it."""
    ids, mask = np.random.default_rng(3).integers(9, 96, 29), np.tri(9, dtype=np.bool_)
    mask[5:, 3] = False
    prompt = session.run(ids[:20], 0, np.arange(20)).logits.copy()
    return np.concatenate([prompt, session.run(ids[20:], 20, np.arange(9), tree_mask=mask).logits])


def _operators(path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path, load_external_data=False).graph.node)


def _portable(bundle, folder):
    """The bundle's graph in ONNX Runtime, without the rounding of inputs that CUDA leaves out."""
    model = ir.load(bundle / "model.onnx")
    weights = WeightFile(folder / "unused.data")
    lower_inputs(GraphEditor(model.graph, weights))
    weights.close()
    ir.save(model, folder / "portable.onnx", external_data="portable.data")
    return open_portable(bundle, 64, folder / "portable.onnx")


def _distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.each_change("base-fp16", "base-nvfp4", "base-int8_sq", "eagle_base-int4_awq")
@pytest.mark.parametrize(
    ("kind", "precision"), [*(("base", each) for each in DISTANCES), ("eagle_base", "int4_awq")]
)
def test_lowered_decoders_of_every_precision_equal_the_portable_graph(
    bundles, tmp_path, kind, precision
):
    exact = bundles.make(kind, precision, "fp32")
    cuda_on_cpu.build_base(exact, tmp_path / "cuda", PLAN)
    found = _logits(cuda_on_cpu.open_base(tmp_path / "cuda"))
    if precision == "nvfp4":  # the portable graph does not load
        build_engine("llm", exact, tmp_path / "cpu", PLAN, "onnxruntime", lambda _: None)
        reference = cuda_on_cpu.open_base(tmp_path / "cpu")
    else:
        reference = _portable(exact, tmp_path)
    assert _distance(found, _logits(reference)) < DISTANCES[precision]

    half = bundles.make(kind, precision)
    built = cuda_on_cpu.build_base(half, tmp_path / "half", PLAN)
    assert built.decoder.kv.dtype == "float16"
    products = _operators(tmp_path / "half" / "llm.onnx")
    assert bool(products["MatMulNBits"]) == (precision != "fp16")
    assert any("FP8" in note for note in built.options["notes"]) == (precision == "fp8")
    session = cuda_on_cpu.open_base(tmp_path / "half")
    assert 1e-5 < _distance(_logits(session), found) < 0.03
    taps = session.run(np.arange(9, 20), 0, np.arange(1)).taps
    assert (taps.shape, taps.dtype) == ((11, 288 if kind == "eagle_base" else 0), np.float32)


@pytest.mark.parametrize(("quantize", "bits", "distance"), [("int4", 4, 0.8), ("int8", 8, 0.1)])
def test_weights_that_the_build_rounds_give_the_rounded_logits(
    bundles, tmp_path, quantize, bits, distance
):
    bundle, plan = (
        bundles.make("base", "fp16", "fp32"),
        Plan(max_input_len=48, kv_capacity=64, threads=1, prefill="auto", quantize=quantize),
    )
    built = cuda_on_cpu.build_base(bundle, tmp_path / "engine", plan)
    assert built.main_graphs[0].precision == quantize
    graph = onnx.load(tmp_path / "engine" / "llm.onnx", load_external_data=False).graph
    found = {
        attribute.i
        for node in graph.node
        if node.op_type == "MatMulNBits"
        for attribute in node.attribute
        if attribute.name == "bits"
    }
    assert found == {bits}
    expected = _logits(_portable(bundle, tmp_path))
    assert (
        0.01 < _distance(_logits(cuda_on_cpu.open_base(tmp_path / "engine")), expected) < distance
    )


@pytest.mark.parametrize("precision", ["fp16", "int4_awq"])
def test_drafts_stay_in_the_type_of_their_bundle(bundles, tmp_path, precision):
    """`--quantize auto` rounds drafts to int8 where the CPU has products of int8; CUDA has none."""
    plan = Plan(
        max_input_len=48,
        kv_capacity=64,
        threads=1,
        prefill="auto",
        quantize="auto",
        max_draft_tree_size=12,
    )
    built = cuda_on_cpu.build_its_draft(bundles.make("draft", precision), tmp_path / "e", plan)
    assert isinstance(built, Engine)
    assert built.draft.decoder.kv.dtype == "float16"
    expected = "fp16" if precision == "fp16" else "int4"
    assert built.main_graphs[0].precision == expected


def test_a_head_shares_the_table_of_the_embedding(bundles, tmp_path):
    bundle = bundles.make("base", "fp16")
    cuda_on_cpu.build_base(bundle, tmp_path / "engine", PLAN)
    graph = onnx.load(tmp_path / "engine" / "llm.onnx", load_external_data=False).graph
    tables = [value.name for value in graph.initializer if np.prod(value.dims) == 96 * 96]
    gathered = next(node for node in graph.node if node.op_type == "Gather").input[0]
    readers = [node.op_type for node in graph.node if gathered in node.input]
    assert gathered in tables
    assert readers == ["Gather", "FusedMatMul"]


def test_predicted_sizes_are_near_the_built_ones(bundles):
    for precision in ("fp16", "int4_awq"):
        bundle = bundles.make("base", precision)
        plan = Plan(max_input_len=48, kv_capacity=64, threads=1, prefill="same", quantize="none")
        estimate = onnxruntime_cuda.estimate(bundle, read_bundle("llm", bundle, plan), plan)
        assert not estimate.runs_on_cpu
        assert estimate.kv_bytes == 2 * 64 * 2 * 4 * 2 * 16  # float16, 4 layers, 2 heads of 16
        engine = bundle.parent / f"{bundle.name}-sized"
        built: Engine = cuda_on_cpu.build_base(bundle, engine, PLAN)
        size = built.files["llm.data"].num_bytes
        assert estimate.engine_bytes == pytest.approx(size, rel=0.06)


# --------------------------------------------------------------------- the table of kernels
def _lowered(bundle, folder, kernel) -> ir.Model:
    model, weights = ir.load(bundle / "model.onnx"), WeightFile(folder / "w.data")
    lower_for_cuda(model, kernel, weights, ir.DataType.FLOAT16, GraphTraits(capacity=64))
    weights.close()
    return model


def test_products_of_integers_have_no_kernel(bundles, tmp_path):
    with pytest.raises(UnsupportedModelError, match="has no CUDA kernel") as caught:
        _lowered(bundles.make("base", "fp16"), tmp_path, RowInt8Kernel())
    assert "--device cpu" in caught.value.hint


@pytest.mark.parametrize(
    ("operator", "dtype", "message"),
    [
        ("Softmax", ir.DataType.INT64, "no CUDA kernel for INT64"),
        ("TensorScatter", ir.DataType.FLOAT16, "TensorScatter .* has no CUDA kernel"),
        ("Sub", ir.DataType.INT64, "computes with sizes"),
    ],
)
def test_nodes_that_would_run_on_the_cpu_are_rejected(bundles, tmp_path, operator, dtype, message):
    """An unknown operator, an unknown type, and arithmetic with the shape of something."""
    kernel = cuda_linears.CudaKernel(ir.DataType.FLOAT16)
    model = _lowered(bundles.make("base", "fp16"), tmp_path, kernel)
    check_kernels(model)
    sizes = next(node for node in model.graph if node.op_type == "Shape").outputs[0]
    value = ir.Value(name="extra", type=ir.TensorType(dtype), shape=ir.Shape([1]))
    model.graph.inputs.append(value)
    inputs = [sizes, sizes] if operator == "Sub" else [value]
    model.graph.append(ir.Node("", operator, inputs, name="extra"))
    with pytest.raises(UnsupportedModelError, match=message):
        check_kernels(model)


def test_the_table_has_no_cpu_operators():
    for operator in ("MatMulIntegerToFloat", "DynamicQuantizeMatMul"):
        assert ("com.microsoft", operator) not in KERNELS


# ------------------------------------------------------------------------------- attention
def test_two_graphs_share_one_file_of_weights(bundles, tmp_path):
    built = cuda_on_cpu.build_base(bundles.make("base", "fp16"), tmp_path / "fused", PLAN)
    assert [graph.path for graph in built.main_graphs] == ["llm.onnx", "llm.causal.onnx"]
    assert (built.options["attention"], built.options["minimum_onnxruntime"]) == ("fused", "1.31")
    masked, causal = (
        onnx.load(tmp_path / "fused" / graph.path, load_external_data=False).graph
        for graph in built.main_graphs
    )
    stored = [
        {one.name for one in graph.initializer if one.external_data} for graph in (masked, causal)
    ]
    assert stored[0] == stored[1]
    for graph, has_bias in ((masked, True), (causal, False)):
        layers = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
        assert len(layers) == 4
        assert {bool(dict(enumerate(node.input)).get(10)) for node in layers} == {has_bias}
    plain = dataclasses.replace(PLAN, options=CudaOptions(attention="plain"))
    built = cuda_on_cpu.build_base(bundles.make("base", "fp16"), tmp_path / "plain", plain)
    assert (len(built.main_graphs), built.options["attention"]) == (1, "plain")
    size = sum((tmp_path / "fused" / name).stat().st_size for name in ("llm.data",))
    assert size == (tmp_path / "plain" / "llm.data").stat().st_size


def test_float32_has_no_fused_kernel(bundles, tmp_path):
    bundle = bundles.make("base", "fp16", "fp32")
    built = cuda_on_cpu.build_base(bundle, tmp_path / "auto", PLAN)
    assert any("not fused: that computes float16" in n for n in built.options["notes"])
    plan = dataclasses.replace(PLAN, options=CudaOptions(attention="fused"))
    with pytest.raises(EdgeLLMError, match="activations are float") as caught:
        cuda_on_cpu.build_base(bundle, tmp_path / "fused", plan)
    assert "--attention plain" in caught.value.hint
    assert not (tmp_path / "fused").exists()


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_plain_products_equal_fused_attention(tmp_path, family):
    """In float16: windows and soft-capped scores; sinks, which no kernel supports with a mask."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", **models.find(family).TINY)
    export_llm(open_checkpoint(str(checkpoint)), tmp_path / "bundle", ExportOptions(dtype="fp16"))
    found = []
    for name in ("fused", "plain"):
        plan = dataclasses.replace(PLAN, options=CudaOptions(attention=name))
        cuda_on_cpu.build_base(tmp_path / "bundle", tmp_path / name, plan)
        found.append(_logits(cuda_on_cpu.open_base(tmp_path / name)))
    assert _distance(*found) < 0.01
    masked = _operators(tmp_path / "fused" / "llm.onnx")
    assert bool(masked["GroupQueryAttention"]) == (family == "gemma2")
    assert _operators(tmp_path / "fused" / "llm.causal.onnx")["ScatterND"] == 0


@pytest.mark.parametrize("form", [Form.PLAIN, Form.MASKED])
def test_masked_scores_never_count(form, tmp_path):
    """In float16 a masked score may exceed all others by more than an additive mask.

    Padding that attends to itself only, and rows without visible keys, are not NaN.
    """
    width, heads, size = 64, 2, 16
    q = np.full((1, 4, heads * size), 60, np.float16)
    keys = np.zeros((1, 1, width, size), np.float16)
    keys[0, 0, 1] = 250  # 60 * 250 * 16 / 4 = 60 000, hidden from all but the last
    values = np.arange(width, dtype=np.float16)[:, None].repeat(size, 1)[None, None]
    seen = np.zeros((4, width), np.bool_)
    seen[0, [0, 20]] = seen[1, 21] = seen[3, 1] = True
    rows = np.zeros((1, 4, size), np.float16)
    y = attention_alone(form, tmp_path, q, rows, keys, values, seen, 20)
    assert np.isfinite(y).all()
    expected = [0, 0, None, 1]  # the new rows' own values are zeros
    for row, wanted in enumerate(expected):
        if wanted is not None:
            np.testing.assert_allclose(y[0, row], wanted, atol=0.01)


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_integer_gemms_of_blocks_of_32_change_no_output(tmp_path, quantize):
    """Reported choices of layers match the emitted nodes; outputs are equal."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8}
    config = {**models.find("llama").TINY, **sizes, "num_key_value_heads": 2}
    checkpoint = make_checkpoint(tmp_path / "checkpoint", **config)
    export_llm(open_checkpoint(str(checkpoint)), tmp_path / "bundle", ExportOptions(dtype="fp16"))
    trees = dataclasses.replace(PLAN, quantize=quantize, max_verify_tree_size=40)
    built = cuda_on_cpu.build_base(tmp_path / "bundle", tmp_path / "gemm", trees)
    assert built.options["int_gemm"] == "1"
    assert any("go to tensor cores without being decoded" in n for n in built.options["notes"])
    off = dataclasses.replace(trees, options=CudaOptions(int_gemm="off"))
    assert (
        "int_gemm" not in cuda_on_cpu.build_base(tmp_path / "bundle", tmp_path / "off", off).options
    )
    same, other = (_logits(cuda_on_cpu.open_base(tmp_path / name)) for name in ("gemm", "off"))
    np.testing.assert_array_equal(same, other)
    on = dataclasses.replace(PLAN, options=CudaOptions(int_gemm="on"))
    with pytest.raises(EdgeLLMError, match="--intGemm on: no layer has int4 or int8"):
        cuda_on_cpu.build_base(tmp_path / "bundle", tmp_path / "on", on)


# ------------------------------------------------------------------------------- small parts
@pytest.mark.parametrize(("bits", "has_zeros"), [(4, False), (4, True), (8, False), (8, True)])
def test_blocks_are_split_without_a_change(bits, has_zeros):
    random, outputs, count, size = np.random.default_rng(0), 3, 3, 256
    codes = random.integers(0, 256, (outputs, count, size * bits // 8), np.uint8)
    scales = random.random((outputs, count), np.float32)
    points = random.integers(0, 16 if bits == 4 else 256, (outputs, count)).astype(np.uint8)
    packed = points
    if bits == 4:
        even = np.pad(points, ((0, 0), (0, 1)))
        packed = even[:, 0::2] | even[:, 1::2] << np.uint8(4)
    whole = Blocks(
        bits=bits,
        block_size=size,
        codes=codes,
        scales=scales,
        zero_points=packed if has_zeros else None,
    )
    split = cuda_linears.split_blocks(whole)
    assert split.block_size == 128
    np.testing.assert_array_equal(split.codes.reshape(outputs, -1), codes.reshape(outputs, -1))
    np.testing.assert_array_equal(split.scales, np.repeat(scales, 2, 1))
    if has_zeros:
        found = split.zero_points
        assert found is not None
        if bits == 4:
            found = np.stack([found & 15, found >> 4], -1).reshape(outputs, -1)
        np.testing.assert_array_equal(found, np.repeat(points, 2, 1))


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("rows", [1, 5])
def test_attention_masks_equal_a_loop_over_positions(window, rows):
    write_index, width = 7, 20
    random = np.random.default_rng(rows)
    mask = random.random((rows, rows)) < 0.5
    positions = write_index + random.integers(0, rows, rows)
    found = random.random((rows, width)) < 0.5
    fill_visible(found, write_index, positions, mask, window)
    for row in range(rows):
        for slot in range(width):
            is_new = write_index <= slot < write_index + rows
            seen = slot < write_index or (is_new and mask[row, slot - write_index])
            at = positions[slot - write_index] if is_new else slot
            expected = seen and (window is None or at > positions[row] - window)
            assert found[row, slot] == expected


def test_masks_of_drafts_cover_earlier_tokens():
    found = np.ones((2, 8), np.bool_)
    mask = np.array([[1, 0, 1, 0], [0, 1, 0, 1]], np.bool_)
    fill_visible(found, 4, np.array([4, 4]), mask, None)
    np.testing.assert_array_equal(found[:, :2], True)
    np.testing.assert_array_equal(found[:, 2:6], mask)
    np.testing.assert_array_equal(found[:, 6:], False)
