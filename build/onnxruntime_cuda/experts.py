"""Mixtures of experts by ONNX Runtime's operator MoE, which reads only chosen experts.

The operator chooses experts itself: the K largest of a row's logits, with shares that are their
softmax. Given the logarithms of the shares that a router gave, it takes the same experts, with the
same shares but for their sum, which is multiplied in after it. Experts have the activations'
type, or are integers (`integer_experts`).

Source: the operator's schema in ONNX Runtime 1.32. Its CUDA kernel reads alpha, offset and limit
since microsoft/onnxruntime#28467 (1.28); before it computed gpt-oss's for every model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.experts import ExpertLayer
from edgellm.build.lowering.function_calls import find_calls, require_known
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.weights import constant_array
from edgellm.build.onnxruntime_cuda.integer_experts import (
    IntegerForm,
    emit_integer_experts,
    integer_form,
)
from edgellm.core.errors import (
    BrokenArtifactError,
    UnsupportedModelError,
)
from edgellm.core.onnx_functions import ROUTER

EXPERTS_VERSION = "1.28"  # of ONNX Runtime, the first that computes what is asked for
_LEAST = 1e-30  # of a share whose logarithm is taken


def lower_experts(graph: GraphEditor, dtype: ir.DataType, bits: int = 0) -> None:
    """Rewrite all routers and experts; activations are of type `dtype`, see `integer_form`.

    Raises:
        UnsupportedModelError: experts without gates, or with GELU.
    """
    for call in find_calls(graph.graph, ROUTER):
        graph.cursor = call
        graph.replace(call.outputs[0], _route(graph, call, dtype))
    for layer in ExpertLayer.all_of(graph.graph):
        if not layer.is_gated:
            raise UnsupportedModelError(
                "mixtures of experts without gates are not computed on CUDA",
                hint="build with --backend onnxruntime --device cpu",
            )
        if layer.cubic:
            raise UnsupportedModelError(
                "mixtures of experts with GELU are not computed on CUDA",
                hint="build with --backend onnxruntime --device cpu",
            )
        graph.cursor = layer.call
        form = integer_form(layer, dtype, bits)
        graph.replace(layer.call.outputs[0], _emit(graph, layer, dtype, form))


def expert_bytes(layer: ExpertLayer, dtype: ir.DataType, bits: int = 0) -> int:
    """Bytes of all experts of a layer in the engine, see `integer_form`."""
    form = integer_form(layer, dtype, bits)
    if form is not None:
        return sum(form.num_bytes(*stack.shape) for stack in layer.stacks)
    return int(dtype.itemsize) * sum(math.prod(stack.shape) for stack in layer.stacks)


def _route(graph: GraphEditor, call: ir.Node, dtype: ir.DataType) -> ir.Value:
    """Compute the router in float32: rounding would choose other experts."""
    require_known(call)
    x, weight = call.inputs
    array = constant_array(weight) if weight is not None else None
    if x is None or weight is None or array is None:
        raise BrokenArtifactError(
            f"{call.name}: the router is not a stored weight", hint="export the bundle again"
        )
    table = graph.weight(f"{weight.name}.float", lambda: array.astype(np.float32))
    rows = x if dtype == ir.DataType.FLOAT else _as(graph, x, ir.DataType.FLOAT)
    return graph.node("FusedMatMul", [rows, table], domain="com.microsoft", transB=1)


def _emit(
    graph: GraphEditor, layer: ExpertLayer, dtype: ir.DataType, form: IntegerForm | None
) -> ir.Value:
    is_float = dtype == ir.DataType.FLOAT
    shares = layer.shares if is_float else _as(graph, layer.shares, ir.DataType.FLOAT)
    total = graph.node("ReduceSum", [shares, _axes(graph, -1)], keepdims=1)
    logits = _logits(graph, layer, shares)
    if not is_float:
        total, logits = _as(graph, total, dtype), _as(graph, logits, dtype)
    biases = _biases(graph, layer, dtype)
    attributes = {
        "k": layer.top_k,
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": layer.alpha,
        "activation_beta": layer.offset,
        "normalize_routing_weights": 1,
        **({} if layer.limit is None else {"swiglu_limit": layer.limit}),
    }
    if form is not None:
        y = emit_integer_experts(graph, layer, form, logits, biases, **attributes)
    else:
        gate_up, down = _floats(graph, layer, dtype)
        inputs = [layer.x, logits, gate_up, biases[0], down, biases[1]]
        y = graph.node("MoE", inputs, domain="com.microsoft", **attributes)
    return graph.node("Mul", [y, total])


def _floats(graph: GraphEditor, layer: ExpertLayer, dtype: ir.DataType) -> list[ir.Value]:
    """Interleaved gates and ups [E, 2 I, H], and downs [E, H, I]."""
    count, hidden, inner = layer.gate.shape
    return [
        graph.streamed_weight(
            f"{layer.name}.{name}.{dtype.name.lower()}",
            int(dtype.itemsize) * math.prod(shape),
            make,
            dtype,
            shape,
        )
        for name, shape, make in (
            ("gate_up", (count, 2 * inner, hidden), lambda: _pairs(layer, dtype)),
            ("down", (count, hidden, inner), lambda: _downs(layer, dtype)),
        )
    ]


def _logits(graph: GraphEditor, layer: ExpertLayer, shares: ir.Value) -> ir.Value:
    """[S, E] float32: logarithms of the shares; very small for experts that are not chosen."""
    depth = graph.constant(f"experts_{layer.count}", np.array(layer.count))
    values = graph.constant("absent_present", np.array([0, 1], np.float32))
    present = graph.node("OneHot", [layer.ids, depth, values], axis=-1)
    each = graph.node("Mul", [graph.node("Unsqueeze", [shares, _axes(graph, 3)]), present])
    dense = graph.node("ReduceSum", [each, _axes(graph, 2)], keepdims=0)
    least = graph.constant("least_share", np.array(_LEAST, np.float32))
    logits = graph.node("Log", [graph.node("Max", [dense, least])])
    return graph.node("Flatten", [logits], axis=2)


def _axes(graph: GraphEditor, axis: int) -> ir.Value:
    return graph.constant(f"axis_{axis}", np.array([axis]))


def _as(graph: GraphEditor, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    return graph.node("Cast", [value], to=int(dtype))


def _pairs(layer: ExpertLayer, dtype: ir.DataType) -> Iterator[bytes]:
    """[2 I, H] of each expert: a gate, its up, the next gate."""
    for index in range(layer.count):
        gate, up = (stack.expert(index).dense().T for stack in (layer.gate, layer.up))
        rows = np.stack([gate, up], 1).reshape(-1, gate.shape[1])
        yield rows.astype(dtype.numpy()).tobytes()


def _downs(layer: ExpertLayer, dtype: ir.DataType) -> Iterator[bytes]:
    """[H, I] of each expert."""
    for index in range(layer.count):
        yield layer.down.expert(index).dense().T.astype(dtype.numpy()).tobytes()


def _biases(
    graph: GraphEditor, layer: ExpertLayer, dtype: ir.DataType
) -> tuple[ir.Value | None, ir.Value | None]:
    """Biases: interleaved gates and ups [E, 2 I], and downs [E, H]."""
    gate, up, down = layer.biases
    if gate is None or up is None or down is None:
        return None, None
    both = np.stack([gate, up], -1).reshape(len(gate), -1).astype(dtype.numpy())
    return (
        graph.weight(f"{layer.name}.inner_bias", lambda: both),
        graph.weight(f"{layer.name}.bias", lambda: down.astype(dtype.numpy())),
    )
