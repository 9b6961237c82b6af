"""Operators of ONNX Runtime's own, which its CPU and its CUDA provider both have kernels for."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import unused_removal

from edgellm.build.lowering.graph import GraphEditor

CACHE_NAMES = ("past_key_values.", "present.")
CONTRIB = "com.microsoft"
LOWERED_OPSET = 21


def bind_capacity(graph: ir.Graph, capacity: int) -> None:
    """Give the caches their number of rows."""
    for value in (*graph.inputs, *graph.outputs):
        if value.name and value.name.startswith(CACHE_NAMES):
            shape = list(value.shape or ())
            value.shape = ir.Shape([*shape[:2], capacity, shape[3]])


def finish(model: ir.Model) -> None:
    """Drop what nothing reads, and say which operators are left."""
    unused_removal.RemoveUnusedNodesPass()(model)
    _drop_unused_inputs(model.graph)
    model.graph.opset_imports[""] = LOWERED_OPSET
    model.graph.opset_imports[CONTRIB] = 1
    model.ir_version = 10


def _drop_unused_inputs(graph: ir.Graph) -> None:
    graph.inputs[:] = [value for value in graph.inputs if any(True for _ in value.uses())]


def lower_norms(graph: GraphEditor) -> None:
    """Fold residual additions into the norms behind them."""
    for node in graph.find("RMSNormalization"):
        graph.cursor = node
        x, weight = node.inputs
        epsilon = node.attributes["epsilon"].as_float()
        residual = x.producer() if x is not None else None
        if residual is not None and residual.op_type == "Add":
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


def lower_activations(graph: GraphEditor) -> None:
    """One kernel for each swish."""
    for node in graph.find("Swish"):
        graph.cursor = node
        swish = graph.node("QuickGelu", list(node.inputs), domain=CONTRIB, alpha=1.0)
        graph.replace(node.outputs[0], swish)


def lower_encoder_attention(graph: GraphEditor) -> None:
    """Rewrite the Attention and RotaryEmbedding nodes of an encoder, which has no cache."""
    for node in graph.find("RotaryEmbedding"):
        graph.cursor = node
        rows = row_tables(graph, node)
        assert rows is not None
        rotated = graph.node("RotaryEmbedding", [node.inputs[0], *rows], domain=CONTRIB)
        graph.replace(node.outputs[0], rotated)
    for node in graph.find("Attention"):
        graph.cursor = node
        q, k, v, *mask = node.inputs
        heads = node.attributes["q_num_heads"].as_int()
        y = graph.node(
            "MultiHeadAttention", [q, k, v, *([None, None, *mask] if mask else [])],
            domain=CONTRIB, num_heads=heads,
        )  # fmt: skip
        graph.replace(node.outputs[0], y)


def first_compute_node(graph: GraphEditor) -> ir.Node:
    """The first node that is not part of the shared rope tables and mask."""
    return next(node for node in graph.graph if not str(node.name).startswith("shared."))


def row_tables(graph: GraphEditor, rotary: ir.Node) -> tuple[ir.Value, ...] | None:
    """Of M-RoPE, whose tables belong to the rows of a pass: their first, cos and sin [S, D/2].

    None where tables belong to positions, which GroupQueryAttention takes itself.
    """
    _, cos, sin, *positions = rotary.inputs
    if positions and positions[0] is not None:
        return None
    assert cos is not None and sin is not None  # noqa: PT018
    first = graph.constant("first", np.array([0], np.int64))
    return first, *(graph.node("Squeeze", [table, first]) for table in (cos, sin))


def find_producer(value: ir.Value | None, op_type: str) -> ir.Node:
    """The nearest producer of that type along first inputs (and a scatter's second)."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == op_type:
            return node
        value = node.inputs[0]
    raise ValueError(f"the graph is not one of edgellm's: no {op_type} where one belongs")
