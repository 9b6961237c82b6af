"""Attention on a linear cache as GroupQueryAttention on shared past and present buffers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.attention import CachedAttention, packed_rows
from edgellm.build.lowering.contrib_ops import CACHE_NAMES, CONTRIB, MASKED, rotate, row_tables
from edgellm.build.lowering.function_calls import find_calls
from edgellm.build.lowering.graph import GraphEditor
from edgellm.core import graph_io, onnx_functions
from edgellm.core.model_spec import CacheRanges

_CAUSAL_MASKS = (
    onnx_functions.VISIBLE_SLOTS,
    onnx_functions.VISIBLE_IN_WINDOW,
    onnx_functions.VISIBLE_BEFORE,
)
_FIRST_SCALE = 12  # inputs of GroupQueryAttention: k_scale, v_scale


def lower_attention(graph: GraphEditor, *, needs_mask: bool) -> None:
    """Rewrite all cached attention; `needs_mask` is False for graphs of one token."""
    graph.cursor = graph.graph[0]
    lengths = _sequence_lengths(graph)
    if needs_mask:
        _see_live_slots(graph, lengths[2])
    biases: dict[ir.Value, ir.Value] = {}
    tables: dict[ir.Value, tuple[ir.Value, ...]] = {}
    for layer in CachedAttention.all_of(graph.graph):
        graph.cursor = layer.call
        if needs_mask and layer.visible not in biases:
            biases[layer.visible] = _attention_bias(graph, layer.visible)
        if layer.cos is not None and layer.sin is not None and layer.cos not in tables:
            if layer.positions is None:
                tables[layer.cos] = row_tables(graph, layer.cos, layer.sin)
            elif not layer.turns_inside:
                tables[layer.cos] = layer.positions, layer.cos, layer.sin
        rotation = None if layer.cos is None else tables.get(layer.cos)
        _emit_gqa(graph, layer, lengths, biases.get(layer.visible), rotation)


def _sequence_lengths(graph: GraphEditor) -> tuple[ir.Value, ir.Value, ir.Value]:
    """seqlens_k int32 [1], total_sequence_length int32 [] and the same as int64 []."""
    inputs = {value.name: value for value in graph.graph.inputs}
    rows = graph.node("Shape", [inputs[graph_io.INPUT_IDS]], start=1, end=2)
    total = graph.node("Add", [inputs[graph_io.WRITE_INDEX], rows])
    last = graph.node("Sub", [total, graph.constant("one_row", np.array([1], np.int64))])
    scalar = graph.node("Squeeze", [total])
    int32 = int(ir.DataType.INT32)
    seqlens_k = graph.node("Cast", [last], to=int32)
    return seqlens_k, graph.node("Cast", [scalar], to=int32), scalar


def _see_live_slots(graph: GraphEditor, total: ir.Value) -> None:
    """Cut masks to the T used positions instead of all C."""
    bounds = (
        graph.constant(name, np.array(number, np.int64))
        for name, number in (("first_slot", 0), ("next_slot", 1))
    )
    first, step = bounds
    live = graph.node("Range", [first, total, step])
    for call in find_calls(graph.graph, *_CAUSAL_MASKS):
        call.replace_input_with(3, live)


def _attention_bias(graph: GraphEditor, visible: ir.Value) -> ir.Value:
    """Bool [S, T] as an additive mask [1, 1, S, T]."""
    shut, seen = (
        graph.constant(name, np.float32(number))
        for name, number in (("shut", MASKED[ir.DataType.FLOAT]), ("seen", 0))
    )
    axes = graph.constant("batch_and_head", np.array([0, 1], np.int64))
    return graph.node("Unsqueeze", [graph.node("Where", [visible, seen, shut]), axes])


def _emit_gqa(
    graph: GraphEditor,
    layer: CachedAttention,
    lengths: tuple[ir.Value, ir.Value, ir.Value],
    bias: ir.Value | None,
    tables: tuple[ir.Value, ...] | None,
) -> None:
    q, k, v = layer.q, layer.k, layer.v
    cos, sin, positions = layer.cos, layer.sin, layer.positions
    if tables is not None:
        flags = layer.interleaved, layer.rotary_embedding_dim
        q = rotate(graph, q, tables, layer.num_heads, *flags)
        k = rotate(graph, k, tables, layer.kv_num_heads, *flags)
        cos = sin = positions = None
    packed = packed_rows(q, k, v)
    given = {"scale": layer.scale, "softcap": layer.softcap}
    given |= {"rotary_interleaved": 1} if cos is not None and layer.interleaved else {}
    outputs = graph.nodes(
        "GroupQueryAttention",
        [
            *((packed, None, None) if packed is not None else (q, k, v)),
            layer.past_key, layer.past_value, *lengths[:2], cos, sin,
            None if bias is None else positions, bias,
        ],
        3,
        domain=CONTRIB,
        num_heads=layer.num_heads,
        kv_num_heads=layer.kv_num_heads,
        do_rotary=int(cos is not None),
        **{name: value for name, value in given.items() if value is not None},
    )  # fmt: skip
    for old, new in zip(layer.outputs, outputs, strict=True):
        graph.replace(old, new)


def narrow_cache(graph: GraphEditor, ranges: CacheRanges) -> None:
    """Store keys and values as int8 with one scale for each tensor."""
    for value in (*graph.graph.inputs, *graph.graph.outputs):
        if str(value.name).startswith(CACHE_NAMES):
            value.type = ir.TensorType(ir.DataType.INT8)
    nodes = graph.find("GroupQueryAttention")
    for node, *pair in zip(nodes, ranges.keys, ranges.values, strict=True):
        graph.cursor = node
        scales = [
            graph.constant(f"{node.name}.{part}_scale", np.array([largest / 127], np.float32))
            for part, largest in zip("kv", pair, strict=True)
        ]
        node.resize_inputs(_FIRST_SCALE + 2)
        for index, scale in enumerate(scales, _FIRST_SCALE):
            node.replace_input_with(index, scale)
        for part in "kv":
            node.attributes[f"{part}_quant_type"] = ir.AttrString(
                f"{part}_quant_type", "PER_TENSOR"
            )
        node.attributes["kv_cache_bit_width"] = ir.AttrInt64("kv_cache_bit_width", 8)
