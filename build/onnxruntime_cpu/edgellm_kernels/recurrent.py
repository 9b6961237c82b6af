"""Recurrences by edgellm's kernels: token by token, batch-invariant."""

from __future__ import annotations

import onnx_ir as ir

from edgellm.build.lowering.function_calls import find_calls, require_known
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.recurrent import store_taps
from edgellm.core.graph_io import STATE
from edgellm.core.onnx_functions import (
    CHANNEL_DELTA_RULE,
    CONVOLUTION,
    DECAYING_RULE,
    DELTA_RULE,
    DELTA_UPDATE,
)
from edgellm.device_runtime.kernels.library import DOMAIN

_RULES = DELTA_RULE, CHANNEL_DELTA_RULE, DECAYING_RULE, DELTA_UPDATE
_STATES = "states"  # symbol of their number


def recurrences(model: ir.Model) -> tuple[str, ...]:
    """Functions of a model that have kernels."""
    names = (name for _, name, _ in model.functions)
    return tuple(name for name in names if name in _RULES or name.startswith(CONVOLUTION))


def lower_recurrences(graph: GraphEditor, functions: tuple[str, ...]) -> None:
    """Rewrite all calls of `recurrences`, for batches of any size."""
    for call in find_calls(graph.graph, *functions):
        require_known(call)
        graph.cursor, inputs = call, list(call.inputs)
        if call.op_type.startswith(CONVOLUTION):
            inputs[2] = store_taps(graph, call, ir.DataType.FLOAT)
            graph.replace(call.outputs[0], graph.node("Convolution", inputs, domain=DOMAIN))
            continue
        name = "GatedDeltaUpdate"
        if call.op_type != DELTA_UPDATE:
            name = "GatedDelta"
            del inputs[-2]  # the tree mask, implied by the parents
        if call.op_type == DECAYING_RULE:
            inputs.insert(4, None)  # rates
        outputs = graph.nodes(name, inputs, len(call.outputs), domain=DOMAIN)
        for old, new in zip(call.outputs, outputs, strict=True):
            graph.replace(old, new)
    if {*functions} - {DELTA_UPDATE}:  # a commit has batch size 1
        for value in graph.graph.inputs:
            if str(value.name).startswith(STATE) and value.shape is not None:
                value.shape = ir.Shape([_STATES, *value.shape[1:]])
