"""Recurrences by edgellm's own kernels: rows one by one, with the same bits in any company."""

from __future__ import annotations

from edgellm.build.lowering.calls import find_calls, require_known
from edgellm.build.lowering.graph import GraphEditor
from edgellm.contract import DELTA_RULE, DELTA_UPDATE
from edgellm.device_runtime.kernels.library import DOMAIN

RECURRENCES = DELTA_RULE, DELTA_UPDATE
_MASK = 6  # place of the tree mask among the rule's inputs; parents say the same


def lower_recurrences(graph: GraphEditor) -> None:
    """Rewrite all calls."""
    for call in find_calls(graph.graph, *RECURRENCES):
        require_known(call)
        graph.cursor, inputs = call, list(call.inputs)
        name = "GatedDeltaUpdate"
        if call.op_type == DELTA_RULE:
            name = "GatedDelta"
            del inputs[_MASK]
        outputs = graph.nodes(name, inputs, len(call.outputs), domain=DOMAIN)
        for old, new in zip(call.outputs, outputs, strict=True):
            graph.replace(old, new)
