"""Attention on a linear cache in plain products, for CUDA.

ONNX Runtime's CUDA kernel of GroupQueryAttention takes no mask, as trees need one, and no float32.
So keys and values are scattered into the cache and the live part of it is multiplied head by head:
all query heads of a key head are rows of one product, so that no key is written twice.

What depends on the length of the context comes from the host: which slots are visible, and where
the new rows go. So no node computes sizes, which ONNX Runtime would place on the CPU.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm import contract
from edgellm.build.lowering.attention import CachedAttention
from edgellm.build.lowering.calls import find_calls, require_known
from edgellm.build.lowering.contrib_ops import LOWERED_OPSET, MASKED, rotate, row_tables
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.weights import constant_array, parameter_name
from edgellm.contract import BrokenArtifactError, UnsupportedModelError
from edgellm.device_runtime.runners.onnxruntime_cuda.slots import (
    KEPT,
    SLOTS,
    VISIBLE,
    VISIBLE_IN_WINDOW,
)
from edgellm.manifest import KVCacheSpec

_CONTRIB = "com.microsoft"


def lower_cached_attention(graph: GraphEditor, dtype: ir.DataType, capacity: int) -> None:
    """Rewrite all cached attention of a decoder or draft, and what its layers share."""
    _lower_tables(graph, dtype, capacity)
    layers = CachedAttention.all_of(graph.graph, takes_sinks=True)
    kv_num_heads = layers[0].kv_num_heads
    if any(layer.kv_num_heads != kv_num_heads for layer in layers):
        raise UnsupportedModelError("layers with other key heads are not lowered for CUDA")
    seen = _visible_inputs(graph.graph, layers)
    slots = _input(graph.graph, SLOTS, ir.DataType.INT64, [1, kv_num_heads, "rows", 3])
    graph.cursor = graph.graph[0]
    live = graph.node("Shape", [next(iter(seen.values()))], start=1, end=2)
    masks: dict[tuple[ir.Value, int], ir.Value] = {}  # by query heads of a key head
    tables: dict[ir.Value, tuple[ir.Value, ...]] = {}
    for layer in layers:
        graph.cursor = layer.call
        group = layer.num_heads // kv_num_heads
        if (layer.visible, group) not in masks:
            masks[layer.visible, group] = _mask(graph, seen[layer.visible], group, dtype)
        q, k = _rotated(graph, layer, tables)
        apart = graph.constant(
            "key_heads", np.array([0, 0, kv_num_heads, layer.head_dim], np.int64)
        )
        caches = []
        for rows, past in ((k, layer.past_key), (layer.v, layer.past_value)):
            by_head = graph.node(
                "Transpose", [graph.node("Reshape", [rows, apart])], perm=[0, 2, 1, 3]
            )
            caches.append(graph.node("ScatterND", [past, slots, by_head]))
        y = _attend(graph, q, caches, masks[layer.visible, group], live, layer, dtype)
        for old, new in zip(layer.outputs, (y, *caches), strict=True):
            graph.replace(old, new)


def _visible_inputs(graph: ir.Graph, layers: list[CachedAttention]) -> dict[ir.Value, ir.Value]:
    """What the host says instead of each mask: one of all positions, one of a window."""
    found: dict[ir.Value, ir.Value] = {}
    for call in find_calls(graph, contract.VISIBLE_SLOTS, contract.VISIBLE_IN_WINDOW):
        require_known(call, "window")
        is_windowed = call.op_type == contract.VISIBLE_IN_WINDOW
        name = VISIBLE_IN_WINDOW if is_windowed else VISIBLE
        if any(value.name == name for value in found.values()):
            raise UnsupportedModelError("windows of several widths are not lowered for CUDA")
        found[call.outputs[0]] = _input(graph, name, ir.DataType.BOOL, ["rows", "live"])
    if any(layer.visible not in found for layer in layers):
        raise UnsupportedModelError("a mask that is not made of the tree's is not lowered for CUDA")
    return found


def _rotated(
    graph: GraphEditor, layer: CachedAttention, tables: dict[ir.Value, tuple[ir.Value, ...]]
) -> tuple[ir.Value | None, ...]:
    """Queries and keys."""
    if layer.cos is None or layer.sin is None:
        return layer.q, layer.k
    if layer.cos not in tables:
        is_by_row = layer.positions is None
        rows = row_tables(graph, layer.cos, layer.sin) if is_by_row else ()
        tables[layer.cos] = rows or (layer.positions, layer.cos, layer.sin)  # type: ignore[assignment]
    flags = layer.interleaved, layer.rotary_embedding_dim
    return tuple(
        rotate(graph, x, tables[layer.cos], heads, *flags)
        for x, heads in ((layer.q, layer.num_heads), (layer.k, layer.kv_num_heads))
    )


def _input(graph: ir.Graph, name: str, dtype: ir.DataType, shape: list[int | str]) -> ir.Value:
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
    graph.inputs.append(value)
    return value


def _mask(graph: GraphEditor, visible: ir.Value, group: int, dtype: ir.DataType) -> ir.Value:
    """Additive [S * group, T]: a row for each query head of a key head."""
    shut, open_ = (
        graph.constant(name, np.array(number, dtype.numpy()))
        for name, number in (("shut", MASKED[dtype]), ("open", 0))
    )
    mask = graph.node("Where", [visible, open_, shut])
    if group == 1:
        return mask
    apart = graph.node("Unsqueeze", [mask, graph.constant("group_axis", np.array([1], np.int64))])
    times = graph.constant(f"group_{group}", np.array([1, group, 1], np.int64))
    return graph.node("Flatten", [graph.node("Expand", [apart, times])], axis=2)


def _lower_tables(graph: GraphEditor, dtype: ir.DataType, capacity: int) -> None:
    """Tables of all positions as weights, in float32 as the function's body computes them."""
    for call in find_calls(graph.graph, contract.ROTARY_TABLES):
        require_known(call, "scale")
        frequencies = call.inputs[1]
        assert frequencies is not None and frequencies.const_value is not None  # noqa: PT018
        angles = np.arange(capacity, dtype=np.float32)[:, None] * frequencies.const_value.numpy()
        scale = np.float32(call.attributes["scale"].as_float())
        for output, turn in zip(call.outputs, (np.cos, np.sin), strict=True):
            table = (turn(angles) * scale).astype(dtype.numpy())
            name = f"{call.name}.{turn.__name__}"
            graph.replace(output, graph.weight(name, lambda table=table: table))


