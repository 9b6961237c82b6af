"""Model-local functions of attention, linear layers and rounding of inputs.

A call is a whole operation with the attributes of its layer. Its body is plain ONNX, so any runtime
can compute the graph; it is also the operation's definition for backends. Shapes: S query tokens, C
cache capacity, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from edgellm.core import onnx_functions
from edgellm.export.onnx.builder import CALLED, OPSET, Op

FP4_BLOCK = 16
LARGEST_FP4 = 6.0
_SMALLEST_FP8, _LARGEST_FP8 = 2.0**-9, 448.0
_MASKED = {ir.DataType.FLOAT: -1e30, ir.DataType.FLOAT16: -3e4}
_INT, _FLOAT = ir.AttributeType.INT, ir.AttributeType.FLOAT
_NONE: Mapping[str, ir.AttributeType] = {}


def call(op: Op, function: ir.Function, *inputs: ir.Value | None, **attributes: Any) -> Any:
    """Append a call; returns its output, or a tuple of outputs. None attributes are omitted."""
    op.define(function)
    given = {name: value for name, value in attributes.items() if value is not None}
    count = len(function.outputs)
    outputs = op.outputs(count, function.name, *inputs, domain=function.domain, **given)
    return outputs if count > 1 else outputs[0]


def local_function(
    name: str,
    inputs: str,
    body: Callable[..., Sequence[ir.Value] | ir.Value],
    attributes: Mapping[str, ir.AttributeType] = _NONE,
    *,
    domain: str = onnx_functions.FUNCTIONS,
) -> ir.Function:
    """A function; `body(op, *inputs)` records its nodes and returns the outputs."""
    op = Op(ir.DataType.FLOAT)
    values = [ir.Value(name=each) for each in inputs.split()]
    outputs = body(op, *values)
    domains = {each.domain: 1 for each in op.functions.values()}
    graph = ir.Graph(
        values,
        [outputs] if isinstance(outputs, ir.Value) else outputs,
        nodes=op.nodes,
        opset_imports={"": OPSET, **domains},
    )
    given = [ir.Attr(each, kind, None) for each, kind in attributes.items()]
    function = ir.Function(domain, name, graph=graph, attributes=given)
    function.meta[CALLED] = list(op.functions.values())
    return function


def of_call(**kinds: ir.AttributeType) -> dict[str, ir.Attr]:
    """Attributes of a node in a body that refer to those of the call, `node_name=kind`."""
    return {name: ir.RefAttr(name, name, kind) for name, kind in kinds.items()}


def integers(op: Op, *values: int) -> ir.Value:
    """A 1-D int64 constant, as a node of a body."""
    return op.Constant(value_ints=list(values))


# ------------------------------------------------------------------------------- attention
def cached_attention(dtype: ir.DataType) -> ir.Function:
    """Apply RoPE to queries and keys, write the cache at `write_index`, attend to visible slots.

    q [1, S, num_heads * D], k and v [1, S, kv_num_heads * D], the caches [1, kv_num_heads, C, D],
    visible bool [S, C]; cos and sin are tables of all positions [C, R / 2], or, without
    `positions`, by token [1, S, R / 2]. RoPE applies to the first R = `rotary_embedding_dim`
    dimensions of a head (default: all D): pairs are i and i + R / 2, or neighbours if
    `interleaved`. Outputs y [1, S, num_heads * D] and the caches.
    """

    def body(
        op: Op,
        q: ir.Value,
        k: ir.Value,
        v: ir.Value,
        past_key: ir.Value,
        past_value: ir.Value,
        write_index: ir.Value,
        visible: ir.Value,
        cos: ir.Value,
        sin: ir.Value,
        positions: ir.Value,
    ) -> tuple[ir.Value, ...]:
        q, k = _rotated(op, q, k, cos, sin, positions)
        return _attend(op, dtype, (q, k, v), (past_key, past_value), write_index, visible)

    return local_function(
        onnx_functions.ATTENTION,
        "q k v past_key past_value write_index visible cos sin positions",
        body,
        {**_ATTENTION_ATTRIBUTES, "interleaved": _INT, "rotary_embedding_dim": _INT},
    )


def sink_attention(dtype: ir.DataType) -> ir.Function:
    """`cached_attention` with sinks [num_heads].

    A sink is the score of a key that all tokens attend to, with a value of zeros.
    """

    def body(op: Op, *inputs: ir.Value) -> tuple[ir.Value, ...]:
        q, k, v, past_key, past_value, write_index, visible, cos, sin, positions, sinks = inputs
        q, k = _rotated(op, q, k, cos, sin, positions)
        return _attend(op, dtype, (q, k, v), (past_key, past_value), write_index, visible, sinks)

    return local_function(
        onnx_functions.SINK_ATTENTION,
        "q k v past_key past_value write_index visible cos sin positions sinks",
        body,
        {**_ATTENTION_ATTRIBUTES, "interleaved": _INT, "rotary_embedding_dim": _INT},
    )


def _rotated(op: Op, q: ir.Value, k: ir.Value, *tables: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Apply RoPE to queries and keys, by cos, sin and positions."""
    q, k = (
        op.RotaryEmbedding(
            x,
            *tables,
            num_heads=ir.RefAttr("num_heads", heads, _INT),
            **of_call(interleaved=_INT, rotary_embedding_dim=_INT),
        )
        for x, heads in ((q, "num_heads"), (k, "kv_num_heads"))
    )
    return q, k


