"""Embeddings and heads on GPUs: packed weights and kernels against the bodies of ONNX functions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from expert_cases import codes, operand, scales
from interpreted import by_reference, launch

from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.tensorrt.lowering.addressed_weights import AddressedWeights
from edgellm.build.tensorrt.lowering.kernel_attention import Kernels
from edgellm.build.tensorrt.lowering.kernel_vocabulary import (
    by_address,
    lower_vocabulary,
    why_not,
)
from edgellm.core.graph_io import INPUT_IDS, WEIGHT_TABLE
from edgellm.core.onnx_functions import FUNCTIONS, PackedCodes
from edgellm.device_runtime.kernels.triton import vocabulary
from edgellm.device_runtime.runners.tensorrt.library.attention_nodes import GIVEN
from edgellm.device_runtime.runners.tensorrt.library.vocabulary_nodes import PLUGINS
from edgellm.export.onnx.functions import attention, blocks

V, H, BLOCK = 77, 160, 32  # no multiples of tiles; the last tile of the input is not full
PLUGIN = {plugin.name: plugin for plugin in PLUGINS}
NUMBERS = SimpleNamespace(max=max, min=min, cdiv=lambda a, b: -(-a // b))
RANDOM = np.random.default_rng(5)
BY_INPUT = {"axis": 0, "block_size": BLOCK}


def dense(dtype: Any) -> list[np.ndarray]:
    return [(RANDOM.standard_normal((V, H)) / 8).astype(dtype)]


def block_factors(*, shifts: float = 0) -> list[np.ndarray]:
    found = scales(V, H // BLOCK)
    return [found, (-shifts * found).astype(np.float16)] if shifts else [found]


def planes(bits: int, **kind: bool) -> tuple[PackedCodes, list[np.ndarray]]:
    form = PackedCodes(bits, **kind)
    return form, [codes(np.uint8, 0, 256, V, H * each // 8) for each in form.planes]


def wide(*shape: int) -> np.ndarray:
    """Scales in the type of the head's input."""
    return scales(*shape).astype(np.float32)


