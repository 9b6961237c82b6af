"""Attention on a linear cache as GroupQueryAttention on shared past and present buffers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm import contract
from edgellm.build.lowering.contrib_ops import (
    CACHE_NAMES,
    CONTRIB,
    find_producer,
    first_compute_node,
    row_tables,
)
from edgellm.build.lowering.graph import GraphEditor
from edgellm.contract import CacheRanges

_FIRST_SCALE = 12  # inputs of GroupQueryAttention: k_scale, v_scale


def lower_attention(graph: GraphEditor, *, needs_mask: bool) -> None:
    """Rewrite all Attention nodes; `needs_mask` False for graphs of one row, which sees all."""
    nodes = graph.find("Attention")
    graph.cursor = first_compute_node(graph)
    lengths = _sequence_lengths(graph)
    rows = row_tables(graph, find_producer(nodes[0].inputs[0], "RotaryEmbedding"))
    bias = _attention_bias(graph, nodes[0], lengths[2]) if needs_mask else None
    for node in nodes:
        graph.cursor = node
        _emit_gqa(graph, node, lengths, bias, rows)


def _sequence_lengths(graph: GraphEditor) -> tuple[ir.Value, ir.Value, ir.Value]:
    """seqlens_k int32 [1], total_sequence_length int32 [] and the same as int64 []."""
    inputs = {value.name: value for value in graph.graph.inputs}
    rows = graph.node("Shape", [inputs[contract.INPUT_IDS]], start=1, end=2)
    total = graph.node("Add", [inputs[contract.WRITE_INDEX], rows])
    last = graph.node("Sub", [total, graph.constant("one_row", np.array([1], np.int64))])
    scalar = graph.node("Squeeze", [total])
    int32 = int(ir.DataType.INT32)
    seqlens_k = graph.node("Cast", [last], to=int32)
    return seqlens_k, graph.node("Cast", [scalar], to=int32), scalar


def _attention_bias(graph: GraphEditor, attention: ir.Node, total: ir.Value) -> ir.Value:
    """The shared additive mask as [1, 1, S, T] over the T live slots instead of all C."""
    mask = attention.inputs[3]
    slots = next(node for node in graph.graph if node.op_type == "Range")
    zero, step = slots.inputs[0], slots.inputs[2]
    graph_cursor, graph.cursor = graph.cursor, slots
    _move_before(graph, total, slots)
    live = graph.node("Range", [zero, total, step])
    graph.cursor = graph_cursor
    for user, index in tuple(slots.outputs[0].uses()):
        if user.op_type != "Cast":  # the rope tables keep all slots
            user.replace_input_with(index, live)
    assert mask is not None
    axes = graph.constant("batch_and_head", np.array([0, 1], np.int64))
    return graph.node("Unsqueeze", [mask, axes])


def _move_before(graph: GraphEditor, value: ir.Value, anchor: ir.Node) -> None:
    """Move the nodes that compute `value` from graph inputs to a place before `anchor`."""
    chain: list[ir.Node] = []
    pending = [value]
    while pending:
        node = pending.pop().producer()
        if node is not None and node not in chain:
            chain.append(node)
            pending += [source for source in node.inputs if source is not None]
    for node in reversed(chain):
        graph.graph.remove(node)
        graph.graph.insert_before(anchor, node)


def _emit_gqa(
    graph: GraphEditor,
    attention: ir.Node,
    lengths: tuple[ir.Value, ir.Value, ir.Value],
    bias: ir.Value | None,
    rows: tuple[ir.Value, ...] | None,
) -> None:
    rotary, key_cache, value_cache = (
        find_producer(attention.inputs[0], "RotaryEmbedding"),
        find_producer(attention.inputs[1], "TensorScatter"),
        find_producer(attention.inputs[2], "TensorScatter"),
    )
    q, *tables = rotary.inputs
    k = find_producer(key_cache.inputs[1], "RotaryEmbedding").inputs[0]
    v = find_producer(value_cache.inputs[1], "Reshape").inputs[0]
    if rows is None:
        cos, sin, positions = tables
    else:
        q, k = (graph.node("RotaryEmbedding", [x, *rows], domain=CONTRIB) for x in (q, k))
        cos = sin = positions = None
    packed = _packed(q, k, v)
    heads = {
        "num_heads": attention.attributes["q_num_heads"].as_int(),
        "kv_num_heads": attention.attributes["kv_num_heads"].as_int(),
    }
    past = [cache.inputs[0] for cache in (key_cache, value_cache)]
    outputs = graph.nodes(
        "GroupQueryAttention",
        [
            *((packed, None, None) if packed is not None else (q, k, v)),
            *past, *lengths[:2], cos, sin, None if bias is None else positions, bias,
        ],
        3,
        domain=CONTRIB,
        do_rotary=int(rows is None),
        **heads,
    )  # fmt: skip
    olds = attention.outputs[0], key_cache.outputs[0], value_cache.outputs[0]
    for old, new in zip(olds, outputs, strict=True):
        graph.replace(old, new)


def narrow_cache(graph: GraphEditor, ranges: CacheRanges) -> None:
    """Let attention write int8 rows and read them back through one scale of each tensor."""
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


def _packed(*qkv: ir.Value | None) -> ir.Value | None:
    """The merged projection that q, k and v were split from, if nothing lies between."""
    nodes = {value.producer() if value is not None else None for value in qkv}
    node = nodes.pop()
    if nodes or node is None or node.op_type != "Split" or tuple(node.outputs) != qkv:
        return None
    return node.inputs[0]
