"""Mixtures of experts as plugin nodes with edgellm's kernels in TensorRT.

TensorRT's operators compute the router's product, `kernel_routing.py` what follows it.
`group_rows`, `expert_gates`, `expert_downs` and `sum_experts` (`kernels/triton/experts.py`) read
the chosen experts by a table of addresses (`addressed_weights.py`). So experts are not among the
constants of a plan, and no step of a build copies them but into their file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.experts import ExpertLayer, Stack
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.weights import WeightPart
from edgellm.build.tensorrt.lowering.addressed_weights import AddressedWeights, Matrix, StoredForm
from edgellm.build.tensorrt.lowering.kernel_attention import emit_node, missing
from edgellm.build.tensorrt.lowering.kernel_routing import lower_routing
from edgellm.core import graph_io
from edgellm.device_runtime.kernels.triton.catalog import (
    GROUP_ROWS,
    SUM_EXPERTS,
    Variant,
    expert_downs,
    expert_gates,
)
from edgellm.device_runtime.runners.tensorrt.library import expert_nodes

_F16, _I32 = ir.DataType.FLOAT16, ir.DataType.INT32
_UNLIMITED = float(np.finfo(np.float32).max)


def why_not(graph: ir.Graph, sm: int, driver_ptx: int | None) -> str:
    """Why the kernels do not support the experts of a graph; see `kernel_attention`."""
    for layer in ExpertLayer.all_of(graph):
        gate, up, down = map(form_of, layer.stacks)
        if (gate.codes, gate.block) != (up.codes, up.block):
            return (
                f"there are kernels for gates and ups that are stored alike, not for {layer.name}"
            )
        for form, stack in ((up, layer.up), (down, layer.down)):
            if fault := form.fault("experts", stack.shape[1:], sm):
                return f"there are kernels for {fault}"
        if fault := missing(_variants(up, down), sm, driver_ptx):
            return fault
    return ""


def _variants(up: StoredForm, down: StoredForm) -> Iterator[Variant]:
    yield from (GROUP_ROWS, SUM_EXPERTS, expert_gates(up.codes), expert_downs(down.codes))


def lower_experts(graph: GraphEditor, sm: int, weights: AddressedWeights) -> None:
    """Rewrite all experts of a graph that `why_not` accepts, and their routing.

    Args:
        graph: before functions are inlined.
        sm: compute capability of the GPU.
        weights: receives the weights of experts.
    """
    layers = ExpertLayer.all_of(graph.graph)
    for layer in layers:
        graph.cursor = layer.call
        graph.replace(layer.call.outputs[0], _emit(graph, layer, weights, sm))
    for layer in layers:
        graph.graph.remove(layer.call, safe=True)
    lower_routing(graph, sm)


def _matrices(layer: ExpertLayer, weights: AddressedWeights) -> int:
    """Add gates, ups and downs of a layer; the index of the first.

    Without gates the ups are read twice.
    """
    first = len(weights)
    for at, (stack, bias) in enumerate(zip(layer.stacks, layer.biases, strict=True)):
        twin = first + 1 if at == 0 and not layer.is_gated else None
        weights.add(Matrix(parts=partial(_experts, stack), bias=bias, twin=twin))
    return first


def _experts(stack: Stack) -> Iterator[WeightPart]:
    return map(stack.expert, range(stack.shape[0]))


def form_of(stack: Stack) -> StoredForm:
    """The stored form of experts."""
    return StoredForm.of(stack.expert(0))


def expert_bytes(layer: ExpertLayer) -> int:
    """Bytes of all experts of a layer in an engine, without biases."""
    return sum(form_of(each).num_bytes(math.prod(each.shape)) for each in stored_stacks(layer))


def stored_stacks(layer: ExpertLayer) -> tuple[Stack, ...]:
    """Those with weights of their own: without gates the ups are read twice."""
    return layer.stacks if layer.is_gated else layer.stacks[1:]


def _emit(graph: GraphEditor, layer: ExpertLayer, weights: AddressedWeights, sm: int) -> ir.Value:
    """The nodes of a layer; y [1, S, H]."""
    _, hidden, inner = layer.up.shape
    up, down = form_of(layer.up), form_of(layer.down)
    rows, top_k, first = graph_io.ROWS, layer.top_k, _matrices(layer, weights)
    given = {"experts": layer.count, "top_k": top_k, "hidden": hidden, "inner": inner}
    given["capability"] = sm
    order, begins = emit_node(
        graph,
        expert_nodes.GROUP_ROWS,
        [layer.ids],
        [(_I32, [1, rows, top_k]), (_I32, [1, layer.count + 1])],
        experts=layer.count,
        top_k=top_k,
        capability=sm,
    )
    (gated,) = emit_node(
        graph,
        expert_nodes.EXPERT_GATES,
        [layer.x, order, begins, weights.table],
        [(_F16, [1, rows, top_k * inner])],
        **given,
        matrix=first,
        codes=up.codes,
        block=up.block,
        gating_bits=_gating_bits(layer),
    )
    (parts,) = emit_node(
        graph,
        expert_nodes.EXPERT_DOWNS,
        [gated, layer.shares, order, begins, weights.table],
        [(_F16, [1, rows, top_k * hidden])],
        **given,
        matrix=first + 2,
        codes=down.codes,
        block=down.block,
    )
    summed = [(_F16, [1, rows, hidden])]
    facts = {"hidden": hidden, "top_k": top_k, "capability": sm}
    return emit_node(graph, expert_nodes.SUM_EXPERTS, [parts], summed, **facts)[0]


def _gating_bits(layer: ExpertLayer) -> list[int]:
    """The bits of alpha, limit, offset and cubic as float32."""
    limit = _UNLIMITED if layer.limit is None else layer.limit
    numbers = np.array([layer.alpha, limit, layer.offset, layer.cubic], np.float32)
    return numbers.view(np.int32).tolist()
