"""One layer of experts in every stored form, as a call of its ONNX function in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from edgellm.core.onnx_functions import (
    BLOCK_EXPERTS,
    EXPERTS,
    FP4_EXPERTS,
    FUNCTIONS,
    NVFP4_EXPERTS,
    QUANTIZED_EXPERTS,
    SHIFTED_EXPERTS,
    PackedCodes,
)
from edgellm.export.onnx.functions import experts as bodies
from edgellm.export.onnx.functions.blocks import packed_codes

E, K, HIDDEN, INNER = 5, 2, 160, 48
SWISH = {"alpha": 1.0, "limit": 65504.0, "offset": 0.0, "cubic": 0.0}
LIMITED = {"alpha": 1.7, "limit": 0.6, "offset": 1.0, "cubic": 0.0}
GELU = {"alpha": 1.6, "limit": 65504.0, "offset": 0.0, "cubic": 0.07}
SQUARED_RELU = {**SWISH, "alpha": 65504.0}
SMALL_BLOCKS = {"block_size": 16, "down_block_size": 16}
RANDOM = np.random.default_rng(3)


def scales(*shape: int) -> np.ndarray:
    return (RANDOM.uniform(0.5, 1, shape) / 60).astype(np.float16)


def codes(dtype: type, low: int, high: int, *shape: int) -> np.ndarray:
    return RANDOM.integers(low, high, shape).astype(dtype)


def dense(out: int, width: int) -> list[np.ndarray]:
    return [(RANDOM.standard_normal((E, out, width)) / 8).astype(np.float16)]


def int4(out: int, width: int) -> list[np.ndarray]:
    factors = scales(E, width // 16, out) * RANDOM.choice([-1, 1], (E, width // 16, out))
    return [codes(ml_dtypes.int4, -8, 8, E, width, out), factors.astype(np.float16)]


def shifted(out: int, width: int) -> list[np.ndarray]:
    blocks = E, width // 16, out
    points = codes(ml_dtypes.uint4, 0, 16, *blocks)
    return [codes(ml_dtypes.uint4, 0, 16, E, width, out), scales(*blocks), points]


def int8(out: int, width: int) -> list[np.ndarray]:
    return [codes(np.int8, -128, 128, E, width, out), scales(E, 1, out) / np.float16(16)]


def blocks(out: int, width: int) -> list[np.ndarray]:
    """With minima, as of GGUF's Q4_K."""
    factors = scales(E, out, width // 16) / np.float16(16)
    minima = -120 * factors
    return [codes(np.uint8, 0, 256, E, out, width), factors, minima]


def planes(bits: int) -> Callable[[int, int], list[Any]]:
    """Unsigned codes of few bits with minima, as of GGUF's Q2_K and Q5_K."""
    form = PackedCodes(bits)

    def make(out: int, width: int) -> list[Any]:
        stored = [codes(np.uint8, 0, 256, E, out, width * each // 8) for each in form.planes]
        factors = scales(E, out, width // 16) * np.float16(2 / 2**bits * 8)
        return [(form, stored), factors, factors * np.float16(-(2 ** (bits - 1)))]

    return make


def fp8(out: int, width: int) -> list[np.ndarray]:
    values = RANDOM.standard_normal((E, width, out)).astype(ml_dtypes.float8_e4m3fn)
    return [values, scales(E, 1, out)]


def mxfp4(out: int, width: int) -> list[np.ndarray]:
    powers = 2.0 ** RANDOM.integers(-7, -2, (E, out, width // 32))
    return [codes(np.uint8, 0, 256, E, out, width // 2), powers.astype(ml_dtypes.bfloat16)]


def nvfp4(out: int, width: int) -> list[np.ndarray]:
    found = RANDOM.uniform(1, 400, (E, out, width // 16)).astype(ml_dtypes.float8_e4m3fn)
    each = RANDOM.uniform(1, 2, E).astype(np.float32) / 8000
    return [codes(np.uint8, 0, 256, E, out, width // 2), found, each]


# Function, operands, activation, blocks, and width of an expert.
CASES = {
    "fp16": (EXPERTS, dense, SWISH, {}, INNER),
    "relu": (EXPERTS, dense, SQUARED_RELU, {}, INNER),
    "int4": (QUANTIZED_EXPERTS, int4, GELU, SMALL_BLOCKS, INNER),
    "uint4": (SHIFTED_EXPERTS, shifted, SWISH, SMALL_BLOCKS, INNER),
    "int8": (QUANTIZED_EXPERTS, int8, SWISH, {"block_size": HIDDEN, "down_block_size": 48}, INNER),
    "minima": (BLOCK_EXPERTS, blocks, SWISH, SMALL_BLOCKS, INNER),
    "2 bits": (BLOCK_EXPERTS, planes(2), SWISH, SMALL_BLOCKS, INNER),
    "5 bits": (BLOCK_EXPERTS, planes(5), SWISH, SMALL_BLOCKS, INNER),
    "fp8": (QUANTIZED_EXPERTS, fp8, SWISH, {"block_size": HIDDEN, "down_block_size": 48}, INNER),
    "mxfp4": (FP4_EXPERTS, mxfp4, LIMITED, {}, 64),
    "nvfp4": (NVFP4_EXPERTS, nvfp4, SWISH, {}, INNER),
}


def operand(graph: ir.Graph, name: str, stored: Any) -> ir.Value:
    """An initializer, or codes of planes."""
    if isinstance(stored, tuple):
        form, parts = stored
        inputs = [operand(graph, f"{name}.{at}", each) for at, each in enumerate(parts)]
        node = ir.Node(FUNCTIONS, form.function, inputs, name=f"{name}.codes")
        node.outputs[0].name = name
        graph.append(node)
        return node.outputs[0]
    tensor = ir.tensor(stored, name=name)
    value = ir.Value(
        name=name,
        type=ir.TensorType(tensor.dtype),
        shape=ir.Shape(stored.shape),
        const_value=tensor,
    )
    graph.register_initializer(value)
    return value


def expert_call(case: str) -> ir.Model:
    """A call with inputs x, ids and shares, and the output y; all are [1, rows, ...]."""
    name, make, gating, sizes, inner = CASES[case]
    gates, ups, downs = make(inner, HIDDEN), make(inner, HIDDEN), make(HIDDEN, inner)
    operands = [*(ups if case == "relu" else gates), *ups, *downs]
    widths = (inner, inner, HIDDEN)
    biases = [RANDOM.standard_normal((E, width)).astype(np.float16) / 4 for width in widths]
    if case not in ("mxfp4", "int4"):
        biases = [np.zeros((1, 1), np.float16)] * 3
    attributes = {**gating, **sizes, "top_k": K}
    given = [
        ir.val(at, dtype, [1, "rows", width])
        for at, dtype, width in (
            ("x", ir.DataType.FLOAT, HIDDEN),
            ("ids", ir.DataType.INT64, K),
            ("shares", ir.DataType.FLOAT, K),
        )
    ]
    tensors = [*operands, *(bias.astype(np.float32) for bias in biases)]
    graph = ir.Graph(given, [], nodes=[], opset_imports={"": 24, FUNCTIONS: 1})
    values = [operand(graph, f"w{at}", each) for at, each in enumerate(tensors)]
    named = ir.convenience.convert_attributes(attributes)
    node = ir.Node(FUNCTIONS, name, [*given, *values], named, name="experts.call")
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph.append(node)
    graph.outputs.append(node.outputs[0])
    functions = [bodies.experts(name)]
    if isinstance(operands[0], tuple):
        functions.append(packed_codes(operands[0][0]))
    return ir.Model(graph, ir_version=11, functions=functions)


def inputs(rows: int, experts: int = E) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, experts and shares; of few experts, some get more rows than a program has."""
    random = np.random.default_rng(rows)
    ids = np.stack([random.permutation(experts)[:K] for _ in range(rows)])[None]
    shares = random.dirichlet(np.ones(K), rows)[None].astype(np.float16)
    return random.standard_normal((1, rows, HIDDEN)).astype(np.float16), ids, shares
