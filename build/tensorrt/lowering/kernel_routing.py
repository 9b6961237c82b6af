"""Routing of mixtures of experts as one plugin node with edgellm's kernel in TensorRT.

`route_rows` (`kernels/triton/routing.py`) takes the logits of a router, and gives experts and their
shares. Where it does not compute a call, TensorRT's operators compute the function's body.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.function_calls import require_known
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.tensorrt.lowering.kernel_attention import emit_node
from edgellm.core import graph_io
from edgellm.core.onnx_functions import FUNCTIONS, RoutingForm
from edgellm.device_runtime.kernels.triton.catalog import has_route_rows
from edgellm.device_runtime.runners.tensorrt.library import expert_nodes

_F16, _F32, _I64 = ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.INT64
_OPERANDS = ("offsets", "bias", "factors")
_NUMBERS = {"cap": 1.0, "smallest_sum": 0.0, "added": 0.0, "scale": 1.0}  # neutral ones


def lower_routing(graph: GraphEditor, sm: int) -> None:
    """Rewrite the routing of all layers whose sizes and types the kernel supports.

    Args:
        graph: before functions are inlined.
        sm: compute capability of the GPU.
    """
    for call in list(graph.graph):
        form = RoutingForm.of(call.op_type) if call.domain == FUNCTIONS else None
        if form is None or not form.cast or call.attributes["to"].as_int() != _F16:
            continue
        require_known(call, "experts", "top_k", *_NUMBERS, "to")
        experts, top_k = (call.attributes[name].as_int() for name in ("experts", "top_k"))
        if not has_route_rows(experts, top_k):
            continue
        graph.cursor = call
        outputs = _emit(graph, call, form, sm)
        for old, new in zip(call.outputs, outputs, strict=True):
            graph.replace(old, new)
        graph.graph.remove(call, safe=True)


def _emit(graph: GraphEditor, call: ir.Node, form: RoutingForm, sm: int) -> Sequence[ir.Value]:
    """Ids and shares [1, S, K]."""
    logits, _, *given = call.inputs  # the second is K
    operands = dict(zip(form.operands, given, strict=True))
    if form.weighted:
        operands["factors"] = graph.node("Cast", [operands["factors"]], to=int(_F32))
    numbers = {
        name: call.attributes[name].as_float() if name in form.numbers else neutral
        for name, neutral in _NUMBERS.items()
    }
    experts, top_k = (call.attributes[name].as_int() for name in ("experts", "top_k"))
    shape: list[int | str | None] = [1, graph_io.ROWS, top_k]
    return emit_node(
        graph,
        expert_nodes.ROUTE_ROWS,
        # The logits are placeholders of operands that are not read.
        [logits, *(operands.get(name, logits) for name in _OPERANDS)],
        [(_I64, shape), (_F16, shape)],
        experts=experts,
        top_k=top_k,
        capability=sm,
        steps=[int(getattr(form, step)) for step in expert_nodes.STEPS],
        number_bits=np.array([*numbers.values()], np.float32).view(np.int32).tolist(),
    )
