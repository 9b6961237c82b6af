"""Model-local functions of block-quantized weights as in GGUF files, see `attention`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from edgellm.core import onnx_functions
from edgellm.core.onnx_functions import IQ4, PackedCodes
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


def block_rows(*, has_minima: bool, packed: PackedCodes | None = None) -> ir.Function:
    """Rows float32 [..., in] of a weight of `block_linear`, by their indices [...].

    `packed`: the table's codes are in planes.
    """
    planes = ["codes"] if packed is None else _names_of_planes(packed)

    def body(op: Op, row_ids: ir.Value, *stored: ir.Value) -> ir.Value:
        found = [op.Gather(each, row_ids, axis=0) for each in stored]
        codes, factors = found[: len(planes)], found[len(planes) :]
        rows = codes[0] if packed is None else _joined(op, packed, codes)
        return block_values(op, rows, *factors)

    whole = onnx_functions.OFFSET_ROWS if has_minima else onnx_functions.BLOCK_ROWS
    name = whole if packed is None else packed.rows(has_minima=has_minima)
    inputs = ["row_ids", *planes, "scales", *(["minima"] if has_minima else [])]
    return local_function(name, " ".join(inputs), body, {"block_size": _INT})


def packed_codes(form: PackedCodes) -> ir.Function:
    """Codes INT8 or UINT8 [..., in] of their planes uint8 [..., in * bits / 8]."""

    def body(op: Op, *planes: ir.Value) -> ir.Value:
        return _joined(op, form, planes)

    return local_function(form.function, " ".join(_names_of_planes(form)), body)


def _names_of_planes(form: PackedCodes) -> list[str]:
    return ["low", "high"][: len(form.planes)]


def _joined(op: Op, form: PackedCodes, planes: Sequence[ir.Value]) -> ir.Value:
    first, *higher = (
        _spread(op, plane, bits) for plane, bits in zip(planes, form.planes, strict=True)
    )
    codes = first
    for part in higher:
        moved = op.BitShift(part, _byte(op, form.planes[0]), direction="LEFT")
        codes = op.BitwiseOr(codes, moved)
    if form.by_table:
        table = op.Constant(value=ir.tensor(np.array(IQ4, np.int8)))
        return op.Gather(table, op.Cast(codes, to=int(ir.DataType.INT32)), axis=0)
    if not form.is_signed:
        return codes
    half = op.Constant(value=ir.tensor(np.array(1 << (form.bits - 1), np.int8)))
    return op.Sub(op.Cast(codes, to=int(ir.DataType.INT8)), half)


def _spread(op: Op, plane: ir.Value, bits: int) -> ir.Value:
    """The parts of all codes, uint8 [..., in]."""
    shifts = op.Constant(value=ir.tensor(np.arange(0, 8, bits, dtype=np.uint8)))
    apart = op.BitShift(op.Unsqueeze(plane, integers(op, -1)), shifts, direction="RIGHT")
    parts = op.BitwiseAnd(apart, _byte(op, (1 << bits) - 1))
    return op.Reshape(parts, op.Concat(op.Shape(plane, start=0, end=-1), integers(op, -1), axis=0))


def _byte(op: Op, number: int) -> ir.Value:
    return op.Constant(value=ir.tensor(np.array(number, np.uint8)))


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
