"""Attention on a linear cache in plain products, for CUDA.

ONNX Runtime's CUDA kernel of GroupQueryAttention takes no mask, as trees need one, and no float32.
So keys and values are scattered into the cache and the live part of it is multiplied head by head:
all query heads of a key head are rows of one product, so that no key is written twice.

What depends on the length of the context comes from the host: which slots are visible, and where
the new rows go. So no node computes sizes, which ONNX Runtime would place on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm import contract
from edgellm.build.lowering.contrib_ops import (
    CONTRIB,
    LOWERED_OPSET,
    find_producer,
    first_compute_node,
    row_tables,
)
from edgellm.build.lowering.graph import GraphEditor
from edgellm.contract import KVCacheSpec
from edgellm.device_runtime.runners.onnxruntime_graphs import KEPT, SLOTS, VISIBLE

_MASKED = {ir.DataType.FLOAT: -1e30, ir.DataType.FLOAT16: -3e4}


@dataclass(frozen=True, slots=True)
class _Heads:
    """Sizes of all layers."""

    keys: int
    group: int  # query heads of a key head
    size: int


def lower_cached_attention(graph: GraphEditor, dtype: ir.DataType, capacity: int) -> None:
    """Rewrite all Attention, RotaryEmbedding and TensorScatter nodes of a decoder or draft."""
    nodes = graph.find("Attention")
    visible = _input(graph.graph, VISIBLE, ir.DataType.BOOL, ["rows", "live"])
    (heads,) = {_heads(node) for node in nodes}
    slots = _input(graph.graph, SLOTS, ir.DataType.INT64, [1, heads.keys, "rows", 3])
    graph.cursor = first_compute_node(graph)
    live = graph.node("Shape", [visible], start=1, end=2)
    mask = _mask(graph, visible, heads.group, dtype)
    _lower_rotary(graph, dtype, capacity)
    for node in graph.find("TensorScatter"):
        graph.cursor = node
        past, rows, _ = node.inputs
        graph.replace(node.outputs[0], graph.node("ScatterND", [past, slots, rows]))
    for node in nodes:
        graph.cursor = node
        caches = [find_producer(value, "ScatterND").outputs[0] for value in node.inputs[1:3]]
        y = _attend(graph, node.inputs[0], caches, mask, live, heads)
        graph.replace(node.outputs[0], y)


def _input(graph: ir.Graph, name: str, dtype: ir.DataType, shape: list[int | str]) -> ir.Value:
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
    graph.inputs.append(value)
    return value


def _heads(attention: ir.Node) -> _Heads:
    queries, keys = (
        attention.attributes[f"{part}_num_heads"].as_int() for part in ("q", "kv")
    )  # fmt: skip
    past = find_producer(attention.inputs[1], "TensorScatter").inputs[0]
    assert past is not None
    assert past.shape is not None
    # A cache's head size is never symbolic.
    return _Heads(keys, queries // keys, int(past.shape[3]))  # type: ignore[arg-type]


def _mask(graph: GraphEditor, visible: ir.Value, group: int, dtype: ir.DataType) -> ir.Value:
    """Additive [S * group, T]: a row for each query head of a key head."""
    shut, open_ = (
        graph.constant(name, np.array(number, dtype.numpy()))
        for name, number in (("shut", _MASKED[dtype]), ("open", 0))
    )
    mask = graph.node("Where", [visible, open_, shut])
    if group == 1:
        return mask
    apart = graph.node("Unsqueeze", [mask, graph.constant("group_axis", np.array([1], np.int64))])
    times = graph.constant("group", np.array([1, group, 1], np.int64))
    return graph.node("Flatten", [graph.node("Expand", [apart, times])], axis=2)


def _lower_rotary(graph: GraphEditor, dtype: ir.DataType, capacity: int) -> None:
    nodes = graph.find("RotaryEmbedding")
    own = row_tables(graph, nodes[0])
    if own is None:
        _, cos, sin, positions = nodes[0].inputs
        tables = [
            graph.weight(f"rope.{name}", lambda v=value: _table(v, capacity).astype(dtype.numpy()))
            for name, value in (("cos", cos), ("sin", sin))
        ]
        own = (positions, *tables)
    for node in nodes:
        graph.cursor = node
        y = graph.node("RotaryEmbedding", [node.inputs[0], *own], domain=CONTRIB)
        graph.replace(node.outputs[0], y)


def _table(value: ir.Value | None, capacity: int) -> np.ndarray:
    """What the nodes of a rope table compute, whose only variable is the capacity."""
    assert value is not None
    if value.const_value is not None:
        return value.const_value.numpy()
    node = value.producer()
    assert node is not None
    if node.op_type == "Range":
        return np.arange(capacity)
    inputs = [_table(each, capacity) for each in node.inputs]
    if node.op_type == "Cast":
        return inputs[0].astype(ir.DataType(node.attributes["to"].as_int()).numpy())
    if node.op_type == "Unsqueeze":
        return np.expand_dims(inputs[0], tuple(inputs[1]))
    compute = {"Mul": np.multiply, "Cos": np.cos, "Sin": np.sin}[node.op_type]
    return compute(*inputs)


def _attend(
    graph: GraphEditor,
    q: ir.Value | None,
    caches: list[ir.Value],
    mask: ir.Value,
    live: ir.Value,
    heads: _Heads,
) -> ir.Value:
    """Q [1, S, heads * D] over the first T slots of keys and values [1, K, C, D]."""

    def shape(name: str, *dims: int) -> ir.Value:
        return graph.constant(name, np.array(dims, np.int64))

    zero, axis = shape("first_slot", 0), shape("slot_axis", 2)
    keys, values = (graph.node("Slice", [cache, zero, live, axis]) for cache in caches)
    apart = graph.node(
        "Reshape", [q, shape("heads_apart", 0, 0, heads.keys, heads.group, heads.size)]
    )
    by_key = graph.node("Transpose", [apart], perm=[0, 2, 1, 3, 4])  # [1, K, S, G, D]
    rows = graph.node("Reshape", [by_key, shape("rows_of_keys", 0, heads.keys, -1, heads.size)])
    scores = graph.node(
        "FusedMatMul", [rows, keys], domain=CONTRIB, transB=1, alpha=float(heads.size**-0.5)
    )  # [1, K, S * G, T]
    weights = graph.node("Softmax", [graph.node("Add", [scores, mask])], axis=-1)
    y = graph.node("MatMul", [weights, values])  # [1, K, S * G, D]
    back = graph.node(
        "Reshape", [y, shape("rows_apart", 0, heads.keys, -1, heads.group, heads.size)]
    )
    merged = graph.node("Transpose", [back], perm=[0, 2, 1, 3, 4])  # [1, S, K, G, D]
    return graph.node("Reshape", [merged, shape("heads_merged", 0, 0, -1)])


def rows_graph(spec: KVCacheSpec, capacity: int) -> ir.Model:
    """The graph that moves rows of all caches in place: those of KEPT go to SLOTS."""
    dtype = ir.DataType[{"float16": "FLOAT16", "float32": "FLOAT"}[spec.dtype]]
    shape = [1, spec.num_kv_heads, capacity, spec.head_dim]
    kept = ir.Value(name=KEPT, shape=ir.Shape(["kept"]), type=ir.TensorType(ir.DataType.INT64))
    slots = ir.Value(
        name=SLOTS, shape=ir.Shape([1, spec.num_kv_heads, "kept", 3]),
        type=ir.TensorType(ir.DataType.INT64),
    )  # fmt: skip
    nodes, pasts, presents = [], [], []
    for layer in range(spec.num_layers):
        for part in ("key", "value"):
            past, present = (
                ir.Value(name=name(layer, part), shape=ir.Shape(shape), type=ir.TensorType(dtype))
                for name in (contract.past_name, contract.present_name)
            )
            rows = ir.node("Gather", [past, kept], {"axis": 2})
            rows.outputs[0].name = f"rows.{layer}.{part}"
            nodes += [rows, ir.node("ScatterND", [past, slots, rows.outputs[0]], outputs=[present])]
            pasts.append(past)
            presents.append(present)
    graph = ir.Graph(
        [kept, slots, *pasts], presents, nodes=nodes, opset_imports={"": LOWERED_OPSET},
        name="rows",
    )  # fmt: skip
    return ir.Model(graph, ir_version=10, producer_name="edgellm")
