"""Cached attention by edgellm's own kernel: rope, append and tree mask in one operator."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.attention import CachedAttention
from edgellm.build.lowering.calls import is_call, require_known
from edgellm.build.lowering.contrib_ops import CACHE_NAMES, row_tables
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.weights import constant_array, parameter_name
from edgellm.build.onnxruntime_cpu.grouped_attention import packed_rows
from edgellm.contract import (
    VISIBLE_IN_WINDOW,
    VISIBLE_SLOTS,
    BrokenArtifactError,
    UnsupportedModelError,
)
from edgellm.device_runtime.kernels.library import DOMAIN
from edgellm.manifest import KVCacheSpec


def lower_attention(graph: GraphEditor, cache: KVCacheSpec) -> None:
    """Rewrite all cached attention; a cache of int8 takes one scale for each tensor.

    Raises:
        UnsupportedModelError: a mask that is not made of the tree's.
    """
    tables: dict[ir.Value, tuple[ir.Value, ...]] = {}
    for index, layer in enumerate(CachedAttention.all_of(graph.graph, takes_sinks=True)):
        graph.cursor = layer.call
        rotation = layer.cos, layer.sin
        if layer.cos is not None and layer.sin is not None and layer.positions is None:
            if layer.cos not in tables:
                tables[layer.cos] = row_tables(graph, layer.cos, layer.sin)[1:]
            rotation = tables[layer.cos]
        _emit(graph, layer, rotation, _scales(graph, cache, index))
    if cache.dtype == "int8":
        for value in (*graph.graph.inputs, *graph.graph.outputs):
            if str(value.name).startswith(CACHE_NAMES):
                value.type = ir.TensorType(ir.DataType.INT8)


def _emit(
    graph: GraphEditor,
    layer: CachedAttention,
    tables: tuple[ir.Value | None, ...],
    scales: list[ir.Value],
) -> None:
    mask, window = _tree_mask(layer)
    packed = packed_rows(layer.q, layer.k, layer.v)
    given = {"scale": layer.scale, "softcap": layer.softcap, "local_window_size": window}
    given |= {"rotary_interleaved": 1} if layer.interleaved else {}
    outputs = graph.nodes(
        "CachedAttention",
        [
            *((packed, None, None) if packed is not None else (layer.q, layer.k, layer.v)),
            layer.past_key, layer.past_value, layer.write_index, *tables, layer.positions, mask,
            *([None, None, _sinks(graph, layer), *scales] if scales or layer.sinks else []),
        ],
        3,
        domain=DOMAIN,
        num_heads=layer.num_heads,
        kv_num_heads=layer.kv_num_heads,
        **{name: value for name, value in given.items() if value is not None},
    )  # fmt: skip
    for old, new in zip(layer.outputs, outputs, strict=True):
        graph.replace(old, new)


def _sinks(graph: GraphEditor, layer: CachedAttention) -> ir.Value | None:
    """Float32 [num_heads]."""
    if layer.sinks is None:
        return None
    array = constant_array(layer.sinks)
    if array is None:
        raise BrokenArtifactError(
            f"{layer.call.name}: the sinks are not a stored weight", hint="export the bundle again"
        )
    floats = array.astype(np.float32)
    return graph.weight(f"{parameter_name(layer.sinks)}.sinks", lambda: floats)


def _tree_mask(layer: CachedAttention) -> tuple[ir.Value, int | None]:
    """The pass's mask bool [S, M], and the window in positions."""
    call = layer.visible.producer()
    if call is None or not is_call(call, VISIBLE_SLOTS, VISIBLE_IN_WINDOW):
        raise UnsupportedModelError(
            f"{layer.call.name}: edgellm's kernels do not know this mask",
            hint="give --kernels onnxruntime",
        )
    require_known(call, "window")
    mask, window = call.inputs[0], call.attributes.get("window")
    assert mask is not None
    return mask, None if window is None else window.as_int()


def _scales(graph: GraphEditor, cache: KVCacheSpec, index: int) -> list[ir.Value]:
    """Of the keys and values of a layer in int8, float32 [1] each."""
    if cache.dtype != "int8":
        return []
    assert cache.ranges is not None
    return [
        graph.constant(f"layer{index}.{part}_scale", np.array([ranges[index] / 127], np.float32))
        for part, ranges in (("k", cache.ranges.keys), ("v", cache.ranges.values))
    ]
