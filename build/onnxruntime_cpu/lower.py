"""Lowers a portable decoder graph to operators with fast CPU kernels in ONNX Runtime.

Portable graphs attend over the whole capacity of the cache. Here that becomes
GroupQueryAttention on shared past/present buffers, whose cost depends on the used length. Linear
layers with the same input become one GEMM, and residual additions are fused into norms. Only
operators up to opset 21 remain, so that older ONNX Runtimes on boards load the engine, too.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.contrib_ops import (
    bind_capacity,
    finish,
    lower_activations,
    lower_cross_attention,
    lower_encoder_attention,
    lower_norms,
    lower_rotations,
)
from edgellm.build.lowering.embeddings import look_up_blocks
from edgellm.build.lowering.function_calls import READ_BY_LOWERINGS, inline
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.groups import LinearKernel, lower_linears
from edgellm.build.lowering.linears.rounded_inputs import lower_inputs
from edgellm.build.lowering.lora import Marks
from edgellm.build.lowering.weights import (
    WeightFile,
    constant_array,
    parameter_name,
)
from edgellm.build.onnxruntime_cpu.edgellm_kernels.attention import (
    lower_attention as lower_own_attention,
)
from edgellm.build.onnxruntime_cpu.edgellm_kernels.attention import (
    lower_audio_attention,
    lower_audio_outputs,
)
from edgellm.build.onnxruntime_cpu.edgellm_kernels.embedding import lower_embeddings
from edgellm.build.onnxruntime_cpu.edgellm_kernels.experts import lower_experts
from edgellm.build.onnxruntime_cpu.edgellm_kernels.linears import OwnLinears, lower_own_linears
from edgellm.build.onnxruntime_cpu.edgellm_kernels.recurrent import lower_recurrences, recurrences
from edgellm.build.onnxruntime_cpu.grouped_attention import lower_attention, narrow_cache
from edgellm.core import graph_io
from edgellm.core.model_spec import KVCacheSpec
from edgellm.core.onnx_functions import FUNCTIONS, ROUTER
from edgellm.device_runtime.kernels.library import DOMAIN

_HALF_TYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def lower(
    model: ir.Model,
    kernel: LinearKernel,
    weights: WeightFile,
    cache: KVCacheSpec | None = None,
    capacity: int = 0,
    *,
    needs_mask: bool = True,
    takes_adapters: bool = False,
    own_kernels: bool = False,
) -> None:
    """Rewrite `model` in place for one kernel of linear layers.

    Args:
        model: any graph of `edgellm-export`.
        kernel: computes the linear layers; edgellm's own includes its attention.
        weights: receives every weight.
        cache: of a graph that has one; int8 has one scale for each tensor.
        capacity: tokens of the cache.
        needs_mask: False for a graph of one token, which attends to all earlier ones.
        takes_adapters: linear layers add LoRA adapters; with edgellm's own kernels.
        own_kernels: edgellm's kernels compute recurrent layers, as with its linear layers.
    """
    own_kernels = own_kernels or isinstance(kernel, OwnLinears)
    graph = GraphEditor(model.graph, weights)
    if cache is not None:
        bind_capacity(model.graph, capacity)
    own_recurrent = recurrences(model) if own_kernels else ()
    kept = (*READ_BY_LOWERINGS, *own_recurrent)
    if not isinstance(kernel, OwnLinears):  # routers are plain products there
        kept = tuple(name for name in kept if name != ROUTER)
    inline(model, keep=kept)
    _lower_signature(model.graph)
    marks = Marks(graph) if takes_adapters else None
    lower_inputs(graph)
    if isinstance(kernel, OwnLinears):
        lower_embeddings(graph, kernel)
    _lower_floats(graph)
    look_up_blocks(graph)
    if isinstance(kernel, OwnLinears):
        lower_experts(graph, kernel)
        lower_own_linears(graph, kernel, marks)
        _lower_candidates(graph)
    else:
        lower_linears(graph, kernel)
    lower_recurrences(graph, own_recurrent)
    lower_rotations(graph)
    if cache is None:
        lower_encoder_attention(graph)
    elif isinstance(kernel, OwnLinears):
        lower_own_attention(graph, cache, capacity)
    else:
        _lower_attention(graph, cache, needs_mask=needs_mask)
    _lower_audio(graph, kernel, cache, capacity)
    _drop_argmax(model.graph)
    lower_norms(graph)
    lower_activations(graph)
    finish(model)
    if own_kernels:
        model.graph.opset_imports[DOMAIN] = 1


def take_answers(graph: ir.Graph) -> None:
    """Make the first axis of heads the batch; heads have no state."""
    for node in graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = None  # it was for batch size 1
    for value in (*graph.inputs, *graph.outputs):
        if value.name != graph_io.TOP_K and value.shape is not None:
            value.shape = ir.Shape([graph_io.ANSWERS, *value.shape.dims[1:]])


def _lower_audio(
    graph: GraphEditor, kernel: LinearKernel, cache: KVCacheSpec | None, capacity: int
) -> None:
    """Attention to audio, by edgellm's kernels if they compute the linear layers."""
    if isinstance(kernel, OwnLinears):
        lower_audio_attention(graph, cache, capacity)
        lower_audio_outputs(graph, capacity)
    lower_cross_attention(graph)


