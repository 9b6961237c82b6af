"""Linear layers with LoRA adapters at run time: adapters are inputs of the kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.lora import Mark, Marks
from edgellm.core import graph_io
from edgellm.device_runtime.kernels.library import DOMAIN
from edgellm.device_runtime.kernels.packed_layout import STRIP

_LOW_RANK = "LowRank"  # after products that are ONNX Runtime's
_ROWS, _OWN = 6, 10  # places of QuantLinear's inputs: the first of adapters', and what these read


def attach(
    graph: GraphEditor, marks: Marks, products: Sequence[ir.Node], gated: Sequence[ir.Node]
) -> None:
    """Add adapters to products of weights; `gated` are products of gate and up."""
    inputs = _inputs(graph.graph, len(marks))
    for node in products:
        if found := marks.take(_names(node)):
            _attach(graph, node, found, inputs, is_gated=node in gated)
            marks.drop(found)
    assert not marks


def _attach(
    graph: GraphEditor,
    product: ir.Node,
    marks: Sequence[Mark],
    inputs: Mapping[str, ir.Value],
    *,
    is_gated: bool,
) -> None:
    widths = [mark.width for mark in marks]
    begins = [0, STRIP] if is_gated else np.cumsum([0, *widths[:-1]]).tolist()
    places = [(mark.place, mark.width, begin) for mark, begin in zip(marks, begins, strict=True)]
    own = marks[0].own_input
    given = [
        inputs[graph_io.ADAPTER_ROWS],
        graph.constant(f"adapted.{marks[0].place}", np.array(places, np.int64)),
        inputs[graph_io.ADAPTER_WEIGHTS],
        inputs[graph_io.ADAPTER_TABLE],
    ]
    if product.op_type == "MatMul":
        y = product.outputs[0]
        users = tuple(y.uses())
        graph.cursor = _node_after(graph.graph, product)
        found = graph.node(_LOW_RANK, [own, y, *given], domain=DOMAIN)
        for user, index in users:
            user.replace_input_with(index, found)
        return
    others = [] if own is product.inputs[0] else [own]
    product.resize_inputs(_OWN + len(others))
    for place, value in enumerate([*given, *others], _ROWS):
        product.replace_input_with(place, value)


def _names(product: ir.Node) -> list[str]:
    """The layers whose concatenated weights a product has."""
    weight = product.inputs[1]
    return str(weight.name).rpartition(".")[0].split("+") if weight is not None else []


def _node_after(graph: ir.Graph, node: ir.Node) -> ir.Node:
    nodes = list(graph)
    return nodes[nodes.index(node) + 1]


def _inputs(graph: ir.Graph, layers: int) -> dict[str, ir.Value]:
    """The graph's new inputs."""
    ids = next(value for value in graph.inputs if value.name == graph_io.INPUT_IDS)
    assert ids.shape is not None
    for name, dtype, shape in (
        (graph_io.ADAPTER_WEIGHTS, ir.DataType.FLOAT, ["adapter_values"]),
        (graph_io.ADAPTER_TABLE, ir.DataType.INT64, ["adapters", layers, 3]),
        (graph_io.ADAPTER_ROWS, ir.DataType.INT64, [ids.shape[1]]),
    ):
        graph.inputs.append(ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype)))
    return {str(value.name): value for value in graph.inputs[-3:]}
