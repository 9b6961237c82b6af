"""Rewrites a portable graph with NVFP4 for ONNX Runtime on CPUs, which lacks FLOAT4E2M1.

Weights stay bytes, pairs of codes, and are looked up in a table. Inputs are rounded by arithmetic.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from edgellm.core import onnx_functions
from edgellm.export.onnx.builder import Op
from edgellm.export.onnx.functions.attention import (
    LARGEST_FP4,
    block_scales,
    integers,
    local_function,
)
from edgellm.export.onnx.functions.experts import fp4_weights


def has_fp4(path: Path) -> bool:
    """Whether a graph has weights in FLOAT4E2M1."""
    values = ir.load(path).graph.initializers.values()
    return any(value.dtype == ir.DataType.FLOAT4E2M1 for value in values)


def open_fp4(path: Path) -> bytes:
    """The rewritten graph at `path` as bytes; it uses the same external weights."""
    model = ir.load(path)
    for value in model.graph.initializers.values():
        if value.dtype == ir.DataType.FLOAT4E2M1:
            _as_pairs(value)
    for function in (_linear(), _round_input()):
        if function.identifier() in model.functions:
            model.functions[function.identifier()] = function
    return ir.to_proto(model).SerializeToString()


def _as_pairs(value: ir.Value) -> None:
    """Change the type of codes [out, in] to bytes [out, in / 2] in the same file."""
    codes = value.const_value
    assert codes is not None
    *leading, width = codes.shape.numpy()
    shape = ir.Shape([*leading, width // 2])
    if isinstance(codes, ir.ExternalTensor):
        pairs: ir.TensorProtocol = ir.ExternalTensor(
            codes.location,
            codes.offset,
            codes.length,
            ir.DataType.UINT8,
            shape=shape,
            name=str(codes.name),
            base_dir=codes.base_dir,
        )
    else:
        array = np.frombuffer(codes.tobytes(), np.uint8).reshape(shape.numpy())
        pairs = ir.tensor(array, name=codes.name)
    value.const_value, value.shape = pairs, shape
    value.type = ir.TensorType(ir.DataType.UINT8)


def _linear() -> ir.Function:
    """See `functions.fp4_linear`."""

    def body(
        op: Op, x: ir.Value, codes: ir.Value, scales: ir.Value, global_scale: ir.Value
    ) -> ir.Value:
        floats = op.Mul(op.Cast(scales, to=int(ir.DataType.FLOAT)), global_scale)
        one = integers(op, 0)
        weight = fp4_weights(op, x, op.Unsqueeze(codes, one), op.Unsqueeze(floats, one))
        return op.MatMul(x, op.Squeeze(weight, one))

    return local_function(onnx_functions.FP4_LINEAR, "x codes scales global_scale", body)


def _round_input() -> ir.Function:
    """See `functions.round_input_fp4`; the codes' steps are 0.5 up to 2, 1 up to 4, 2 up to 6."""

    def body(op: Op, x: ir.Value, global_scale: ir.Value) -> ir.Value:
        def number(value: float) -> ir.Value:
            return op.Constant(value_float=value)

        extent, blocks, scales = block_scales(op, x, global_scale)
        effective = op.Mul(op.Cast(scales, to=int(ir.DataType.FLOAT)), global_scale)
        ratio = op.Div(blocks, effective)
        ratio = op.Min(op.Max(ratio, number(-LARGEST_FP4)), number(LARGEST_FP4))
        size = op.Abs(ratio)
        above_two = op.Where(op.Less(size, number(4.0)), number(1.0), number(2.0))
        step = op.Where(op.Less(size, number(2.0)), number(0.5), above_two)
        values = op.Mul(op.Mul(op.Round(op.Div(ratio, step)), step), effective)
        return op.CastLike(op.Reshape(values, extent), x)

    return local_function(onnx_functions.ROUND_INPUT_FP4, "x global_scale", body)
