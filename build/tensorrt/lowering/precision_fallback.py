"""`--fallbackPrecision`: weight types that a GPU does not support become INT4 or float16."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.function_calls import is_call
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.round_int4 import nearest_int4
from edgellm.build.lowering.linears.weights import KINDS, LinearWeight, layer_name, linear_layers
from edgellm.build.lowering.weights import WeightFile
from edgellm.build.tensorrt.lowering.int4_blocks import TAKEN, refuse_signs
from edgellm.build.tensorrt.lowering.op_table import first_with_blocks, first_with_weights
from edgellm.build.tensorrt.target import Target
from edgellm.core import onnx_functions
from edgellm.core.errors import EdgeLLMError, require_choice
from edgellm.device_runtime.runners.tensorrt.library.trt_import import Library

INT4, FP16 = "int4", "fp16"
BLOCK_SIZE = min(TAKEN)  # the smaller, the closer
_FIRST_FP8, _FIRST_FP4 = 89, 100  # Ada and Hopper, Blackwell
_NEEDS = (  # type, first GPU, name, alternative quantizations
    (ir.DataType.FLOAT4E2M1, _FIRST_FP4, "NVFP4", "fp8, int4_awq or int8_sq"),
    (ir.DataType.FLOAT8E4M3FN, _FIRST_FP8, "FP8", "int4_awq or int8_sq"),
)
FP8_BLOCKS = "fp8 blocks"  # in addition to the kinds of `LinearWeight`
_FIRST_FP8_BLOCKS = first_with_blocks(ir.DataType.FLOAT8E4M3FN)
_AGAIN = "or round again: --fallbackPrecision int4 or fp16"
_JETPACK = "on a Jetson flash JetPack 7.2"


def check_types(models: Collection[ir.Model], target: Target, fallback: str) -> None:
    """Reject weight types that GPU or library do not support; int4 and int8 run everywhere.

    Raises:
        EdgeLLMError: an unsupported type, with those that support it; or an unknown `fallback`.
        UnsupportedModelError: negative scales that no library supports.
    """
    if fallback:
        require_choice("--fallbackPrecision", fallback, (INT4, FP16))
    types = {value.dtype for model in models for value in model.graph.initializers.values()}
    sm, library = target.sm, target.library
    for needed, first, name, instead in () if fallback else _NEEDS:
        hint = f"quantize with {instead}, {_AGAIN}"
        if needed in types and sm < first:
            raise EdgeLLMError(
                f"{name} needs a GPU of compute capability {first / 10} or newer, not {sm / 10}",
                hint=hint,
            )
        if needed in types and library.version < (oldest := first_with_weights(needed)):
            raise EdgeLLMError(
                f"{name} needs TensorRT {oldest[0]}.{oldest[1]} or newer, not {library.label}",
                hint=f"{hint}; {_JETPACK}",
            )
    lacking = lacking_kinds(target)
    for model in models:
        for _, weight in linear_layers(model.graph):
            if not is_lacking(weight, lacking):
                refuse_signs(weight)
            elif not fallback:
                _refuse_blocks(target.library)


def _refuse_blocks(library: Library) -> None:
    major, minor = _FIRST_FP8_BLOCKS
    raise EdgeLLMError(
        f"FP8 in blocks needs TensorRT {major}.{minor} or newer, not {library.label}",
        hint=f"quantize with edgellm-quantize, whose fp8 has no blocks, {_AGAIN}; {_JETPACK}",
    )


def is_lacking(weight: LinearWeight, lacking: Collection[str]) -> bool:
    """Whether a weight is among `lacking_kinds`."""
    has_blocks = weight.kind == "fp8" and bool(weight.parts[0].block_size)
    return weight.kind in lacking or (has_blocks and FP8_BLOCKS in lacking)


def lacking_kinds(target: Target) -> set[str]:
    """Unsupported types of GPU or library: kinds of `LinearWeight`, and `FP8_BLOCKS`."""
    blocks = {FP8_BLOCKS} if target.library.version < _FIRST_FP8_BLOCKS else set[str]()
    return blocks | {
        KINDS[needed]
        for needed, first, _, _ in _NEEDS
        if target.sm < first or target.library.version < first_with_weights(needed)
    }


@contextmanager
def temporary_weights(folder: Path) -> Iterator[WeightFile]:
    """A temporary file of requantized weights until they are lowered."""
    weights = WeightFile(folder / "fallback.data")
    try:
        yield weights
    finally:
        weights.close()
        weights.path.unlink()


def fall_back(
    model: ir.Model, weights: WeightFile, kinds: Collection[str], precision: str
) -> set[str]:
    """Replace the layers of some kinds in a portable graph; their inputs are not rounded.

    Args:
        model: rewritten in place.
        weights: receives the new weights.
        kinds: of the layers, see `lacking_kinds`.
        precision: `INT4`, in blocks of 64 inputs if the width is a multiple, or `FP16`.

    Returns:
        The kinds that were replaced.
    """
    graph, found = GraphEditor(model.graph, weights), set()
    for node, weight in list(linear_layers(model.graph)):
        if not is_lacking(weight, kinds):
            continue
        found.add(weight.kind)
        graph.cursor = node
        new = _replacement(graph, node, weight, precision)
        call = new.producer()
        assert call is not None
        call.name = node.name
        graph.replace(node.outputs[0], new)
        model.graph.remove(node, safe=True)
    return found


def _replacement(
    graph: GraphEditor, node: ir.Node, weight: LinearWeight, precision: str
) -> ir.Value:
    x, name = _unrounded(node.inputs[0]), layer_name(node)
    dense = weight.dense()
    if precision == FP16 or weight.in_features % BLOCK_SIZE:
        halves = graph.weight(f"{name}.{FP16}", lambda: dense.T.astype(np.float16))
        return graph.node(onnx_functions.LINEAR, [x, halves], domain=onnx_functions.FUNCTIONS)
    codes, scales = nearest_int4(dense, BLOCK_SIZE, has_signs=False)
    shape = weight.in_features, sum(weight.widths)
    return graph.node(
        onnx_functions.QUANTIZED_LINEAR,
        [
            x,
            graph.weight(f"{name}.{INT4}", lambda: codes, ir.DataType.INT4, shape),
            graph.weight(f"{name}.{INT4}_scale", lambda: scales),
        ],
        domain=onnx_functions.FUNCTIONS,
        axis=0,
        block_size=BLOCK_SIZE,
    )


def _unrounded(x: ir.Value | None) -> ir.Value | None:
    """A layer's input before rounding."""
    call = x.producer() if x is not None else None
    if is_call(call, onnx_functions.ROUND_INPUT, onnx_functions.ROUND_INPUT_FP4):
        assert call is not None
        return call.inputs[0]
    return x
