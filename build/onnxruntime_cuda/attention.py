"""Attention on a linear cache for CUDA: fused if there is a kernel, else plain products.

Inputs that depend on the context length come from the host: visible positions, write positions,
lengths. So no node computes sizes, which ONNX Runtime would place on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.attention import CachedAttention
from edgellm.build.lowering.contrib_ops import row_tables
from edgellm.build.lowering.function_calls import find_calls, require_known
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.onnxruntime_cuda.batches import BATCH
from edgellm.build.onnxruntime_cuda.fused_attention import FusedLayers, why_not_fused
from edgellm.build.onnxruntime_cuda.plain_attention import PlainLayers
from edgellm.core import onnx_functions
from edgellm.core.errors import UnsupportedModelError
from edgellm.device_runtime.runners.onnxruntime_cuda.attention_inputs import (
    VISIBLE,
    VISIBLE_IN_WINDOW,
)

_NAMES = {
    onnx_functions.VISIBLE_SLOTS: VISIBLE,
    onnx_functions.VISIBLE_IN_WINDOW: VISIBLE_IN_WINDOW,
}


class Form(Enum):
    """Passes that a graph supports, and the operators of its attention."""

    PLAIN = "all, by products"
    MASKED = "all, by GroupQueryAttention with a bias"
    CAUSAL = "causal ones, by GroupQueryAttention without a bias"


def forms_of(
    graph: ir.Graph, dtype: ir.DataType, *, masks_by_products: bool = False
) -> tuple[tuple[Form, ...], str]:
    """The graphs of a network, and why they are not fused ("" if they are).

    GroupQueryAttention takes several rows after others of one sequence only, and hides later rows
    whatever its bias: batches, and images whose tokens attend to each other, need products.
    """
    against = why_not_fused(CachedAttention.all_of(graph, takes_sinks=True), dtype)
    if against:
        return (Form.PLAIN,), against
    return (Form.PLAIN if masks_by_products else Form.MASKED, Form.CAUSAL), ""


def lower_cached_attention(
    graph: GraphEditor,
    dtype: ir.DataType,
    capacity: int,
    form: Form = Form.PLAIN,
    numbers: ir.Value | None = None,
) -> None:
    """Rewrite all cached attention of a decoder or draft, and the shared masks and tables.

    Args:
        graph: of the network.
        dtype: of activations.
        capacity: rows of the cache.
        form: of attention.
        numbers: see `row_tables`.
    """
    batch = 1 if numbers is None else BATCH
    _lower_tables(graph, dtype, capacity)
    layers = CachedAttention.all_of(graph.graph, takes_sinks=True)
    windows = _windows(graph.graph)
    if any(layer.visible not in windows for layer in layers):
        raise UnsupportedModelError("a mask that is not made of the tree's is not lowered for CUDA")
    graph.cursor = graph.graph[0]
    seen = {} if form == Form.CAUSAL else _visible_inputs(graph, windows, batch)
    plain = PlainLayers(graph=graph, dtype=dtype, seen=seen, batch=batch)
    fused = FusedLayers(graph=graph, dtype=dtype, seen=seen, windows=windows, batch=batch)
    tables: dict[ir.Value, tuple[ir.Value, ...]] = {}
    for layer in layers:
        graph.cursor = layer.call
        rope_tables = _tables_of_rows(graph, layer, tables, numbers)
        takes = form == Form.CAUSAL or (form == Form.MASKED and layer.sinks is None)
        outputs = (fused if takes else plain).emit(layer, rope_tables)
        for old, new in zip(layer.outputs, outputs, strict=True):
            graph.replace(old, new)


def _windows(graph: ir.Graph) -> dict[ir.Value, int | None]:
    """Window of each mask; None: all positions."""
    found: dict[ir.Value, int | None] = {}
    for call in find_calls(graph, *_NAMES):
        require_known(call, "window")
        window = call.attributes.get("window")
        found[call.outputs[0]] = window.as_int() if window is not None else None
    return found


def _visible_inputs(
    graph: GraphEditor, windows: Mapping[ir.Value, int | None], batch: int | str
) -> dict[ir.Value, ir.Value]:
    """Host inputs that replace the masks: one for all positions, one for a window."""
    if len({window for window in windows.values() if window is not None}) > 1:
        raise UnsupportedModelError(
            "sliding windows of several widths are not computed on CUDA",
            hint="build with --backend onnxruntime --device cpu",
        )
    inputs: dict[str, ir.Value] = {}
    for call in find_calls(graph.graph, *_NAMES):
        name = _NAMES[call.op_type]
        if name not in inputs:
            inputs[name] = graph.input(name, ir.DataType.BOOL, [batch, 1, "rows", "live"])
    return {
        call.outputs[0]: inputs[_NAMES[call.op_type]] for call in find_calls(graph.graph, *_NAMES)
    }


def _tables_of_rows(
    graph: GraphEditor,
    layer: CachedAttention,
    tables: dict[ir.Value, tuple[ir.Value, ...]],
    numbers: ir.Value | None,
) -> tuple[ir.Value, ...]:
    """Positions, cos and sin of a layer's RoPE; () without RoPE."""
    if layer.cos is None or layer.sin is None:
        return ()
    if layer.cos not in tables:
        if layer.positions is None:
            tables[layer.cos] = row_tables(graph, layer.cos, layer.sin, numbers)
        else:
            tables[layer.cos] = layer.positions, layer.cos, layer.sin
    return tables[layer.cos]


def _lower_tables(graph: GraphEditor, dtype: ir.DataType, capacity: int) -> None:
    """Store RoPE tables of all positions as weights, in float32 as the function's body."""
    for call in find_calls(graph.graph, onnx_functions.ROTARY_TABLES):
        require_known(call, "scale")
        frequencies = call.inputs[1]
        assert frequencies is not None and frequencies.const_value is not None  # noqa: PT018
        angles = np.arange(capacity, dtype=np.float32)[:, None] * frequencies.const_value.numpy()
        scale = np.float32(call.attributes["scale"].as_float())
        for output, turn in zip(call.outputs, (np.cos, np.sin), strict=True):
            table = (turn(angles) * scale).astype(dtype.numpy())
            name = f"{call.name}.{turn.__name__}"
            graph.replace(output, graph.weight(name, lambda table=table: table))
