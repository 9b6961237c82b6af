"""Model-local functions of block-quantized weights as in GGUF files, see `attention`."""

from __future__ import annotations

import onnx_ir as ir

from edgellm.core import onnx_functions
from edgellm.export.onnx.builder import Op
from edgellm.export.onnx.functions.attention import integers, local_function

_INT = ir.AttributeType.INT


def block_linear(*, has_minima: bool) -> ir.Function:
    """Y = x W^T, W [out, in] = codes * scales + minima, computed in float32.

    A scale and a minimum [out, in / block_size] for each block along the input.
    """

    def body(op: Op, x: ir.Value, codes: ir.Value, *factors: ir.Value) -> ir.Value:
        weight = block_values(op, codes, *factors)
        return op.MatMul(x, op.Transpose(op.CastLike(weight, x), perm=[1, 0]))

    name = onnx_functions.OFFSET_LINEAR if has_minima else onnx_functions.BLOCK_LINEAR
    inputs = "x codes scales minima" if has_minima else "x codes scales"
    return local_function(name, inputs, body, {"block_size": _INT})


def block_rows(*, has_minima: bool) -> ir.Function:
    """Rows float32 [..., in] of a weight of `block_linear`, by their indices [...]."""

    def body(op: Op, row_ids: ir.Value, *stored: ir.Value) -> ir.Value:
        return block_values(op, *(op.Gather(each, row_ids, axis=0) for each in stored))

    name = onnx_functions.OFFSET_ROWS if has_minima else onnx_functions.BLOCK_ROWS
    inputs = "row_ids codes scales minima" if has_minima else "row_ids codes scales"
    return local_function(name, inputs, body, {"block_size": _INT})


def block_factors() -> ir.Function:
    """Scales or minima float32 [out, n] of blocks: codes times a scale for `block_size` of them."""
    return local_function(
        onnx_functions.BLOCK_FACTORS, "codes scales", block_values, {"block_size": _INT}
    )  # fmt: skip


def block_values(
    op: Op, codes: ir.Value, scales: ir.Value, *minima: ir.Value, attribute: str = "block_size"
) -> ir.Value:
    """Codes [..., n] times their blocks' scales, plus their minima: float32, rounded twice.

    `attribute`: the call's attribute of the block size.
    """
    to = int(ir.DataType.FLOAT)
    block = ir.RefAttr("block_size", attribute, _INT)
    values = op.DequantizeLinear(codes, op.Cast(scales, to=to), axis=-1, block_size=block)
    if not minima:
        return values
    apart = op.Concat(op.Shape(scales), integers(op, -1), axis=0)
    least = op.Unsqueeze(op.Cast(minima[0], to=to), integers(op, -1))
    return op.Reshape(op.Add(op.Reshape(values, apart), least), op.Shape(values))
