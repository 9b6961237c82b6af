"""RoPE frequencies that depend on the KV cache capacity, bound when it is known."""

from __future__ import annotations

import onnx_ir as ir

from edgellm.build.lowering.function_calls import find_calls
from edgellm.core.onnx_functions import ROTARY_TABLES


def bind_frequencies(graph: ir.Graph, capacity: int) -> None:
    """Give each table the factors of short or of long texts (longrope) instead of a choice."""
    for call in find_calls(graph, ROTARY_TABLES):
        frequencies = call.inputs[1]
        choice = frequencies.producer() if frequencies is not None else None
        if choice is None or choice.op_type != "Where":
            continue
        condition, long, short = choice.inputs
        greater = condition.producer() if condition is not None else None
        assert greater is not None and greater.op_type == "Greater"  # noqa: PT018
        limit = greater.inputs[1]
        assert limit is not None and limit.const_value is not None  # noqa: PT018
        is_long = capacity > int(limit.const_value.numpy().item())
        call.replace_input_with(1, long if is_long else short)
