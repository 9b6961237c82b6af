"""Finds, checks and inlines calls of edgellm's functions in a portable graph."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, RemoveUnusedFunctionsPass, RemoveUnusedNodesPass

from edgellm.core.errors import (
    BrokenArtifactError,
    UnsupportedModelError,
)
from edgellm.core.onnx_functions import (
    ATTENTION,
    BLOCK_EXPERTS,
    BLOCK_FACTORS,
    BLOCK_LINEAR,
    CROSS_ATTENTION,
    EXPERTS,
    FP4_EXPERTS,
    FP4_LINEAR,
    FUNCTIONS,
    FUNCTIONS_OF_CODES,
    FUNCTIONS_OF_ROWS,
    LINEAR,
    NVFP4_EXPERTS,
    OFFSET_LINEAR,
    QUANTIZED_EXPERTS,
    QUANTIZED_LINEAR,
    ROUND_INPUT,
    ROUND_INPUT_FP4,
    ROUTER,
    SHIFTED_EXPERTS,
    SHIFTED_LINEAR,
    SINK_ATTENTION,
    SMOOTH_INPUT,
    UNROTATED_ATTENTION,
    VISIBLE_AROUND,
    VISIBLE_BEFORE,
    VISIBLE_BOTH_WAYS,
    VISIBLE_IN_WINDOW,
    VISIBLE_SLOTS,
)

LINEARS = LINEAR, QUANTIZED_LINEAR, SHIFTED_LINEAR, BLOCK_LINEAR, OFFSET_LINEAR, FP4_LINEAR
ROWS = tuple(FUNCTIONS_OF_ROWS)
CODES = tuple(FUNCTIONS_OF_CODES)
EXPERT_CALLS = (
    EXPERTS, QUANTIZED_EXPERTS, SHIFTED_EXPERTS, BLOCK_EXPERTS, FP4_EXPERTS, NVFP4_EXPERTS,
)  # fmt: skip
READ_BY_LOWERINGS = (
    *LINEARS, *ROWS, *CODES, *EXPERT_CALLS, BLOCK_FACTORS, ROUTER, ROUND_INPUT, ROUND_INPUT_FP4,
    SMOOTH_INPUT, ATTENTION, UNROTATED_ATTENTION, SINK_ATTENTION, CROSS_ATTENTION, VISIBLE_SLOTS,
    VISIBLE_IN_WINDOW, VISIBLE_BEFORE, VISIBLE_BOTH_WAYS, VISIBLE_AROUND,
)  # fmt: skip


def find_calls(graph: ir.Graph, *names: str) -> list[ir.Node]:
    """The calls of these functions, in order."""
    return [node for node in graph if is_call(node, *names)]


def is_call(node: ir.Node | None, *names: str) -> bool:
    """Whether a node calls one of these functions."""
    return node is not None and node.domain == FUNCTIONS and node.op_type in names


def require_known(call: ir.Node, *attributes: str) -> None:
    """Reject calls with attributes that the lowering does not support.

    Raises:
        UnsupportedModelError: an attribute is unknown.
    """
    if unknown := call.attributes.keys() - {*attributes}:
        raise UnsupportedModelError(
            f"{call.name}: this backend does not compute {', '.join(sorted(unknown))} of "
            f"{call.op_type}",
            hint="update edgellm on this machine, or build for another --backend",
        )


def inline(model: ir.Model, *, keep: tuple[str, ...] = ()) -> None:
    """Inline all calls of functions, except those in `keep`.

    Raises:
        BrokenArtifactError: the model lacks a called function.
        UnsupportedModelError: a call has an attribute that the body does not have.
    """
    RemoveUnusedNodesPass()(model)
    bodies = {name: function for (_, name, _), function in model.functions.items()}
    for node in model.graph:
        if node.domain == FUNCTIONS and node.op_type in bodies.keys() - {*keep}:
            require_known(node, *bodies[node.op_type].attributes)
    InlinePass(lambda function: function.name not in keep)(model)
    RemoveUnusedFunctionsPass()(model)
    called = {node.op_type for node in model.graph if node.domain == FUNCTIONS}
    defined = {function.name for function in model.functions.values()}
    if missing := called - defined - {*keep}:
        raise BrokenArtifactError(
            f"the graph calls {', '.join(sorted(missing))}, which it does not define",
            hint="export the bundle again",
        )
