"""Removes the rounding of quantized layers' inputs from portable graphs for ONNX Runtime.

The kernels here round activations themselves, with a scale for each row or block. That is finer
than the calibrated scale of a whole tensor in the graph.
"""

from __future__ import annotations

import onnx_ir as ir

from edgellm.build.lowering.function_calls import find_calls, require_known
from edgellm.build.lowering.graph import GraphEditor
from edgellm.core.onnx_functions import (
    ROUND_INPUT,
    ROUND_INPUT_FP4,
    SMOOTH_INPUT,
)


def lower_inputs(graph: GraphEditor) -> None:
    """Remove the rounding of inputs, and merge equal smoothing of one input.

    Layers with the same input and smoothing can then be merged.
    """
    for call in find_calls(graph.graph, ROUND_INPUT, ROUND_INPUT_FP4):
        require_known(call)
        assert call.inputs[0] is not None
        graph.replace(call.outputs[0], call.inputs[0])
    smoothed: dict[tuple[ir.Value, bytes], ir.Value] = {}
    for call in find_calls(graph.graph, SMOOTH_INPUT):
        require_known(call)
        x, factors = call.inputs
        assert x is not None and factors is not None and factors.const_value is not None  # noqa: PT018
        key = x, factors.const_value.numpy().tobytes()
        if key not in smoothed:
            graph.cursor = call
            smoothed[key] = graph.node("Mul", [x, factors])
        graph.replace(call.outputs[0], smoothed[key])
