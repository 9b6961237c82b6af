"""Codes of 4 and 8 bits in the blocks that TensorRT documents: equal products, positive scales."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.weights import linear_layers
from edgellm.build.lowering.weights import WeightFile
from edgellm.build.tensorrt.lowering.downgrade_ops import adapt
from edgellm.build.tensorrt.lowering.int4_blocks import layout_of
from edgellm.build.tensorrt.lowering.lower import lower
from edgellm.build.tensorrt.lowering.op_table import CHECKED
from edgellm.build.tensorrt.lowering.precision_fallback import (
    check_types,
    fall_back,
    lacking_kinds,
    temporary_weights,
)
from edgellm.build.tensorrt.memory_estimate import Sizes, estimate_graphs
from edgellm.build.tensorrt.target import Target
from edgellm.core import onnx_functions
from edgellm.core.errors import (
    EdgeLLMError,
    UnsupportedModelError,
)
from edgellm.device_runtime.runners.tensorrt.library.trt_import import Library

WIDTH, OUT = 384, 6
KINDS = "codes", "scales"
RANGES = {"INT4": (-8, 8), "UINT4": (0, 16), "INT8": (-128, 128), "UINT8": (0, 256)}
FP8 = "FLOAT8E4M3FN"
RANGES[FP8] = 0, 64  # bits: positive numbers


def portable(
    folder: Path, dtype: str, block: int, signs: tuple[int, ...], *, halves: bool = False
) -> tuple[ir.Model, WeightFile]:
    """Two layers of one input; the codes have all values, and one block's scales are zero."""
    random, (low, high) = np.random.default_rng(1), RANGES[dtype]
    form = ir.DataType.FLOAT16 if halves else ir.DataType.FLOAT
    x = ir.Value(name="x", shape=ir.Shape([1, "rows", WIDTH]), type=ir.TensorType(form))
    model = ir.Model(ir.Graph([x], [], nodes=[], opset_imports={"": 24}), ir_version=11)
    weights = WeightFile(folder / "weights.data")
    graph = GraphEditor(model.graph, weights)
    shared = {"axis": 0, "block_size": block} if block else {"axis": 1}
    rows = WIDTH // block if block else 1
    for name in ("q", "k"):
        end = ir.node("Identity", [x])
        model.graph.append(end)
        graph.cursor = end
        scales = random.uniform(0.01, 0.02, (rows, OUT)) * random.choice(signs, (rows, OUT))
        scales[-1, 2] = 0
        codes = random.integers(low, high, (WIDTH, OUT)).astype(np.int16)
        codes[:2, 0] = low, high - 1
        operands = [_stored(graph, name, codes, dtype)]
        operands.append(
            graph.weight(f"{name}.scale", lambda scales=scales: scales.astype(np.float32))
        )
        operation = onnx_functions.QUANTIZED_LINEAR
        if dtype.startswith("U"):
            operation = onnx_functions.SHIFTED_LINEAR
            points = random.integers(low, high, (rows, OUT))
            operands.append(_stored(graph, f"{name}.points", points, dtype))
        y = graph.node(operation, [x, *operands], domain=onnx_functions.FUNCTIONS, **shared)
        y.producer().name = f"{name}.linear"
        end.replace_input_with(0, y)
        end.outputs[0].name, end.outputs[0].type = f"{name}.y", x.type
        end.outputs[0].shape = ir.Shape([1, "rows", OUT])
        model.graph.outputs.append(end.outputs[0])
    return model, weights


def _stored(graph: GraphEditor, name: str, numbers: np.ndarray, dtype: str) -> ir.Value:
    kind = ir.DataType[dtype]
    low = numbers.astype(np.int16).reshape(-1).astype(np.uint8)
    packed = low if kind.bitwidth == 8 else (low[0::2] & 15) | (low[1::2] & 15) << 4
    return graph.weight(f"{name}.codes", lambda: packed, kind, numbers.shape)


CASES = {  # type, block, signs of scales: codes of an input in INT4, and the size of their blocks
    ("INT4", 128, (1,)): (1, 128),
    ("INT4", 192, (1,)): (1, 64),
    ("INT4", 0, (1,)): (1, 128),
    ("INT4", 32, (1,)): (2, 64),
    ("INT4", 32, (-1, 1)): (2, 64),
    ("INT4", 64, (-1, 1)): (2, 128),
    ("INT4", 16, (-1, 1)): None,
    ("UINT4", 32, (1,)): (2, 64),
    ("UINT4", 128, (-1, 1)): (2, 128),
    ("INT8", 128, (1,)): (2, 128),
    ("INT8", 32, (-1, 1)): None,
    ("UINT8", 64, (1,)): (2, 64),
}


