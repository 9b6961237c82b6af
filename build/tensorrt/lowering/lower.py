"""Lowers a portable graph for TensorRT's parser and compiler, as ONNX with equal outputs.

Portable graphs are close to TensorRT's form, so little is left: sizes become constants, equal
rounding or smoothing of inputs is merged, and weights are laid out for all passes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from edgellm.build.lowering.bind_rope import bind_frequencies
from edgellm.build.lowering.embeddings import widen_tables
from edgellm.build.lowering.function_calls import inline
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.groups import lower_linears
from edgellm.build.lowering.lora import AdapterSums, Marks, Places
from edgellm.build.lowering.top_logits import add_top_logits
from edgellm.build.lowering.weights import WeightFile, keep_apart, parameter_name
from edgellm.build.tensorrt.lowering.addressed_weights import AddressedWeights
from edgellm.build.tensorrt.lowering.downgrade_ops import uncap_attention
from edgellm.build.tensorrt.lowering.kernel_attention import Kernels, lower_attention
from edgellm.build.tensorrt.lowering.kernel_experts import lower_experts
from edgellm.build.tensorrt.lowering.kernel_recurrence import lower_recurrences
from edgellm.build.tensorrt.lowering.kernel_vocabulary import lower_vocabulary
from edgellm.build.tensorrt.lowering.linears import StoredKernel, merge_key, split_rows
from edgellm.build.tensorrt.lowering.operators import experts as expert_operators
from edgellm.build.tensorrt.lowering.operators import recurrence as recurrent_operators
from edgellm.core import graph_io
from edgellm.device_runtime.runners.tensorrt.library.kernel_nodes import NODES

CAPACITY = "kv_capacity"
FP4_QUANTIZE = "TRT_FP4DynamicQuantize"  # TensorRT has an importer for it
_LARGEST_VECTOR = 1 << 17  # numbers; smoothing factors and scales that may be equal


def lower(
    model: ir.Model,
    weights: WeightFile,
    dtype: ir.DataType,
    capacity: int = 0,
    candidates: int = 0,
    kernels: Kernels | None = None,
    places: Places | None = None,
    addressed: Path | None = None,
) -> None:
    """Rewrite `model` in place.

    Args:
        model: any graph of `edgellm-export`.
        weights: receives every weight.
        dtype: of activations.
        capacity: tokens of the KV cache, a constant in TensorRT; 0 for graphs without one.
        candidates: of a draft, for each token. A K at run time would be a shape, and a pass with
            varying shapes cannot be captured as a CUDA graph.
        kernels: edgellm's, for all layers but dense products; None: TensorRT's operators.
        places: of LoRA adapters; None: linear layers take none.
        addressed: file that receives weights that kernels know by address; None: there are none.
    """
    if capacity:
        _bind(model.graph, CAPACITY, capacity)
        bind_frequencies(model.graph, capacity)
    graph = GraphEditor(model.graph, weights)
    if kernels is None:
        expert_operators.lower_experts(graph, dtype)
        recurrent_operators.lower_recurrences(graph, dtype)
    else:
        _lower_to_kernels(graph, kernels, capacity, addressed)
    if candidates:
        _fix_top_k(model.graph, candidates)
    common.DeduplicateInitializersPass(size_limit=_LARGEST_VECTOR)(model)
    common.CommonSubexpressionEliminationPass()(model)
    add_top_logits(graph)
    _lower_tables(graph, dtype)
    widen_tables(graph, dtype)
    kernel = StoredKernel(dtype)
    if places is None:
        lower_linears(graph, kernel, key=merge_key, split=split_rows)
    else:
        sums = AdapterSums(
            graph=graph,
            marks=Marks(graph),
            places=places,
            dtype=dtype,
            multiply=_by_rows,
            varies=True,
        )
        lower_linears(graph, kernel, key=merge_key, split=split_rows, adapt=sums)
    inline(model, keep=(FP4_QUANTIZE, *NODES))
    # The parser of 10.3 needs axes and similar inputs as initializers.
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.DeduplicateInitializersPass(size_limit=_LARGEST_VECTOR)(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    uncap_attention(model)
    keep_apart(model.graph, weights)


def _lower_to_kernels(
    graph: GraphEditor, kernels: Kernels, capacity: int, addressed: Path | None
) -> None:
    lower_attention(graph, kernels, capacity)
    lower_recurrences(graph, kernels.sm)
    if addressed is not None:
        weights = AddressedWeights(graph)
        lower_experts(graph, kernels.sm, weights)
        lower_vocabulary(graph, kernels, weights)
        weights.write(addressed)


def _by_rows(graph: GraphEditor, x: ir.Value, matrix: ir.Value) -> ir.Value:
    return graph.node("MatMul", [x, graph.node("Transpose", [matrix], perm=[1, 0])])


def _bind(graph: ir.Graph, symbol: str, size: int) -> None:
    """Set the size of a symbolic dimension of inputs and outputs."""
    for value in (*graph.inputs, *graph.outputs):
        dims = [size if str(dim) == symbol else dim for dim in value.shape or ()]
        value.shape = ir.Shape(dims)


def _fix_top_k(graph: ir.Graph, candidates: int) -> None:
    top_k = next((value for value in graph.inputs if value.name == graph_io.TOP_K), None)
    if top_k is None:  # the fuse graph has no candidates
        return
    fixed = ir.Value(
        name="lowered.top_k",
        shape=ir.Shape([1]),
        type=ir.TensorType(ir.DataType.INT64),
        const_value=ir.tensor(np.array([candidates], np.int64)),
    )
    graph.register_initializer(fixed)
    for user, index in tuple(top_k.uses()):
        user.replace_input_with(index, fixed)
    graph.inputs.remove(top_k)


def _lower_tables(graph: GraphEditor, dtype: ir.DataType) -> None:
    """Store embeddings in the activations' type; a tied head may share them."""
    for node in graph.find("Gather"):
        table = node.inputs[0]
        tensor = table.const_value if table is not None else None
        if table is None or tensor is None or len(tensor.shape) != 2:
            continue
        name = f"{parameter_name(table)}.{dtype.name.lower()}"
        node.replace_input_with(0, graph.weight(name, lambda t=tensor: _cast(t, dtype)))
        for user, _ in tuple(node.outputs[0].uses()):
            if user.op_type == "Cast" and tensor.dtype != dtype:
                graph.replace(user.outputs[0], node.outputs[0])


def _cast(tensor: ir.TensorProtocol, dtype: ir.DataType) -> np.ndarray:
    return tensor.numpy().astype(dtype.numpy())
