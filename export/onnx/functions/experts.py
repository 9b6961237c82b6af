"""Model-local functions of mixtures of experts, see `edgellm.export.onnx.functions.attention`.

Bodies compute all experts for all tokens, weighted by the shares of the chosen ones; backends read
the chosen ones only. Shapes: S tokens, H hidden size, E experts, K chosen experts, I intermediate
size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from edgellm.core import onnx_functions
from edgellm.core.onnx_functions import RoutingForm
from edgellm.export.onnx.builder import Op
from edgellm.export.onnx.functions.attention import integers, local_function
from edgellm.export.onnx.functions.blocks import block_values

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_INT, _FLOAT = ir.AttributeType.INT, ir.AttributeType.FLOAT
_PARTS = ("gate", "up", "down")
# Operands of a weight of each kind, by the prefixes of their names.
_OPERANDS = {
    onnx_functions.EXPERTS: ("",),
    onnx_functions.QUANTIZED_EXPERTS: ("", "_scales"),
    onnx_functions.SHIFTED_EXPERTS: ("", "_scales", "_zero_points"),
    onnx_functions.FP4_EXPERTS: ("", "_scales"),
    onnx_functions.NVFP4_EXPERTS: ("", "_scales", "_global_scales"),
    onnx_functions.BLOCK_EXPERTS: ("", "_scales", "_minima"),
}
_BLOCKED = (
    onnx_functions.QUANTIZED_EXPERTS,
    onnx_functions.SHIFTED_EXPERTS,
    onnx_functions.BLOCK_EXPERTS,
)


def router() -> ir.Function:
    """Logits x W^T of the experts in float32, W [E, H] in any float type; never rounded."""

    def body(op: Op, x: ir.Value, weight: ir.Value) -> ir.Value:
        floats = (op.Cast(value, to=int(ir.DataType.FLOAT)) for value in (x, weight))
        rows, columns = floats
        return op.MatMul(rows, op.Transpose(columns, perm=[1, 0]))

    return local_function(onnx_functions.ROUTER, "x weight", body)


def routing(form: RoutingForm) -> ir.Function:
    """Ids int64 [1, S, K] of experts and their shares [1, S, K], of logits float32 [1, S, E].

    `count` int64 [1] and the attribute `top_k` are K, `experts` is E. Of equal experts the first is
    chosen.
    """

    def body(
        op: Op, logits: ir.Value, count: ir.Value, *given: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        operands = dict(zip(form.operands, given, strict=True))
        numbers = {
            name: op.Constant(value_float=ir.RefAttr("value_float", name, _FLOAT))
            for name in form.numbers
        }
        shares = _shares(op, form, logits, operands, numbers)
        rank = op.Add(shares, operands["bias"]) if form.biased else shares
        _, ids = op.outputs(2, "TopK", rank, count, axis=-1)
        taken = op.GatherElements(shares, ids, axis=-1)
        if form.normalized:
            total = op.ReduceSum(taken, integers(op, -1), keepdims=1)
            total = op.Max(total, numbers["smallest_sum"]) if form.bounded else total
            total = op.Add(total, numbers["added"]) if form.padded else total
            taken = op.Div(taken, total)
        taken = op.Mul(taken, numbers["scale"]) if form.scaled else taken
        taken = op.Cast(taken, to=ir.RefAttr("to", "to", _INT)) if form.cast else taken
        if form.weighted:
            taken = op.Mul(taken, op.Gather(operands["factors"], ids))
        return ids, taken

    inputs = " ".join(["logits", "count", *form.operands])
    attributes = dict.fromkeys(form.numbers, _FLOAT) | {"experts": _INT, "top_k": _INT}
    attributes |= {"to": _INT} if form.cast else {}
    return local_function(form.function, inputs, body, attributes)


def _shares(
    op: Op,
    form: RoutingForm,
    logits: ir.Value,
    operands: Mapping[str, ir.Value],
    numbers: Mapping[str, ir.Value],
) -> ir.Value:
    """Of all experts, float32 [1, S, E]."""
    logits = op.Add(logits, operands["offsets"]) if form.offset else logits
    if form.capped:
        logits = op.Mul(op.Tanh(op.Div(logits, numbers["cap"])), numbers["cap"])
    return op.Sigmoid(logits) if form.sigmoid else op.Softmax(logits, axis=-1)


def experts(name: str) -> ir.Function:
    """Sum of experts `ids` int64 [1, S, K] of x [1, S, H], weighted by `shares` [1, S, K].

    An expert is down(g * sigmoid(g * (alpha + cubic * g^2)) * (u + offset)), with gates g up to
    limit and ups u within +-limit (`edgellm.export.layers.experts.Gating`). Weights by the kinds of
    linear layers: [E, out, in]; codes [E, in, out] with scales [E, blocks, out]; codes [E, out, in]
    with scales and minima [E, out, blocks], or one minimum of zero; FP4 in pairs [E, out, in / 2]
    with scales [E, out, in / 32], or with FP8 scales [E, out, in / 16] and those of experts [E].
    Biases are [E, out], or one zero [1, 1].
    `top_k` is K; block sizes are those of gates and ups, and of downs.
    """
    operands = _OPERANDS[name]
    dequantize = _DEQUANTIZE[name]

    def body(op: Op, x: ir.Value, ids: ir.Value, shares: ir.Value, *stored: ir.Value) -> ir.Value:
        count = len(operands)
        weights = [stored[index * count : (index + 1) * count] for index in range(len(_PARTS))]
        biases = [op.Unsqueeze(bias, integers(op, 1)) for bias in stored[-len(_PARTS) :]]
        blocks = ("block_size", "block_size", "down_block_size")
        gate, up, down = (
            dequantize(op, x, block, *weight) for weight, block in zip(weights, blocks, strict=True)
        )
        inner = _gated(
            op, op.Add(op.MatMul(x, gate), biases[0]), op.Add(op.MatMul(x, up), biases[1])
        )
        y = op.Add(op.MatMul(inner, down), biases[2])  # [E, S, H]
        share = _share_of_each(op, ids, shares, stored[min(1, count - 1)])
        zero = op.CastLike(op.Constant(value_float=0.0), y)
        # An expert that a token did not choose may have overflowed.
        chosen = op.Where(op.Equal(share, zero), zero, op.Mul(y, share))
        return op.ReduceSum(chosen, integers(op, 0), keepdims=1)

    inputs = [part + ending for part in _PARTS for ending in operands]
    biases = [f"{part}_bias" for part in _PARTS]
    attributes = dict.fromkeys(("alpha", "limit", "offset", "cubic"), _FLOAT) | {"top_k": _INT}
    if name in _BLOCKED:
        attributes |= {"block_size": _INT, "down_block_size": _INT}
    return local_function(name, " ".join(["x ids shares", *inputs, *biases]), body, attributes)


def _gated(op: Op, gate: ir.Value, up: ir.Value) -> ir.Value:
    """Both [E, S, I]."""
    alpha, limit, offset, cubic = (
        op.CastLike(op.Constant(value_float=ir.RefAttr("value_float", name, _FLOAT)), gate)
        for name in ("alpha", "limit", "offset", "cubic")
    )
    gate = op.Min(gate, limit)
    up = op.Max(op.Min(up, limit), op.Neg(limit))
    # Not cubic times the square, which overflows in float16.
    slope = op.Add(alpha, op.Mul(op.Mul(cubic, gate), gate))
    activated = op.Mul(gate, op.Sigmoid(op.Mul(gate, slope)))
    return op.Mul(activated, op.Add(up, offset))


def _share_of_each(op: Op, ids: ir.Value, shares: ir.Value, stored: ir.Value) -> ir.Value:
    """[E, S, 1]; 0 for experts that a token did not choose. `stored` is any tensor [E, ...]."""
    count = op.Squeeze(op.Shape(stored, start=0, end=1))
    every = op.Range(op.Constant(value_int=0), count, op.Constant(value_int=1))
    is_chosen = op.Equal(op.Unsqueeze(ids, integers(op, 3)), every)  # [1, S, K, E]
    zero = op.CastLike(op.Constant(value_float=0.0), shares)
    each = op.Where(is_chosen, op.Unsqueeze(shares, integers(op, 3)), zero)
    return op.Transpose(op.ReduceSum(each, integers(op, 2), keepdims=0), perm=[2, 1, 0])


def _blocks(op: Op, x: ir.Value, block: str, *stored: ir.Value) -> ir.Value:
    values = block_values(op, *stored, attribute=block)
    return op.Transpose(op.CastLike(values, x), perm=[0, 2, 1])


Dequantize = Callable[..., ir.Value]  # (op, x, name of the block size, *operands) -> [E, in, out]


def _dense(op: Op, x: ir.Value, block: str, weight: ir.Value) -> ir.Value:
    del block
    return op.Transpose(op.CastLike(weight, x), perm=[0, 2, 1])


def _integer(op: Op, x: ir.Value, block: str, *stored: ir.Value) -> ir.Value:
    block_size = ir.RefAttr("block_size", block, _INT)
    return op.CastLike(op.DequantizeLinear(*stored, axis=1, block_size=block_size), x)


def _fp4(op: Op, x: ir.Value, block: str, codes: ir.Value, scales: ir.Value) -> ir.Value:
    del block
    return fp4_weights(op, x, codes, scales)


def fp4_weights(op: Op, x: ir.Value, codes: ir.Value, scales: ir.Value) -> ir.Value:
    """Weights [E, in, out] in the type of x, by a table: not every runtime dequantizes FP4.

    Args:
        op: the recorder.
        x: any value of the type.
        codes: pairs of codes [E, out, in / 2].
        scales: [E, out, blocks].
    """
    table = op.Constant(value_floats=[*_E2M1, *(-value for value in _E2M1)])
    four, fifteen = (op.CastLike(op.Constant(value_int=number), codes) for number in (4, 15))
    halves = op.BitwiseAnd(codes, fifteen), op.BitShift(codes, four, direction="RIGHT")
    both = [
        op.Unsqueeze(op.Gather(table, op.Cast(half, to=int(ir.DataType.INT32))), integers(op, 3))
        for half in halves
    ]
    blocks = op.Concat(op.Shape(scales), integers(op, -1), axis=0)
    values = op.Reshape(op.Concat(*both, axis=3), blocks)  # [E, out, blocks, 32 or 16]
    floats = op.Unsqueeze(op.Cast(scales, to=int(ir.DataType.FLOAT)), integers(op, 3))
    weight = op.Reshape(op.Mul(values, floats), integers(op, 0, 0, -1))
    return op.Transpose(op.CastLike(weight, x), perm=[0, 2, 1])


def _nvfp4(
    op: Op, x: ir.Value, block: str, codes: ir.Value, scales: ir.Value, of_scales: ir.Value
) -> ir.Value:
    floats = op.Cast(scales, to=int(ir.DataType.FLOAT))
    each = op.Unsqueeze(of_scales, integers(op, 1, 2))
    return _fp4(op, x, block, codes, op.Mul(floats, each))


_DEQUANTIZE: dict[str, Dequantize] = {
    onnx_functions.EXPERTS: _dense,
    onnx_functions.QUANTIZED_EXPERTS: _integer,
    onnx_functions.SHIFTED_EXPERTS: _integer,
    onnx_functions.FP4_EXPERTS: _fp4,
    onnx_functions.NVFP4_EXPERTS: _nvfp4,
    onnx_functions.BLOCK_EXPERTS: _blocks,
}
LARGEST = {ir.DataType.FLOAT: float(np.finfo(np.float32).max), ir.DataType.FLOAT16: 65504.0}