def unrotated_attention(dtype: ir.DataType) -> ir.Function:
    """`cached_attention` without RoPE."""

    def body(
        op: Op,
        q: ir.Value,
        k: ir.Value,
        v: ir.Value,
        past_key: ir.Value,
        past_value: ir.Value,
        write_index: ir.Value,
        visible: ir.Value,
    ) -> tuple[ir.Value, ...]:
        return _attend(op, dtype, (q, k, v), (past_key, past_value), write_index, visible)

    return local_function(
        onnx_functions.UNROTATED_ATTENTION,
        "q k v past_key past_value write_index visible",
        body,
        _ATTENTION_ATTRIBUTES,
    )


_ATTENTION_ATTRIBUTES = {
    "num_heads": _INT,
    "kv_num_heads": _INT,
    "scale": _FLOAT,
    "softcap": _FLOAT,
}


def _attend(
    op: Op,
    dtype: ir.DataType,
    rows: tuple[ir.Value, ir.Value, ir.Value],
    pasts: tuple[ir.Value, ir.Value],
    write_index: ir.Value,
    visible: ir.Value,
    sinks: ir.Value | None = None,
) -> tuple[ir.Value, ...]:
    """Write `rows` of keys and values, attend; returns y and the caches."""
    kv_heads = op.Shape(pasts[0], start=1, end=2)
    apart = op.Concat(integers(op, 0, 0), kv_heads, integers(op, -1), axis=0)
    merged = integers(op, 0, 0, -1)

    def store(new: ir.Value, past: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The cache, and its form for 3-D Attention: [1, C, kv_num_heads * D]."""
        heads = op.Transpose(op.Reshape(new, apart), perm=[0, 2, 1, 3])
        cache = op.TensorScatter(past, heads, write_index, axis=-2)
        return cache, op.Reshape(op.Transpose(cache, perm=[0, 2, 1, 3]), merged)

    present_key, keys = store(rows[1], pasts[0])
    present_value, values = store(rows[2], pasts[1])
    shut, seen = (
        op.Constant(value=ir.tensor(np.array(number, dtype.numpy())))
        for number in (_MASKED[dtype], 0)
    )
    # The 3-D form, since with the 4-D one TensorRT copies K and V for each query head; one additive
    # mask, which all layers share once equal nodes are merged.
    mask = op.Where(visible, seen, shut)
    if sinks is not None:
        keys, values = (_with_zeros(op, each, seen) for each in (keys, values))
        mask = _with_sinks(op, mask, sinks)
    y = op.Attention(
        rows[0],
        keys,
        values,
        mask,
        q_num_heads=ir.RefAttr("q_num_heads", "num_heads", _INT),
        **of_call(kv_num_heads=_INT, scale=_FLOAT, softcap=_FLOAT),
    )
    return y, present_key, present_value


def cross_attention() -> ir.Function:
    """Attention to given keys and values, all of them visible.

    q [1, S, num_heads * D], key and value [1, num_heads, A, D] -> [1, S, num_heads * D].
    """

    def body(op: Op, q: ir.Value, key: ir.Value, value: ir.Value) -> ir.Value:
        merged = integers(op, 0, 0, -1)
        keys, values = (
            op.Reshape(op.Transpose(each, perm=[0, 2, 1, 3]), merged) for each in (key, value)
        )
        heads = {
            name: ir.RefAttr(name, "num_heads", _INT) for name in ("q_num_heads", "kv_num_heads")
        }
        return op.Attention(q, keys, values, **heads)

    return local_function(onnx_functions.CROSS_ATTENTION, "q key value", body, {"num_heads": _INT})


def _with_zeros(op: Op, rows: ir.Value, zero: ir.Value) -> ir.Value:
    """Rows [1, C, n] and one of zeros after them."""
    shape = op.Concat(integers(op, 1, 1), op.Shape(rows, start=2, end=3), axis=0)
    return op.Concat(rows, op.Expand(zero, shape), axis=1)


def _with_sinks(op: Op, mask: ir.Value, sinks: ir.Value) -> ir.Value:
    """An additive mask [S, C] for each head, and a column of its sink: [1, num_heads, S, C + 1]."""
    one, heads = integers(op, 1), op.Shape(sinks)
    every_head = op.Concat(one, heads, one, one, axis=0)
    masks = op.Expand(op.Unsqueeze(mask, integers(op, 0, 1)), every_head)
    every_row = op.Concat(one, heads, op.Shape(mask, start=0, end=1), one, axis=0)
    column = op.Expand(op.Unsqueeze(sinks, integers(op, 0, 2, 3)), every_row)
    return op.Concat(masks, column, axis=3)


def visible_slots(*, windowed: bool, causal: bool = False) -> ir.Function:
    """Attention mask of cache slots, bool [S, C]: committed ones, and new ones by the tree.

    tree_mask bool [S, M], position_ids int64 [A, S], write_index int64 [1], slots int64 [C], which
    are 0, 1, ... A tree mask wider than the pass covers the M - S slots before the new tokens, too.
    In a window, a token attends to `window` positions, its own included.

    Args:
        windowed: the function has a window.
        causal: without a window: tokens attend to no later ones, though other layers' may.
    """

    def body(
        op: Op, tree_mask: ir.Value, positions: ir.Value, write_index: ir.Value, slots: ir.Value
    ) -> ir.Value:
        zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
        rows = op.Squeeze(op.Shape(positions, start=1, end=2))
        columns = op.Squeeze(op.Shape(tree_mask, start=1, end=2))
        if causal:
            own = op.Add(op.Range(zero, rows, one), op.Sub(columns, rows))  # [S]
            each = op.Unsqueeze(op.Range(zero, columns, one), integers(op, 0))
            not_later = op.LessOrEqual(each, op.Unsqueeze(own, integers(op, 1)))
            tree_mask = op.And(tree_mask, not_later)
        first = op.Sub(op.Add(write_index, rows), columns)
        column = op.Sub(slots, first)  # [C]; negative for committed slots
        is_committed = op.Less(column, zero)
        clipped = op.Clip(column, zero, op.Sub(columns, one))
        in_tree = op.Gather(tree_mask, clipped, axis=1)  # [S, C]
        is_new = op.And(op.GreaterOrEqual(column, zero), op.Less(column, columns))
        visible = op.Or(op.Unsqueeze(is_committed, integers(op, 0)), op.And(is_new, in_tree))
        if not windowed:
            return visible
        # New tokens are at their positions, committed ones at their slots. Nodes of earlier levels
        # count as there, too, where they are in every window that is longer than a tree is deep.
        place = op.Sub(slots, write_index)  # [C]
        newest = op.Clip(place, zero, op.Sub(rows, one))
        own = op.Gather(op.Squeeze(positions, integers(op, 0)), newest)
        stands = op.Where(op.Less(place, zero), slots, own)  # [C]
        width = op.Constant(value_int=ir.RefAttr("value_int", "window", _INT))
        oldest = op.Sub(positions, width)
        within = op.Greater(stands, op.Transpose(oldest, perm=[1, 0]))  # [S, C]
        return op.And(visible, within)

    unbounded = onnx_functions.VISIBLE_BEFORE if causal else onnx_functions.VISIBLE_SLOTS
    name = onnx_functions.VISIBLE_IN_WINDOW if windowed else unbounded
    window = {"window": _INT} if windowed else {}
    return local_function(name, "tree_mask position_ids write_index slots", body, window)


def visible_both_ways(*, windowed: bool) -> ir.Function:
    """Attention mask of an encoder's slots, bool [S, C]: all that are written.

    position_ids int64 [A, S], write_index int64 [1], slots int64 [C], which are 0, 1, ... In a
    window, a token attends to slots less than `window` before or after its own.
    """

    def body(op: Op, positions: ir.Value, write_index: ir.Value, slots: ir.Value) -> ir.Value:
        zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
        rows = op.Squeeze(op.Shape(positions, start=1, end=2))
        own = op.Add(op.Range(zero, rows, one), write_index)  # [S]
        column = op.Unsqueeze(own, integers(op, 1))
        is_written = op.Less(slots, op.Add(write_index, rows))
        visible = op.And(op.Unsqueeze(is_written, integers(op, 0)), op.GreaterOrEqual(column, zero))
        if not windowed:
            return visible
        width = op.Constant(value_int=ir.RefAttr("value_int", "window", _INT))
        return op.And(visible, op.Less(op.Abs(op.Sub(slots, column)), width))

    name = onnx_functions.VISIBLE_AROUND if windowed else onnx_functions.VISIBLE_BOTH_WAYS
    window = {"window": _INT} if windowed else {}
    return local_function(name, "position_ids write_index slots", body, window)


def rotary_tables(dtype: ir.DataType) -> ir.Function:
    """Cos and sin [C, R / 2] of all positions, slots int64 [C], times `scale`; inv_freq [R / 2].

    Constant once the capacity is bound.
    """

    def body(op: Op, slots: ir.Value, inv_freq: ir.Value) -> list[ir.Value]:
        places = op.Unsqueeze(op.Cast(slots, to=int(ir.DataType.FLOAT)), integers(op, 1))
        angles = op.Mul(places, op.Unsqueeze(inv_freq, integers(op, 0)))
        scale = op.Constant(value_float=ir.RefAttr("value_float", "scale", _FLOAT))
        tables = [op.Mul(table, scale) for table in (op.Cos(angles), op.Sin(angles))]
        return (
            tables
            if dtype == ir.DataType.FLOAT
            else [op.Cast(table, to=int(dtype)) for table in tables]
        )

    return local_function(onnx_functions.ROTARY_TABLES, "slots inv_freq", body, {"scale": _FLOAT})


# --------------------------------------------------------------------------- linear layers
def linear() -> ir.Function:
    """Y = x W^T, W [out, in] in any float type."""

    def body(op: Op, x: ir.Value, weight: ir.Value) -> ir.Value:
        return op.MatMul(x, op.Transpose(op.CastLike(weight, x), perm=[1, 0]))

    return local_function(onnx_functions.LINEAR, "x weight", body)


def quantized_linear(*, has_zero_points: bool) -> ir.Function:
    """Y = x ((codes - zero points) * scales), codes [in, out] as in DequantizeLinear."""

    def body(op: Op, x: ir.Value, *stored: ir.Value) -> ir.Value:
        place = of_call(axis=_INT, block_size=_INT)
        return op.MatMul(x, op.DequantizeLinear(*stored, **place))

    name = onnx_functions.SHIFTED_LINEAR if has_zero_points else onnx_functions.QUANTIZED_LINEAR
    inputs = "x codes scales zero_points" if has_zero_points else "x codes scales"
    return local_function(name, inputs, body, {"axis": _INT, "block_size": _INT})


def fp4_linear() -> ir.Function:
    """Y = x W^T, W [out, in] in NVFP4: FLOAT4E2M1 codes, FP8 scales of 16, one scale of these."""

    def body(
        op: Op, x: ir.Value, codes: ir.Value, scales: ir.Value, global_scale: ir.Value
    ) -> ir.Value:
        weight = _fp4_values(op, x, codes, scales, global_scale)
        return op.MatMul(x, op.Transpose(weight, perm=[1, 0]))

    return local_function(onnx_functions.FP4_LINEAR, "x codes scales global_scale", body)


def _fp4_values(
    op: Op, like: ir.Value, codes: ir.Value, scales: ir.Value, global_scale: ir.Value
) -> ir.Value:
    """Dequantize the blocks' FP8 scales, then the codes; [..., K] in the type of `like`."""
    floats = op.DequantizeLinear(scales, global_scale)
    values = op.DequantizeLinear(codes, floats, axis=-1, block_size=FP4_BLOCK)
    return op.CastLike(values, like)


# --------------------------------------------------------------- inputs of quantized layers
def smooth_input() -> ir.Function:
    """X * factors, [..., in]: smoothing that could not be folded into the previous layer."""

    def body(op: Op, x: ir.Value, factors: ir.Value) -> ir.Value:
        return op.Mul(x, op.CastLike(factors, x))

    return local_function(onnx_functions.SMOOTH_INPUT, "x factors", body)


def round_input() -> ir.Function:
    """X rounded with one scale, as floats."""

    def body(op: Op, x: ir.Value, scale: ir.Value, zero_point: ir.Value) -> ir.Value:
        codes = op.QuantizeLinear(x, scale, zero_point)
        return op.DequantizeLinear(codes, scale, zero_point)

    return local_function(onnx_functions.ROUND_INPUT, "x scale zero_point", body)


def round_input_fp4() -> ir.Function:
    """X [..., K] rounded to NVFP4, as floats."""

    def body(op: Op, x: ir.Value, global_scale: ir.Value) -> ir.Value:
        codes, scales = call(
            op, dynamic_quantize(), x, global_scale, axis=-1, block_size=FP4_BLOCK, scale_type=17
        )
        codes.type = ir.TensorType(ir.DataType.FLOAT4E2M1)
        scales.type = ir.TensorType(ir.DataType.FLOAT8E4M3FN)
        return _fp4_values(op, x, codes, scales, global_scale)

    return local_function(onnx_functions.ROUND_INPUT_FP4, "x global_scale", body)


def block_scales(
    op: Op, x: ir.Value, global_scale: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The shape of x [..., K], its blocks float32 [..., K / 16, 16] and FP8 scales [..., 1]."""

    def number(value: float) -> ir.Value:
        return op.Constant(value_float=value)

    floats = op.Cast(x, to=int(ir.DataType.FLOAT))
    extent = op.Shape(floats)
    leading = op.Slice(extent, integers(op, 0), integers(op, -1), integers(op, 0))
    blocks = op.Reshape(floats, op.Concat(leading, integers(op, -1, FP4_BLOCK), axis=0))
    amax = op.ReduceMax(op.Abs(blocks), integers(op, -1), keepdims=1)
    wanted = op.Div(op.Div(amax, number(LARGEST_FP4)), global_scale)
    limited = op.Min(op.Max(wanted, number(_SMALLEST_FP8)), number(_LARGEST_FP8))
    return extent, blocks, op.Cast(limited, to=int(ir.DataType.FLOAT8E4M3FN))


def dynamic_quantize() -> ir.Function:
    """X [..., K] to FLOAT4E2M1 codes [..., K] and FLOAT8E4M3FN scales [..., K / 16].

    TensorRT (10.8 and newer) has an importer for the operator; other runtimes use its body.
    """

    def body(op: Op, x: ir.Value, global_scale: ir.Value) -> tuple[ir.Value, ir.Value]:
        def number(value: float) -> ir.Value:
            return op.Constant(value_float=value)

        extent, blocks, scales = block_scales(op, x, global_scale)
        effective = op.Mul(op.Cast(scales, to=int(ir.DataType.FLOAT)), global_scale)
        ratio = op.Div(blocks, effective)
        ratio = op.Min(op.Max(ratio, number(-LARGEST_FP4)), number(LARGEST_FP4))
        codes = op.Cast(op.Reshape(ratio, extent), to=int(ir.DataType.FLOAT4E2M1))
        return codes, op.Squeeze(scales, integers(op, -1))

    attributes = {"axis": _INT, "block_size": _INT, "scale_type": _INT}
    return local_function(
        "TRT_FP4DynamicQuantize", "x global_scale", body, attributes, domain="trt"
    )
