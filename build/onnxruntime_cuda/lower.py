"""Lowers portable graphs to operators with CUDA kernels in ONNX Runtime.

Activations and weights have the bundle's type, float16 or float32. Nothing is left to fold: a
session runs the saved graph, so `kernel_table` can check it before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from edgellm.build.lowering.contrib_ops import (
    bind_capacity,
    finish,
    lower_activations,
    lower_encoder_attention,
    lower_norms,
    lower_rotations,
)
from edgellm.build.lowering.embeddings import widen_tables
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.groups import LinearKernel, lower_linears
from edgellm.build.lowering.linears.rounded_inputs import lower_inputs
from edgellm.build.lowering.lora import AdapterSums, Marks, Places
from edgellm.build.lowering.top_logits import add_top_logits
from edgellm.build.lowering.weights import WeightFile, constant_array, keep_apart, parameter_name
from edgellm.build.onnxruntime_cuda.attention import Form, lower_cached_attention
from edgellm.build.onnxruntime_cuda.batches import lower_batches
from edgellm.build.onnxruntime_cuda.experts import lower_experts
from edgellm.build.onnxruntime_cuda.kernel_table import check_kernels
from edgellm.core.onnx_functions import FUNCTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphTraits:
    """What a lowered graph computes with.

    Attributes:
        capacity: rows of the KV cache; 0 for graphs without one.
        form: of attention.
        expert_bits: of what float experts become; 0: they stay floats.
        spare_rows: of the cache, after the capacity, where passes serve several sequences.
        places: of LoRA adapters that linear layers take; None: they take none.
    """

    capacity: int = 0
    form: Form = Form.PLAIN
    expert_bits: int = 0
    spare_rows: int = 0
    places: Places | None = None


def lower_for_cuda(
    model: ir.Model,
    kernel: LinearKernel,
    weights: WeightFile,
    dtype: ir.DataType,
    traits: GraphTraits,
) -> None:
    """Rewrite `model` in place.

    Args:
        model: any graph of `edgellm-export`.
        kernel: computes the linear layers.
        weights: receives every weight.
        dtype: of activations.
        traits: of the lowered graph.

    Raises:
        UnsupportedModelError: an operator has no CUDA kernel.
    """
    capacity, spare_rows, places = traits.capacity, traits.spare_rows, traits.places
    graph = GraphEditor(model.graph, weights)
    marks = None if places is None else Marks(graph)
    lower_inputs(graph)
    if capacity:
        bind_capacity(model.graph, capacity, spare_rows)
        add_top_logits(graph)
    numbers = lower_batches(graph) if spare_rows else None
    _lower_repeated_rows(graph)
    _lower_constants(graph, dtype)
    widen_tables(graph, dtype)
    if places is None or marks is None:
        lower_linears(graph, kernel)
    else:
        lower_linears(
            graph,
            kernel,
            adapt=AdapterSums(
                graph=graph, marks=marks, places=places, dtype=dtype, multiply=_by_rows
            ),
        )
    lower_experts(graph, dtype, traits.expert_bits)
    if capacity:
        lower_cached_attention(graph, dtype, capacity + spare_rows, traits.form, numbers)
    else:
        lower_encoder_attention(graph)
    lower_rotations(graph, numbers)
    lower_norms(graph)
    lower_activations(graph)
    finish(model)
    # Constants are no kernels of a GPU.
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    model.graph.sort()  # a norm that took over an addition may stand after its readers
    keep_apart(model.graph, weights)
    check_kernels(model)


def _by_rows(graph: GraphEditor, x: ir.Value, matrix: ir.Value) -> ir.Value:
    return graph.node("FusedMatMul", [x, matrix], domain="com.microsoft", transB=1)


def _lower_repeated_rows(graph: GraphEditor) -> None:
    """Repeat a row for each tile of an encoder without computed shapes."""
    for node in graph.find("Expand"):
        joined = node.inputs[1].producer() if node.inputs[1] is not None else None
        count = joined.inputs[0] if joined is not None and joined.op_type == "Concat" else None
        shape = count.producer() if count is not None else None
        if shape is None or shape.op_type != "Shape" or len(node.outputs[0].uses()) != 1:
            continue
        ((user, index),) = node.outputs[0].uses()
        other = user.inputs[1 - index]  # [N, rows, d]: Concat puts the row before them
        graph.cursor = user
        first, one = (graph.constant(f"row_{at}", np.array([at], np.int64)) for at in (0, 1))
        like = graph.node("Slice", [other, first, one, one])
        zeros = graph.node("Sub", [like, like])
        graph.replace(node.outputs[0], graph.node("Add", [zeros, node.inputs[0]]))


def _lower_constants(graph: GraphEditor, dtype: ir.DataType) -> None:
    """Fold casts of constants: no Cast of a parameter is left for a pass."""
    for node in tuple(graph.graph):
        graph.cursor = node
        if node.op_type == "Gather" and _is_table(node.inputs[0]):
            _lower_table(graph, node, dtype)
        elif node.op_type != "Cast" and node.domain != FUNCTIONS:
            for index, value in enumerate(node.inputs):
                producer = value.producer() if value is not None else None
                if value is None or producer is None or producer.op_type != "Cast":
                    continue
                array = constant_array(value)
                if array is not None:
                    name = f"{parameter_name(value)}.{array.dtype}"
                    new = graph.weight(name, lambda array=array: array)
                    node.replace_input_with(index, new)


def _is_table(value: ir.Value | None) -> bool:
    tensor = value.const_value if value is not None else None
    return tensor is not None and len(tensor.shape) == 2 and tensor.dtype.is_floating_point()


def _lower_table(graph: GraphEditor, node: ir.Node, dtype: ir.DataType) -> None:
    """Store an embedding in the activations' type; a tied head may share it."""
    table = node.inputs[0]
    assert table is not None
    tensor = table.const_value
    assert tensor is not None
    name = f"{parameter_name(table)}.{dtype.name.lower()}"
    new = graph.weight(name, lambda: tensor.numpy().astype(dtype.numpy()))
    node.replace_input_with(0, new)
    for user, _ in tuple(node.outputs[0].uses()):
        if user.op_type == "Cast" and tensor.dtype != dtype:
            graph.replace(user.outputs[0], node.outputs[0])