@pytest.mark.parametrize("case", CASES)
def test_products_are_equal_and_every_version_takes_them(tmp_path, case):
    model, weights = portable(tmp_path, *case)
    layers = [weight for _, weight in linear_layers(model.graph)]
    x = np.random.default_rng(2).normal(size=(1, 3, WIDTH)).astype(np.float32)
    expected = [x @ weight.dense() for weight in layers]
    layout = layout_of(layers[0])
    assert CASES[case] == (layout and (layout.codes_each, layout.block_size))
    estimate = estimate_graphs([model], ir.DataType.FLOAT, Sizes(passes=1, rows=3))
    is_twice = CASES[case] is not None and CASES[case][0] == 2 and "INT4" in case[0]
    said = "2 layers are floats" if CASES[case] is None else "2 layers of INT4 take 8 bits"
    assert len(estimate.notes) == (CASES[case] is None or is_twice)
    assert all(note.startswith(said) for note in estimate.notes)
    lower(model, weights, ir.DataType.FLOAT)
    assert [node.op_type for node in model.graph].count("DequantizeLinear") == (layout is not None)
    for version in CHECKED:
        adapt(model.clone(), version)
    stored = {name: value.const_value for name, value in model.graph.initializers.items()}
    if layout is not None:
        assert (stored["q+k.scales"].numpy() > 0).all()
        found = sum(stored[name].nbytes for name in stored if name.startswith("q+k"))
        assert estimate.decode_bytes == found
    weights.close()
    model.ir_version, model.graph.opset_imports[""] = 10, 21  # for older releases of ONNX Runtime
    ir.save(model, tmp_path / "lowered.onnx")
    session = onnxruntime.InferenceSession(
        tmp_path / "lowered.onnx", providers=["CPUExecutionProvider"]
    )
    for found, wanted in zip(session.run(None, {"x": x}), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def _target(version: str) -> Target:
    trt = type("tensorrt", (), {"__name__": "tensorrt", "__version__": version})
    return Target(Library(trt, False), 110)


def _in_blocks_and_without(folder: Path, signs: tuple[int, ...] = (1,)) -> list[ir.Model]:
    found = []
    for block, each in ((128, signs), (0, (1,))):
        (folder / str(block)).mkdir()
        found.append(portable(folder / str(block), FP8, block, each)[0])
    return found


def test_fp8_in_blocks_needs_a_newer_library(tmp_path):
    model, whole = _in_blocks_and_without(tmp_path)
    check_types([model, whole], _target("10.13.3"), "")
    check_types([whole], _target("10.12.0"), "")
    with pytest.raises(
        EdgeLLMError, match=r"FP8 in blocks needs TensorRT 10\.13 or newer, not TensorRT 10\.12"
    ) as caught:
        check_types([whole, model], _target("10.12.0"), "")
    assert "--fallbackPrecision" in caught.value.hint


def test_fp8_in_blocks_falls_back_to_another_precision(tmp_path):
    """Only unsupported weights are replaced; requantized ones may have had any signs."""
    model, whole = _in_blocks_and_without(tmp_path, (-1, 1))
    lacking = lacking_kinds(_target("10.12.0"))
    check_types([model, whole], _target("10.12.0"), "int4")
    for graph, kinds in ((model, {"fp8"}), (whole, set())):
        before = estimate_graphs([graph], ir.DataType.FLOAT16, Sizes(passes=1, rows=3))
        sizes = Sizes(passes=1, rows=3, fallback="fp16", lacking=frozenset(lacking))
        after = estimate_graphs([graph], ir.DataType.FLOAT16, sizes)
        assert (after.decode_bytes > before.decode_bytes) == bool(kinds)
        with temporary_weights(tmp_path) as weights:
            assert fall_back(graph, weights, lacking, "int4") == kinds


@pytest.mark.parametrize("block", [0, 128])
def test_negative_scales_of_8_bits_are_rejected(tmp_path, block):
    model, _ = portable(tmp_path, "INT8", block, (-1, 1))
    with pytest.raises(
        UnsupportedModelError, match="does not support the negative scales of this INT8"
    ):
        check_types([model], _target("11.4.0"), "")


@pytest.mark.parametrize("case", CASES)
def test_all_other_scales_are_accepted(tmp_path, case):
    model, _ = portable(tmp_path, *case)
    check_types([model], _target("10.3.0"), "")


def test_scales_that_halves_cannot_hold_have_codes_of_zero(tmp_path):
    """A weight of all zeros has no largest scale to divide by."""
    model, weights = portable(tmp_path, "INT8", 0, (1,), halves=True)
    for name in ("q", "k"):
        scales = model.graph.initializers[f"{name}.scale"]
        scales.const_value = ir.tensor(np.full((1, OUT), 1e-9, np.float32))
    lower(model, weights, ir.DataType.FLOAT16)
    stored = {name: value.const_value.numpy() for name, value in model.graph.initializers.items()}
    assert not stored["q+k.codes"].any()
    assert stored["lowered.q+k.scale"] > 0
    assert (stored["lowered.q+k.factors"] == 1).all()


def test_nvfp4_accepts_scales_of_zero(tmp_path):
    scales = np.ones((OUT, WIDTH // 16), ml_dtypes.float8_e4m3fn)
    scales[2, 3] = 0
    x = ir.Value(name="x", shape=ir.Shape([1, 1, WIDTH]), type=ir.TensorType(ir.DataType.FLOAT16))
    imports = {"": 24, onnx_functions.FUNCTIONS: 1}
    model = ir.Model(ir.Graph([x], [], nodes=[], opset_imports=imports), ir_version=11)
    weights = WeightFile(tmp_path / "weights.data")
    graph = GraphEditor(model.graph, weights)
    end = ir.node("Identity", [x])
    model.graph.append(end)
    graph.cursor = end
    pairs = np.full(OUT * WIDTH // 2, 0x73, np.uint8)
    operands = [
        graph.weight("q.stored", lambda: pairs, ir.DataType.FLOAT4E2M1, (OUT, WIDTH)),
        graph.weight("q.scale", lambda: scales),
        graph.constant("global", np.float32(0.5)),
    ]
    y = graph.node(onnx_functions.FP4_LINEAR, [x, *operands], domain=onnx_functions.FUNCTIONS)
    y.producer().name = "q.linear"
    end.replace_input_with(0, y)
    model.graph.outputs.append(end.outputs[0])
    lower(model, weights, ir.DataType.FLOAT16)
    codes, stored = (model.graph.initializers[f"q.{kind}"].const_value for kind in KINDS)
    assert (stored.numpy() > 0).all()
    zeros = np.argwhere(codes.numpy() == 0)
    assert set(zeros[:, 0]) == {2}
    assert sorted(zeros[:, 1]) == list(range(48, 64))
