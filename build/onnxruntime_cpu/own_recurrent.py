"""Recurrences by edgellm's own kernels: rows one by one, with the same bits in any company."""

from __future__ import annotations

from edgellm.build.lowering.calls import find_calls, require_known
from edgellm.build.lowering.graph import GraphEditor
from edgellm.contract import DECAYING_RULE, DELTA_RULE, DELTA_UPDATE
from edgellm.device_runtime.kernels.library import DOMAIN

RECURRENCES = DELTA_RULE, DECAYING_RULE, DELTA_UPDATE


def lower_recurrences(graph: GraphEditor) -> None:
    """Rewrite all calls."""
    for call in find_calls(graph.graph, *RECURRENCES):
        require_known(call)
        graph.cursor, inputs = call, list(call.inputs)
        name = "GatedDeltaUpdate"
        if call.op_type != DELTA_UPDATE:
            name = "GatedDelta"
            del inputs[-2]  # the tree mask, which says the same as the parents
        if call.op_type == DECAYING_RULE:
            inputs.insert(4, None)  # rates
        outputs = graph.nodes(name, inputs, len(call.outputs), domain=DOMAIN)
        for old, new in zip(call.outputs, outputs, strict=True):
            graph.replace(old, new)