def nvfp4() -> list[np.ndarray]:
    values = RANDOM.choice([-6, -1.5, -0.5, 0, 1, 2, 4], (V, H)).astype(ml_dtypes.float4_e2m1fn)
    found = RANDOM.uniform(1, 400, (V, H // 16)).astype(ml_dtypes.float8_e4m3fn)
    return [values, found, np.array(1 / 8000, np.float32)]


FP8 = RANDOM.standard_normal((H, V)).astype(ml_dtypes.float8_e4m3fn)
SIGNED = wide(H // BLOCK, V) * RANDOM.choice([-1, 1], (H // BLOCK, V)).astype(np.float32)
UINT4 = codes(ml_dtypes.uint4, 0, 16, H, V), wide(H // BLOCK, V)
# Operands that a lookup and a head share.
TIED = {
    "fp16": dense(np.float16),
    "bf16": dense(ml_dtypes.bfloat16),
    "int8": [codes(np.int8, -128, 128, V, H), *block_factors()],
    "int4": [planes(4, is_signed=True), *block_factors()],
    "4 bits": [planes(4), *block_factors(shifts=7)],
    "5 bits": [planes(5), *block_factors(shifts=15)],
    "iq4": [planes(4, by_table=True), *block_factors()],
}
# Functions, operands and attributes of heads alone.
HEADS = {
    "head int4": (
        attention.quantized_linear(has_zero_points=False),
        [codes(ml_dtypes.int4, -8, 8, H, V), SIGNED],
        BY_INPUT,
    ),
    "head uint4": (
        attention.quantized_linear(has_zero_points=True),
        [*UINT4, codes(ml_dtypes.uint4, 0, 16, H // BLOCK, V)],
        BY_INPUT,
    ),
    "head int8": (
        attention.quantized_linear(has_zero_points=False),
        [codes(np.int8, -128, 128, H, V), wide(V)],
        {"axis": 1},
    ),
    "head fp8": (
        attention.quantized_linear(has_zero_points=False),
        [FP8, wide(V)],
        {"axis": 1},
    ),
    "head nvfp4": (attention.fp4_linear(), nvfp4(), {}),
}


def call(
    graph: ir.Graph, function: ir.Function, inputs: list[ir.Value], name: str, **given: int
) -> ir.Value:
    attributes = ir.convenience.convert_attributes(given)
    node = ir.Node(FUNCTIONS, function.name, inputs, attributes, name=f"{name}.call")
    graph.append(node)
    return node.outputs[0]


def model_of(case: str) -> ir.Model:
    """A lookup and a head in float32; their outputs are `rows` and `logits`."""
    ids = ir.val(INPUT_IDS, ir.DataType.INT64, [1, "rows"])
    x = ir.val("x", ir.DataType.FLOAT, [1, "head_rows", H])
    graph = ir.Graph([ids, x], [], nodes=[], opset_imports={"": 24, FUNCTIONS: 1})
    if case in HEADS:
        function, operands, given = HEADS[case]
        values = [operand(graph, f"w{at}", each) for at, each in enumerate(operands)]
        found, functions = {"logits": call(graph, function, [x, *values], "head.w", **given)}, []
    else:
        found, functions = _tied(graph, ids, x, TIED[case])
        function = attention.linear() if len(TIED[case]) == 1 else functions.pop()
    for name, value in found.items():
        value.name, value.type = name, ir.TensorType(ir.DataType.FLOAT)
        graph.outputs.append(value)
    return ir.Model(graph, ir_version=11, functions=[function, *functions])


def _tied(
    graph: ir.Graph, ids: ir.Value, x: ir.Value, operands: list[Any]
) -> tuple[dict[str, ir.Value], list[ir.Function]]:
    values = [operand(graph, f"w{at}", each) for at, each in enumerate(operands)]
    if len(operands) == 1:
        found = ir.node("Gather", [values[0], ids], {"axis": 0}, name="looked_up")
        rows = ir.node("Cast", found.outputs, {"to": int(ir.DataType.FLOAT)}, name="rows")
        graph.extend([found, rows])
        logits = call(graph, attention.linear(), [x, *values], "head.w")
        return {"rows": rows.outputs[0], "logits": logits}, []
    has_minima, codes_of = len(operands) == 3, operands[0]
    form = codes_of[0] if isinstance(codes_of, tuple) else None
    producer = values[0].producer()
    stored = [*producer.inputs, *values[1:]] if form and producer else values
    lookup = blocks.block_rows(has_minima=has_minima, packed=form)
    product = blocks.block_linear(has_minima=has_minima)
    rows = call(graph, lookup, [ids, *stored], "looked_up", block_size=BLOCK)
    logits = call(graph, product, [x, *values], "head.w", block_size=BLOCK)
    functions = [lookup, *([blocks.packed_codes(form)] if form else []), product]
    return {"rows": rows, "logits": logits}, functions


class Lowered:
    """The nodes of a lowered graph, with their weights in memory."""

    def __init__(self, folder: Path, case: str) -> None:
        model, path = model_of(case), folder / "llm.weights"
        editor = GraphEditor(model.graph)
        self.found = by_address(model.graph, Kernels(sm=110, codes="fp16", head_rows=64))
        weights = AddressedWeights(editor)
        lower_vocabulary(editor, Kernels(sm=110, codes="fp16", head_rows=64), weights)
        weights.write(path)
        self.num_matrices, self._nodes = len(weights), [*model.graph]
        stored = np.fromfile(path, np.uint8)
        aligned = np.zeros(len(stored) + 256, np.uint8)
        first = -aligned.ctypes.data % 256
        self._memory = aligned[first : first + len(stored)]
        self._memory[:] = stored
        entries = 2 + 4 * self.num_matrices
        self.table = self._memory[: 8 * entries].view(np.int64)
        offsets = self.table[2:]
        offsets[offsets > 0] += self._memory.ctypes.data

    def run(self, how: Callable[..., None], ids: np.ndarray, x: np.ndarray) -> dict[str, Any]:
        """Launch the kernels of all nodes as their plugins do; outputs by node."""
        known, found = {INPUT_IDS: ids, "x": x, WEIGHT_TABLE: self.table}, {}
        for node in [each for each in self._nodes if each.op_type in PLUGIN]:
            plugin, facts = PLUGIN[node.op_type], json.loads(node.attributes[GIVEN].as_string())
            arrays = [known[str(value.name)] for value in node.inputs if value is not None]
            shapes = {key: a.shape for key, a in zip(plugin.inputs, arrays, strict=True)}
            ((dtype, shape),) = plugin.outputs(NUMBERS, shapes, facts)
            y, launched = np.full(shape, 7, dtype), plugin.launch(NUMBERS, shapes, facts)
            kernel, constants = getattr(vocabulary, node.op_type), launched.variant.constants
            how(kernel, launched.grid, *arrays, *launched.sizes, y, **constants)
            found[node.op_type] = y
        return found


def expected(folder: Path, case: str, ids: np.ndarray, x: np.ndarray) -> dict[str, np.ndarray]:
    """Outputs of the functions' bodies; ONNX Runtime has no FP4 on CPUs."""
    if case == "head nvfp4":
        values, found, scale = (each.astype(np.float64) for each in HEADS[case][1])
        return {"head_rows": x @ (values * found.repeat(16, 1) * scale).T}
    ir.save(model_of(case), folder / "body.onnx")
    options = onnxruntime.SessionOptions()  # optimized, it rounds inputs of quantized products
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(folder / "body.onnx", options)
    feeds = {INPUT_IDS: ids, "x": x.astype(np.float32)}
    taken = {each.name: feeds[each.name] for each in session.get_inputs()}
    names = [each.name for each in session.get_outputs()]
    nodes = {"rows": "look_up_rows", "logits": "head_rows"}
    outputs = session.run(names, taken)
    return {nodes[name]: array for name, array in zip(names, outputs, strict=True)}


def inputs(rows: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(rows)
    x = random.standard_normal((1, rows, H)).astype(np.float16)
    return random.integers(0, V, (1, rows)), x


@pytest.mark.each_change("fp16", "int4", "4 bits", "head uint4", "head nvfp4")
@pytest.mark.parametrize("case", [*TIED, *HEADS])
def test_they_equal_the_bodies_of_their_functions(case, tmp_path):
    lowered = Lowered(tmp_path, case)
    assert (lowered.num_matrices, len(lowered.found)) == (1, 2 if case in TIED else 1)
    for rows in (1, 3, 16, 64):
        given = inputs(rows)
        wanted = expected(tmp_path, case, *given)
        for how in (launch, by_reference):
            found = lowered.run(how, *given)
            assert found.keys() == wanted.keys()
            for name, array in wanted.items():
                error = np.linalg.norm(found[name] - array) / np.linalg.norm(array)
                assert error < 2e-3, (name, rows, how.__name__)


def test_forms_without_kernels_have_a_reason():
    of_fp8, of_fp4 = model_of("head fp8").graph, model_of("head nvfp4").graph
    orin = Kernels(sm=87, codes="fp16")
    said = "embeddings and heads in FP8 from compute capability 8.9 on, not for 8.7"
    assert why_not(of_fp8, orin) == {"w0": f"there are kernels for {said}"}
    assert by_address(of_fp8, orin) == []
    assert why_not(of_fp8, Kernels(sm=89, codes="fp16")) == {}
    (head,) = of_fp4
    (scale,) = (operand(of_fp4, "scale", np.array(1, np.float32)),)
    rounded = call(of_fp4, attention.round_input_fp4(), [of_fp4.inputs[1], scale], "rounded")
    head.replace_input_with(0, rounded)
    assert why_not(of_fp4, orin) == {"w0": "TensorRT multiplies inputs of FP4"}


def test_embeddings_of_floats_are_exact(tmp_path):
    ids, x = inputs(40)
    found = Lowered(tmp_path, "fp16").run(launch, ids, x)["look_up_rows"]
    np.testing.assert_array_equal(found, TIED["fp16"][0][ids])


@pytest.mark.parametrize("how", [launch, by_reference], ids=["kernel", "reference"])
def test_ids_beyond_the_table_are_clamped(how, tmp_path):
    """As padding may be; nothing beyond the table is read."""
    ids = np.array([[-5, V + 3, 1 << 40]])
    found = Lowered(tmp_path, "fp16").run(how, ids, inputs(1)[1])["look_up_rows"]
    np.testing.assert_array_equal(found[0], TIED["fp16"][0][[0, V - 1, V - 1]])


def test_more_rows_than_a_tile(tmp_path):
    lowered, given = Lowered(tmp_path, "fp16"), inputs(70)
    wanted = expected(tmp_path, "fp16", *given)["head_rows"]
    np.testing.assert_allclose(lowered.run(launch, *given)["head_rows"], wanted, atol=1e-2)


@pytest.mark.parametrize("how", [launch, by_reference], ids=["kernel", "reference"])
def test_other_tables_change_nothing(how, tmp_path):
    """TensorRT times plugins on random inputs."""
    lowered = Lowered(tmp_path, "fp16")
    lowered.table[1] ^= 1
    for found in lowered.run(how, *inputs(2)).values():
        np.testing.assert_array_equal(found, np.full_like(found, 7))