def _attend(
    graph: GraphEditor,
    q: ir.Value | None,
    caches: list[ir.Value],
    mask: ir.Value,
    live: ir.Value,
    layer: CachedAttention,
    dtype: ir.DataType,
) -> ir.Value:
    """Q [1, S, heads * D] over the first T slots of keys and values [1, K, C, D]."""

    def shape(name: str, *dims: int) -> ir.Value:
        return graph.constant(name, np.array(dims, np.int64))

    keys_heads, size = layer.kv_num_heads, layer.head_dim
    group = layer.num_heads // keys_heads
    zero, axis = shape("first_slot", 0), shape("slot_axis", 2)
    keys, values = (graph.node("Slice", [cache, zero, live, axis]) for cache in caches)
    apart = graph.node("Reshape", [q, shape(f"heads_apart_{group}", 0, 0, keys_heads, group, size)])
    by_key = graph.node("Transpose", [apart], perm=[0, 2, 1, 3, 4])  # [1, K, S, G, D]
    rows = graph.node("Reshape", [by_key, shape("rows_of_keys", 0, keys_heads, -1, size)])
    scale = size**-0.5 if layer.scale is None else layer.scale
    cap = layer.softcap or 1.0
    scores = graph.node(
        "FusedMatMul", [rows, keys], domain=_CONTRIB, transB=1, alpha=scale / cap
    )  # [1, K, S * G, T]
    if layer.softcap:
        bound = graph.constant(f"softcap_{cap}", np.array(cap, dtype.numpy()))
        scores = graph.node("Mul", [graph.node("Tanh", [scores]), bound])
    weights = _shares(graph, graph.node("Add", [scores, mask]), live, layer, dtype)
    y = graph.node("MatMul", [weights, values])  # [1, K, S * G, D]
    back = graph.node("Reshape", [y, shape(f"rows_apart_{group}", 0, keys_heads, -1, group, size)])
    merged = graph.node("Transpose", [back], perm=[0, 2, 1, 3, 4])  # [1, S, K, G, D]
    return graph.node("Reshape", [merged, shape("heads_merged", 0, 0, -1)])


def _shares(
    graph: GraphEditor, scores: ir.Value, live: ir.Value, layer: CachedAttention, dtype: ir.DataType
) -> ir.Value:
    """Softmax over the slots, [1, K, S * G, T]; a sink is a further slot that gives nothing."""
    if layer.sinks is None:
        return graph.node("Softmax", [scores], axis=-1)

    def numbers(name: str, *values: int) -> ir.Value:
        return graph.constant(name, np.array(values, np.int64))

    keys_heads, group = layer.kv_num_heads, layer.num_heads // layer.kv_num_heads
    sinks = _sinks(graph, layer, dtype)
    zero, one, axis = numbers("first_slot", 0), numbers("second_slot", 1), numbers("last_axis", 3)
    first = graph.node("Slice", [scores, zero, one, axis])
    apart = graph.node(
        "Reshape", [first, numbers(f"heads_of_keys_{group}", 0, keys_heads, -1, group)]
    )
    each = graph.node("Add", [graph.node("Sub", [apart, apart]), sinks])
    column = graph.node("Reshape", [each, numbers("sink_of_rows", 0, keys_heads, -1, 1)])
    both = graph.node("Concat", [scores, column], axis=-1)
    return graph.node("Slice", [graph.node("Softmax", [both], axis=-1), zero, live, axis])


def _sinks(graph: GraphEditor, layer: CachedAttention, dtype: ir.DataType) -> ir.Value:
    """[1, K, 1, G]."""
    assert layer.sinks is not None
    array = constant_array(layer.sinks)
    if array is None:
        raise BrokenArtifactError(
            f"{layer.call.name}: the sinks are not a stored weight", hint="export the bundle again"
        )
    rows = array.reshape(1, layer.kv_num_heads, 1, -1).astype(dtype.numpy())
    return graph.weight(f"{parameter_name(layer.sinks)}.sinks", lambda: rows)


def rows_graph(spec: KVCacheSpec, capacity: int) -> ir.Model:
    """The graph that moves rows of all caches in place: those of KEPT go to SLOTS."""
    dtype = ir.DataType[{"float16": "FLOAT16", "float32": "FLOAT"}[spec.dtype]]
    shape = [1, spec.num_kv_heads, capacity, spec.head_dim]
    kept = ir.Value(name=KEPT, shape=ir.Shape(["kept"]), type=ir.TensorType(ir.DataType.INT64))
    slots = ir.Value(
        name=SLOTS,
        shape=ir.Shape([1, spec.num_kv_heads, "kept", 3]),
        type=ir.TensorType(ir.DataType.INT64),
    )
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
        [kept, slots, *pasts], presents, nodes=nodes, opset_imports={"": LOWERED_OPSET}, name="rows"
    )
    return ir.Model(graph, ir_version=10, producer_name="edgellm")