def _lower_attention(graph: GraphEditor, cache: KVCacheSpec, *, needs_mask: bool) -> None:
    lower_attention(graph, needs_mask=needs_mask)
    if cache.dtype == "int8":
        assert cache.ranges is not None
        narrow_cache(graph, cache.ranges)


def _lower_signature(graph: ir.Graph) -> None:
    for value in (*graph.inputs, *graph.outputs):
        if value.dtype in _HALF_TYPES:
            value.type = ir.TensorType(ir.DataType.FLOAT)


def _drop_argmax(graph: ir.Graph) -> None:
    """Drop ArgMax: NumPy needs a fifth of the operator's time."""
    graph.outputs[:] = [value for value in graph.outputs if value.name != graph_io.TOKEN_IDS]


def _lower_candidates(graph: GraphEditor) -> None:
    """Compute a draft's candidates and their log-softmax in one pass over its logits."""
    for top in graph.find("TopK"):
        scores, count = top.inputs
        if scores is None or len(tuple(scores.uses())) != 1:
            continue
        softmax = scores.producer()
        if softmax is None or softmax.op_type != "LogSoftmax":
            continue
        graph.cursor = top
        ids, _, log_probs = graph.nodes("Picks", [softmax.inputs[0], count], 3, domain=DOMAIN)
        for old, new in zip(top.outputs, (log_probs, ids), strict=True):
            graph.replace(old, new)
        graph.graph.remove([top, softmax], safe=True)


# ----------------------------------------------------------------------------- float types
def _lower_floats(graph: GraphEditor) -> None:
    """Compute in float32: the CPU has no fast float16 or bfloat16 kernels."""
    for node in tuple(graph.graph):
        graph.cursor = node
        if node.op_type == "Gather" and _is_table(node.inputs[0]):
            _lower_embedding(graph, node)
        elif node.op_type == "Gather" and _is_external(node.inputs[0]):
            ids = node.inputs[0]
            assert ids is not None and ids.const_value is not None  # noqa: PT018
            node.replace_input_with(0, graph.weight(f"{ids.name}.ids", ids.const_value.numpy))
        elif node.op_type != "Cast" and node.domain != FUNCTIONS:
            for index, value in enumerate(node.inputs):
                if value is not None and _is_half_constant(value):
                    array = _before_halves(value)
                    assert array is not None
                    name = f"{parameter_name(value)}.fp32"
                    floats = array.astype(np.float32)
                    node.replace_input_with(index, graph.weight(name, lambda floats=floats: floats))
    for node in graph.find("Cast"):
        if node.attributes["to"].as_int() == int(ir.DataType.FLOAT16):
            node.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.FLOAT))


def _before_halves(value: ir.Value) -> np.ndarray | None:
    """The data of a constant before its cast to float16: norms are stored in float32."""
    node = value.producer()
    source = node.inputs[0] if node is not None and node.op_type == "Cast" else value
    return None if source is None else constant_array(source)


def _is_table(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None and len(value.const_value.shape) == 2


def _is_external(value: ir.Value | None) -> bool:
    return value is not None and isinstance(value.const_value, ir.ExternalTensor)


def _lower_embedding(graph: GraphEditor, node: ir.Node) -> None:
    """Keep the table in its stored type and cast the looked-up rows, which are few."""
    table = node.inputs[0]
    assert table is not None and table.const_value is not None  # noqa: PT018
    tensor = table.const_value
    node.replace_input_with(0, graph.weight(f"{table.name}.table", tensor.numpy))
    if tensor.dtype == ir.DataType.FLOAT16:
        uses = tuple(node.outputs[0].uses())
        graph.cursor = graph.graph[list(graph.graph).index(node) + 1]
        cast = graph.node("Cast", [node.outputs[0]], to=int(ir.DataType.FLOAT))
        for user, index in uses:
            user.replace_input_with(index, cast)


def _is_half_constant(value: ir.Value) -> bool:
    """A constant that is float16, or that is a weight outside the graph file."""
    array_source = value
    node = value.producer()
    while node is not None and node.op_type == "Cast" and node.inputs[0] is not None:
        array_source = node.inputs[0]
        node = array_source.producer()
    tensor = array_source.const_value
    if tensor is None or not tensor.dtype.is_floating_point():
        return False
    return tensor.dtype in _HALF_TYPES or isinstance(tensor, ir.ExternalTensor)
