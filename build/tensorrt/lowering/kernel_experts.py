"""Mixtures of experts as plugin nodes with edgellm's kernels in TensorRT.

TensorRT's operators compute the router's product, `kernel_routing.py` what follows it.
`group_rows`, `expert_gates`, `expert_downs` and `sum_experts` (`kernels/triton/experts.py`) read
the chosen experts by a table of addresses (`graph_io.WEIGHT_TABLE`). So experts are not among the
constants of a plan, and no step of a build copies them but into their file (`addressed_weights.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.experts import ExpertLayer
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.tensorrt.lowering.addressed_weights import StoredForm, write_experts
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
from edgellm.device_runtime.runners.tensorrt.cuda.weight_table import table_entries
from edgellm.device_runtime.runners.tensorrt.library import expert_nodes

_F16, _I32 = ir.DataType.FLOAT16, ir.DataType.INT32
_UNLIMITED = float(np.finfo(np.float32).max)


def why_not(graph: ir.Graph, sm: int, driver_ptx: int | None) -> str:
    """Why the kernels do not support the experts of a graph; see `kernel_attention`."""
    for layer in ExpertLayer.all_of(graph):
        gate, up, down = (StoredForm.of(stack) for stack in layer.stacks)
        if (gate.codes, gate.block) != (up.codes, up.block):
            return (
                f"there are kernels for gates and ups that are stored alike, not for {layer.name}"
            )
        for form, stack in ((up, layer.up), (down, layer.down)):
            if fault := form.fault(stack.shape, sm):
                return f"there are kernels for {fault}"
        if fault := missing(_variants(up, down), sm, driver_ptx):
            return fault
    return ""


def _variants(up: StoredForm, down: StoredForm) -> Iterator[Variant]:
    yield from (GROUP_ROWS, SUM_EXPERTS, expert_gates(up.codes), expert_downs(down.codes))


def lower_experts(graph: GraphEditor, sm: int, path: Path) -> None:
    """Rewrite all experts of a graph that `why_not` accepts, and their routing.

    Args:
        graph: before functions are inlined.
        sm: compute capability of the GPU.
        path: receives the weights of experts; not written if there are none.
    """
    layers = ExpertLayer.all_of(graph.graph)
    if not layers:
        return
    write_experts(path, layers)
    shape = [table_entries(len(layers))]
    table = graph.input(graph_io.WEIGHT_TABLE, ir.DataType.INT64, shape)
    for index, layer in enumerate(layers):
        graph.cursor = layer.call
        graph.replace(layer.call.outputs[0], _emit(graph, layer, index, table, sm))
    for layer in layers:
        graph.graph.remove(layer.call, safe=True)
    lower_routing(graph, sm)


def _emit(graph: GraphEditor, layer: ExpertLayer, index: int, table: ir.Value, sm: int) -> ir.Value:
    """The nodes of a layer; y [1, S, H]."""
    _, hidden, inner = layer.up.shape
    up, down = StoredForm.of(layer.up), StoredForm.of(layer.down)
    rows, top_k = graph_io.ROWS, layer.top_k
    sizes = {"layer": index, "experts": layer.count, "top_k": top_k}
    given = {**sizes, "hidden": hidden, "inner": inner, "capability": sm}
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
        [layer.x, order, begins, table],
        [(_F16, [1, rows, top_k * inner])],
        **given,
        codes=up.codes,
        block=up.block,
        gating_bits=_gating_bits(layer),
    )
    (parts,) = emit_node(
        graph,
        expert_nodes.EXPERT_DOWNS,
        [gated, layer.shares, order, begins, table],
        [(_F16, [1, rows, top_k * hidden])],
        **given,
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
