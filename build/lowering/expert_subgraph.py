"""Extracts some experts of a layer from a portable graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.experts import ExpertLayer
from edgellm.build.lowering.linears.block_factors import slice_first

_BIASES = 3  # the last inputs of a call


def slice_experts(model: ir.Model, layer: ExpertLayer, part: slice) -> ir.Model:
    """A graph of one call: inputs x [1, S, H], ids and shares [1, S, K]; output y [1, S, H].

    Its weights are slices of the model's weight files.
    """
    call, dtype = layer.call, layer.x.dtype or ir.DataType.FLOAT
    types = (dtype, ir.DataType.INT64, dtype)
    inputs = [
        ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape([1, "rows", None]))
        for name, kind in zip(("x", "ids", "shares"), types, strict=True)
    ]
    graph = ir.Graph(inputs, [], nodes=[], opset_imports=dict(model.graph.opset_imports))
    weights = [_some(graph, value, part) for value in call.inputs[3:-_BIASES]]
    biases = [
        _initializer(graph, str(value.name), _bias(layer, at, part, dtype))
        for at, value in enumerate(call.inputs[-_BIASES:])
        if value is not None
    ]
    node = _copied(graph, call, [*inputs, *weights, *biases])
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(dtype)
    graph.outputs.append(node.outputs[0])
    return ir.Model(graph, ir_version=model.ir_version, functions=list(model.functions.values()))


def _some(graph: ir.Graph, value: ir.Value | None, part: slice) -> ir.Value:
    """An operand of these experts; quantized scales stay quantized."""
    assert value is not None
    if value.const_value is not None:
        return _initializer(graph, str(value.name), slice_first(value.const_value, part))
    factors = value.producer()
    assert factors is not None
    operands = [_some(graph, each, part) for each in factors.inputs]
    return _copied(graph, factors, operands).outputs[0]


def _copied(graph: ir.Graph, node: ir.Node, inputs: list[ir.Value]) -> ir.Node:
    copy = ir.Node(
        node.domain, node.op_type, inputs, list(node.attributes.values()), name=node.name
    )
    copy.outputs[0].name = node.outputs[0].name
    graph.append(copy)
    return copy


def _initializer(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    if name not in graph.initializers:
        value = ir.Value(
            name=name, shape=ir.Shape(tuple(tensor.shape.numpy())),
            type=ir.TensorType(tensor.dtype), const_value=tensor,
        )  # fmt: skip
        graph.register_initializer(value)
    return graph.initializers[name]


def _bias(layer: ExpertLayer, at: int, part: slice, dtype: ir.DataType) -> ir.TensorProtocol:
    found = layer.biases[at]
    values = np.zeros((1, 1), np.float32) if found is None else found[part]
    return ir.tensor(values.astype(dtype.numpy()))
