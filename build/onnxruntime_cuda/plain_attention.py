"""Attention on a linear cache as plain products, for CUDA: float32, sinks with trees, odd heads.

Keys and values are scattered into the cache, and its used part is multiplied by key head: all query
heads of a key head are rows of one product, so that no key is copied.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.attention import CachedAttention
from edgellm.build.lowering.contrib_ops import CONTRIB, LOWERED_OPSET, LOWEST, rotate
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.weights import constant_array, parameter_name
from edgellm.core import graph_io
from edgellm.core.errors import (
    BrokenArtifactError,
    UnsupportedModelError,
)
from edgellm.core.model_spec import KVCacheSpec
from edgellm.device_runtime.runners.onnxruntime_cuda.attention_inputs import KEPT, SLOTS


class PlainLayers:
    """Emits layers that share masks and slots."""

    def __init__(
        self,
        *,
        graph: GraphEditor,
        dtype: ir.DataType,
        seen: Mapping[ir.Value, ir.Value],
        batch: int | str = 1,
    ) -> None:
        """`seen`: inputs bool [B, 1, S, T] that replace the portable masks."""
        self._graph, self._dtype, self._seen, self._batch = graph, dtype, seen, batch
        self._kv_num_heads = 0
        self._slots: ir.Value | None = None
        self._live: ir.Value | None = None
        self._masks: dict[tuple[ir.Value, int], ir.Value] = {}  # by query heads of a key head

    def emit(self, layer: CachedAttention, tables: tuple[ir.Value, ...]) -> tuple[ir.Value, ...]:
        """Rows [B, S, num_heads * D] and the caches.

        Args:
            layer: at the graph's cursor.
            tables: positions, cos and sin; () without RoPE.

        Raises:
            UnsupportedModelError: the number of key heads differs from another layer's.
        """
        graph, heads = self._graph, layer.kv_num_heads
        if self._slots is None:
            self._kv_num_heads = heads
            self._slots = graph.input(SLOTS, ir.DataType.INT64, [self._batch, heads, "rows", 3])
            self._live = graph.node("Shape", [self._seen[layer.visible]], start=3, end=4)
        if heads != self._kv_num_heads:
            raise UnsupportedModelError("layers with other key heads are not lowered for CUDA")
        q, k = layer.q, layer.k
        if tables:
            flags = layer.interleaved, layer.rotary_embedding_dim
            q = rotate(graph, q, tables, layer.num_heads, *flags)
            k = rotate(graph, k, tables, heads, *flags)
        apart = graph.constant("key_heads", np.array([0, 0, heads, layer.head_dim], np.int64))
        caches = []
        for rows, past in ((k, layer.past_key), (layer.v, layer.past_value)):
            by_head = graph.node(
                "Transpose", [graph.node("Reshape", [rows, apart])], perm=[0, 2, 1, 3]
            )
            caches.append(graph.node("ScatterND", [past, self._slots, by_head]))
        mask = self._mask(layer.visible, layer.num_heads // heads)
        return _attend(graph, q, caches, mask, self._live, layer, self._dtype), *caches

    def _mask(self, visible: ir.Value, group: int) -> ir.Value:
        """Bool [B, 1, group * S, T]: all rows for each query head of a key head."""
        graph, mask = self._graph, self._seen[visible]
        if group == 1:
            return mask
        if (visible, group) not in self._masks:
            self._masks[visible, group] = graph.node("Concat", [mask] * group, axis=2)
        return self._masks[visible, group]


def stored_sinks(
    graph: GraphEditor, layer: CachedAttention, dtype: ir.DataType, shape: tuple[int, ...]
) -> ir.Value:
    """The sinks of all query heads as a weight of this shape.

    Raises:
        BrokenArtifactError: they are computed.
    """
    assert layer.sinks is not None
    array = constant_array(layer.sinks)
    if array is None:
        raise BrokenArtifactError(
            f"{layer.call.name}: the sinks are not a stored weight", hint="export the bundle again"
        )
    rows = array.reshape(shape).astype(dtype.numpy())
    return graph.weight(f"{parameter_name(layer.sinks)}.sinks{len(shape)}", lambda: rows)


def _attend(
    graph: GraphEditor,
    q: ir.Value | None,
    caches: list[ir.Value],
    mask: ir.Value,
    live: ir.Value | None,
    layer: CachedAttention,
    dtype: ir.DataType,
) -> ir.Value:
    """Q [B, S, heads * D] over the first T slots of keys and values [B, K, C, D]."""

    def shape(name: str, *dims: int) -> ir.Value:
        return graph.constant(name, np.array(dims, np.int64))

    keys_heads, size = layer.kv_num_heads, layer.head_dim
    group = layer.num_heads // keys_heads
    zero, axis = shape("first_slot", 0), shape("slot_axis", 2)
    keys, values = (graph.node("Slice", [cache, zero, live, axis]) for cache in caches)
    apart = graph.node("Reshape", [q, shape(f"heads_apart_{group}", 0, 0, keys_heads, group, size)])
    by_key = graph.node("Transpose", [apart], perm=[0, 2, 3, 1, 4])  # [B, K, G, S, D]
    rows = graph.node("Reshape", [by_key, shape("rows_of_keys", 0, keys_heads, -1, size)])
    scale = size**-0.5 if layer.scale is None else layer.scale
    cap = layer.softcap or 1.0
    scores = graph.node(
        "FusedMatMul", [rows, keys], domain=CONTRIB, transB=1, alpha=scale / cap
    )  # [B, K, G * S, T]
    if layer.softcap:
        bound = graph.constant(f"softcap_{cap}", np.array(cap, dtype.numpy()))
        scores = graph.node("Mul", [graph.node("Tanh", [scores]), bound])
    # Replaced, not added to: a high score plus a mask may still exceed unmasked scores
    lowest = graph.constant("lowest", np.array(LOWEST[dtype], dtype.numpy()))
    masked = graph.node("Where", [mask, scores, lowest])
    weights = _shares(graph, masked, live, layer, dtype)
    y = graph.node("MatMul", [weights, values])  # [B, K, G * S, D]
    back = graph.node("Reshape", [y, shape(f"rows_apart_{group}", 0, keys_heads, group, -1, size)])
    merged = graph.node("Transpose", [back], perm=[0, 3, 1, 2, 4])  # [B, S, K, G, D]
    return graph.node("Reshape", [merged, shape("heads_merged", 0, 0, -1)])


def _shares(
    graph: GraphEditor,
    scores: ir.Value,
    live: ir.Value | None,
    layer: CachedAttention,
    dtype: ir.DataType,
) -> ir.Value:
    """Softmax over the slots, [B, K, G * S, T]; a sink is a further slot without a value."""
    if layer.sinks is None:
        return graph.node("Softmax", [scores], axis=-1)

    def numbers(name: str, *values: int) -> ir.Value:
        return graph.constant(name, np.array(values, np.int64))

    keys_heads, group = layer.kv_num_heads, layer.num_heads // layer.kv_num_heads
    sinks = stored_sinks(graph, layer, dtype, (1, keys_heads, group, 1))
    zero, one, axis = numbers("first_slot", 0), numbers("second_slot", 1), numbers("last_axis", 3)
    first = graph.node("Slice", [scores, zero, one, axis])
    apart = graph.node(
        "Reshape", [first, numbers(f"heads_of_keys_{group}", 0, keys_heads, group, -1)]
    )
    each = graph.node("Add", [graph.node("Sub", [apart, apart]), sinks])
    column = graph.node("Reshape", [each, numbers("sink_of_rows", 0, keys_heads, -1, 1)])
    both = graph.node("Concat", [scores, column], axis=-1)
    return graph.node("Slice", [graph.node("Softmax", [both], axis=-1), zero, live, axis])


def rows_graph(spec: KVCacheSpec, capacity: int) -> ir.Model:
    """The graph that moves rows of all caches in place, from KEPT to SLOTS."""
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
                for name in (graph_io.past_name, graph_io.present_name)
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
