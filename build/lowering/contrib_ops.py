"""Contrib operators of ONNX Runtime with kernels for both CPU and CUDA."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import unused_removal

from edgellm.build.lowering.bind_rope import bind_frequencies
from edgellm.build.lowering.function_calls import find_calls, inline
from edgellm.build.lowering.graph import GraphEditor
from edgellm.core import graph_io, onnx_functions

CACHE_NAMES = (graph_io.PAST, graph_io.PRESENT)
CONTRIB = "com.microsoft"
MASKED = {ir.DataType.FLOAT: -1e30, ir.DataType.FLOAT16: -3e4}
# Masked scores, or what is added to them in float32: finite, since a fully masked row would be NaN,
# and far below all scores that are not masked.
LOWEST = {ir.DataType.FLOAT: -1e30, ir.DataType.FLOAT16: -65504.0}
LOWERED_OPSET = 21


def bind_capacity(graph: ir.Graph, capacity: int, spare_rows: int = 0) -> None:
    """Give the caches their number of rows, and ropes what follows from it.

    `spare_rows`: after them, for padding.
    """
    bind_frequencies(graph, capacity)
    for value in (*graph.inputs, *graph.outputs):
        if value.name and value.name.startswith(CACHE_NAMES):
            shape = list(value.shape or ())
            value.shape = ir.Shape([*shape[:2], capacity + spare_rows, shape[3]])


def finish(model: ir.Model) -> None:
    """Inline the remaining calls, drop unused values, and set the imported opsets."""
    inline(model)
    unused_removal.RemoveUnusedNodesPass()(model)
    _drop_unused_inputs(model.graph)
    model.graph.opset_imports.clear()
    model.graph.opset_imports.update({"": LOWERED_OPSET, CONTRIB: 1})
    model.ir_version = 10


def _drop_unused_inputs(graph: ir.Graph) -> None:
    graph.inputs[:] = [value for value in graph.inputs if any(True for _ in value.uses())]


def lower_norms(graph: GraphEditor) -> None:
    """Fold residual additions into the norms after them; a bias is none."""
    for node in graph.find("RMSNormalization"):
        graph.cursor = node
        x, weight = node.inputs
        epsilon = node.attributes["epsilon"].as_float()
        residual = x.producer() if x is not None else None
        if residual is not None and residual.op_type == "Add" and not _adds_bias(residual):
            outputs = graph.nodes(
                "SkipSimplifiedLayerNormalization",
                [*residual.inputs, weight],
                4,
                domain=CONTRIB,
                epsilon=epsilon,
            )
            graph.replace(node.outputs[0], outputs[0])
            graph.replace(residual.outputs[0], outputs[3])
        else:
            norm = graph.node(
                "SimplifiedLayerNormalization", [x, weight], axis=-1, epsilon=epsilon, stash_type=1
            )
            graph.replace(node.outputs[0], norm)


def _adds_bias(add: ir.Node) -> bool:
    return any(value is not None and value.const_value is not None for value in add.inputs)


def lower_activations(graph: GraphEditor) -> None:
    """One kernel for each swish."""
    for node in graph.find("Swish"):
        graph.cursor = node
        swish = graph.node("QuickGelu", list(node.inputs), domain=CONTRIB, alpha=1.0)
        graph.replace(node.outputs[0], swish)


def lower_rotations(graph: GraphEditor, numbers: ir.Value | None = None) -> None:
    """Rewrite RotaryEmbedding nodes: those of encoders, and of rows that are normed after them.

    `numbers`: see `row_tables`.
    """
    tables: dict[ir.Value, tuple[ir.Value, ...]] = {}
    for node in graph.find("RotaryEmbedding"):
        if node.domain == CONTRIB:
            continue
        graph.cursor = node
        x, cos, sin, *positions = node.inputs
        assert cos is not None and sin is not None  # noqa: PT018
        if positions and positions[0] is not None:
            tables[cos] = positions[0], cos, sin
        elif cos not in tables:
            tables[cos] = row_tables(graph, cos, sin, numbers)
        heads = node.attributes["num_heads"].as_int()
        flags = [
            node.attributes[name].as_int() if name in node.attributes else 0
            for name in ("interleaved", "rotary_embedding_dim")
        ]
        graph.replace(node.outputs[0], rotate(graph, x, tables[cos], heads, *flags))


def lower_encoder_attention(graph: GraphEditor) -> None:
    """Rewrite the Attention nodes of an encoder (without cache)."""
    for node in graph.find("Attention"):
        graph.cursor = node
        q, k, v, *mask = node.inputs
        heads = node.attributes["q_num_heads"].as_int()
        scale = node.attributes.get_float("scale", None)
        y = graph.node(
            "MultiHeadAttention",
            [q, k, v, *([None, None, *mask] if mask else [])],
            domain=CONTRIB,
            num_heads=heads,
            **({} if scale is None else {"scale": scale}),
        )
        graph.replace(node.outputs[0], y)


def lower_cross_attention(graph: GraphEditor) -> None:
    """Rewrite attention to audio, whose keys and values have heads apart."""
    for call in find_calls(graph.graph, onnx_functions.CROSS_ATTENTION):
        graph.cursor = call
        heads = call.attributes["num_heads"].as_int()
        y = graph.node("MultiHeadAttention", list(call.inputs), domain=CONTRIB, num_heads=heads)
        graph.replace(call.outputs[0], y)


def row_tables(
    graph: GraphEditor, cos: ir.Value, sin: ir.Value, numbers: ir.Value | None = None
) -> tuple[ir.Value, ...]:
    """RoPE tables by token of a pass: index of the first, cos and sin [S, D/2].

    `numbers`: int64 [B, S], indices of all tokens, if passes have several sequences.
    """
    if numbers is not None:
        return numbers, *(graph.node("Flatten", [table], axis=2) for table in (cos, sin))
    first = graph.constant("first", np.array([0], np.int64))
    return first, *(graph.node("Squeeze", [table, first]) for table in (cos, sin))


def rotate(
    graph: GraphEditor,
    x: ir.Value | None,
    tables: tuple[ir.Value, ...],
    num_heads: int,
    interleaved: int = 0,
    rotary_dim: int = 0,
) -> ir.Value:
    """Apply RoPE to x [1, S, heads * D]; `tables` are positions, cos and sin.

    `rotary_dim`: rotated dimensions of a head, 0: all.
    """
    partial = {"num_heads": num_heads, "rotary_embedding_dim": rotary_dim} if rotary_dim else {}
    flags = {"interleaved": 1} if interleaved else {}
    return graph.node("RotaryEmbedding", [x, *tables], domain=CONTRIB, **partial, **flags)
