"""`llm_build --quantize int4`: float weights rounded on the device, without calibration."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgellm.build.lowering.experts import ExpertLayer, Stack
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.block_factors import slice_first
from edgellm.build.lowering.linears.weights import F32, LinearWeight, layer_name, linear_layers
from edgellm.build.lowering.weights import WeightFile, stored_array
from edgellm.core import onnx_functions
from edgellm.core.errors import EdgeLLMError

BLOCK_SIZE = 32
ROUNDED_SCALE = ".int4_scale"  # suffix of the scales' names
_BLOCKS_AT_ONCE = 2048  # fit a CPU cache
_OUTPUTS_AT_ONCE = 512
_CLIPPING = np.linspace(1, 0.7, 7, dtype=np.float32)  # of a block's largest weight


def check_quantize(kinds: set[str], quantize: str, *, takes_fp8: bool = False) -> None:
    """Reject rounding of quantized weights; raises `EdgeLLMError`.

    `takes_fp8`: FP8 may become int8, whose products are faster.
    """
    allowed = {"dense", "fp8"} if takes_fp8 and quantize == "int8" else {"dense"}
    if quantize in ("int4", "int8") and not kinds <= allowed:
        stored = ", ".join(sorted(kinds - {"dense"}))
        raise EdgeLLMError(
            f"--quantize {quantize} is for bundles with float weights; this one is {stored}",
            hint="leave out --quantize; edgellm-export --dtype fp32 makes floats of a GGUF file",
        )


@contextlib.contextmanager
def rounded_weights(
    folder: Path, quantize: str, on_progress: Callable[[int], None] = lambda _: None
) -> Iterator[WeightFile | None]:
    """A temporary file of weights that the build rounds to INT4; None without rounding.

    `on_progress`: how many bytes were written, while they are.
    """
    if quantize != "int4":
        yield None
        return
    rounded = WeightFile(folder / "rounded.data", on_progress)
    yield rounded
    rounded.close()
    rounded.path.unlink()


def load_portable(path: Path, rounded: WeightFile | None) -> ir.Model:
    """A portable graph; its dense linear weights are written to `rounded` as INT4."""
    model = ir.load(path)
    if rounded is not None:
        round_to_int4(model, rounded)
    return model


def round_to_int4(model: ir.Model, weights: WeightFile) -> None:
    """Replace dense layers by INT4 layers with blocks of 32 inputs.

    Weights whose inputs are not a multiple of 32 stay float.
    """
    graph = GraphEditor(model.graph, weights)
    for node, weight in list(linear_layers(model.graph)):
        if weight.kind != "dense" or weight.in_features % BLOCK_SIZE:
            continue
        graph.cursor = node
        loaded: list[tuple[np.ndarray, F32]] = []

        def load(weight: LinearWeight = weight, loaded: list = loaded) -> tuple[np.ndarray, F32]:
            if not loaded:
                loaded.append(round_stored(weight.parts[0].stored[0], BLOCK_SIZE))
            return loaded[0]

        shape = (weight.in_features, sum(weight.widths))
        codes = graph.weight(
            f"{layer_name(node)}.int4", lambda load=load: load()[0], ir.DataType.INT4, shape
        )
        scales = graph.weight(f"{layer_name(node)}.int4_scale", lambda load=load: load()[1])
        rounded = graph.node(
            onnx_functions.QUANTIZED_LINEAR,
            [node.inputs[0], codes, scales],
            domain=onnx_functions.FUNCTIONS,
            axis=0,
            block_size=BLOCK_SIZE,
        )
        call = rounded.producer()
        assert call is not None
        call.name = node.name
        graph.replace(node.outputs[0], rounded)
        model.graph.remove(node, safe=True)
    _round_experts(graph)


def _round_experts(graph: GraphEditor) -> None:
    """The same with the weights of all experts of a mixture, one expert at a time."""
    for layer in ExpertLayer.all_of(graph.graph):
        block, down_block = (expert_block(each.shape[1]) for each in (layer.gate, layer.down))
        if layer.gate.kind != "dense" or not block or not down_block:
            continue
        graph.cursor = layer.call
        stacks = {stack.parameter: stack for stack in layer.stacks}  # gate and up may be one
        codes = {name: _rounded_stack(graph, stack) for name, stack in stacks.items()}
        weights = [each for stack in layer.stacks for each in codes[stack.parameter]]
        given = {name: attribute.value for name, attribute in layer.call.attributes.items()}
        rounded = graph.node(
            onnx_functions.QUANTIZED_EXPERTS,
            [*layer.call.inputs[:3], *weights, *layer.call.inputs[-3:]],
            domain=onnx_functions.FUNCTIONS,
            block_size=block,
            down_block_size=down_block,
            **given,
        )
        call = rounded.producer()
        assert call is not None
        call.name = layer.call.name
        graph.replace(layer.call.outputs[0], rounded)
        graph.graph.remove(layer.call, safe=True)


def expert_block(width: int) -> int:
    """Inputs of an expert that share a scale; 0: not rounded."""
    return next((size for size in (BLOCK_SIZE, BLOCK_SIZE // 2) if width % size == 0), 0)


def _rounded_stack(graph: GraphEditor, stack: Stack) -> list[ir.Value]:
    """Codes [E, in, out] and scales [E, in / block, out]."""
    count, width, out = stack.shape
    block = expert_block(width)
    scales: list[F32] = []

    def codes() -> Iterator[bytes]:
        for index in range(count):
            found, scale = round_stored(stack.expert(index).stored[0], block)
            scales.append(scale)
            yield found.tobytes()

    shape = (count, width, out)
    packed = graph.streamed_weight(
        f"{stack.parameter}.int4", count * width * out // 2, codes, ir.DataType.INT4, shape
    )
    name = f"{stack.parameter}{ROUNDED_SCALE}"
    return [packed, graph.weight(name, lambda: np.stack(scales))]


def nearest_int4(dense: F32, block_size: int, *, has_signs: bool = True) -> tuple[np.ndarray, F32]:
    """Round to symmetric INT4 with, for each block, the clipping of least squared error.

    Args:
        dense: float32 [in, out].
        block_size: inputs that share a scale; divides `in`.
        has_signs: whether scales may be negative: a block's largest value then becomes negative,
            where there is one more code.

    Returns:
        ONNX's INT4 bytes of [in, out], and the scales, float32 [in / block_size, out].
    """
    codes, scales = nearest_int4_rows(np.ascontiguousarray(dense.T), block_size, has_signs)
    nibbles = np.ascontiguousarray(codes.T).reshape(-1).view(np.uint8) & np.uint8(15)
    if len(nibbles) % 2:
        nibbles = np.append(nibbles, np.uint8(0))
    return nibbles[0::2] | nibbles[1::2] << np.uint8(4), np.ascontiguousarray(scales.T)


def round_stored(stored: ir.TensorProtocol, block_size: int) -> tuple[np.ndarray, F32]:
    """As `nearest_int4`, of a stored [out, in], some outputs at a time on all cores."""
    out, rows = map(int, stored.shape.numpy())
    if out % 2:  # rows share bytes
        return nearest_int4(stored_array(stored).astype(np.float32).T, block_size)
    pairs = np.empty((rows, out // 2), np.uint8)
    scales = np.empty((rows // block_size, out), np.float32)

    def round_outputs(first: int) -> None:
        end = min(first + _OUTPUTS_AT_ONCE, out)
        floats = stored_array(slice_first(stored, slice(first, end))).astype(np.float32)
        found, scales_of_it = nearest_int4_rows(floats, block_size)
        codes = found.T.view(np.uint8) & np.uint8(15)
        pairs[:, first // 2 : end // 2] = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
        scales[:, first:end] = scales_of_it.T

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(round_outputs, range(0, out, _OUTPUTS_AT_ONCE)))
    return pairs.reshape(-1), scales


def nearest_int4_rows(
    rows: F32, block_size: int, has_signs: bool = True
) -> tuple[NDArray[np.int8], F32]:
    """As `nearest_int4`, of [out, in]: codes int8 [out, in], scales [out, in / block_size]."""
    blocks = rows.reshape(-1, block_size)
    codes, scales = np.empty(blocks.shape, np.int8), np.empty(len(blocks), np.float32)
    for first in range(0, len(blocks), _BLOCKS_AT_ONCE):
        part = slice(first, first + _BLOCKS_AT_ONCE)
        some = np.ascontiguousarray(blocks[part].T)
        signs = _signs(some) if has_signs else np.ones(some.shape[1], np.float32)
        found, scales[part] = _nearest(some * signs)
        scales[part] *= signs
        codes[part] = found.T
    return codes.reshape(rows.shape), scales.reshape(len(rows), -1)


def _signs(blocks: F32) -> F32:
    """Signs [n] of blocks [block, n] that make the largest value of each negative."""
    return np.where(blocks.max(0) > -blocks.min(0), np.float32(-1), np.float32(1))


def _nearest(blocks: F32) -> tuple[NDArray[np.int8], F32]:
    """Codes [block, n] and scales [n] of blocks [block, n]."""
    largest = np.maximum(np.abs(blocks).max(0), np.float32(1e-20)) / np.float32(7)
    best = np.full(largest.shape, np.inf, np.float32)
    scales = largest.copy()
    for clipping in _CLIPPING:
        scale = largest * clipping
        error = _codes(blocks, scale)
        error *= scale
        error -= blocks
        total = np.einsum("in,in->n", error, error)
        better = total < best
        best[better], scales[better] = total[better], scale[better]
    return _codes(blocks, scales).astype(np.int8), scales


def _codes(blocks: F32, scales: F32) -> F32:
    codes = blocks / scales
    np.rint(codes, out=codes)
    return np.clip(codes, -8, 7, out=codes)
