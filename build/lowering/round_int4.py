"""`llm_build --quantize int4`: float weights rounded on the device, without calibration."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linear_weights import F32, LinearWeight
from edgellm.build.lowering.weights import WeightFile

BLOCK_SIZE = 32
_CLIPPING = np.linspace(1, 0.7, 7, dtype=np.float32)  # of a block's largest weight


def round_to_int4(model: ir.Model, weights: WeightFile) -> None:
    """Put INT4 DequantizeLinears, in blocks of 32 inputs, in the place of dense linear weights.

    Weights whose inputs are no multiple of 32 stay as they are.
    """
    graph = GraphEditor(model.graph, weights)
    for node in [node for node in model.graph if node.op_type == "MatMul"]:
        weight = LinearWeight.of(node.inputs[1])
        if weight is None or weight.kind != "dense" or weight.in_features % BLOCK_SIZE:
            continue
        graph.cursor = node
        loaded: list[tuple[np.ndarray, F32]] = []

        def load(weight: LinearWeight = weight, loaded: list = loaded) -> tuple[np.ndarray, F32]:
            if not loaded:
                loaded.append(nearest_int4(weight.dense(), BLOCK_SIZE))
            return loaded[0]

        shape = (weight.in_features, sum(weight.widths))
        codes = graph.weight(
            f"{node.name}.int4", lambda load=load: load()[0], ir.DataType.INT4, shape
        )
        scales = graph.weight(f"{node.name}.int4_scale", lambda load=load: load()[1])
        node.replace_input_with(
            1, graph.node("DequantizeLinear", [codes, scales], axis=0, block_size=BLOCK_SIZE)
        )


def nearest_int4(dense: F32, block_size: int) -> tuple[np.ndarray, F32]:
    """Round to symmetric INT4 with, for each block, the clipping of least squared error.

    Args:
        dense: float32 [in, out].
        block_size: inputs that share a scale; divides `in`.

    Returns:
        ONNX's INT4 bytes of [in, out], and the scales, float32 [in / block_size, out].
    """
    blocks = dense.reshape(-1, block_size, dense.shape[1])
    largest = np.maximum(np.abs(blocks).max(1), np.float32(1e-20)) / np.float32(7)
    best = np.full(largest.shape, np.inf, np.float32)
    scales = largest.copy()
    for clipping in _CLIPPING:
        scale = largest * clipping
        error = _codes(blocks, scale) * scale[:, None]
        error -= blocks
        total = np.einsum("bio,bio->bo", error, error)
        better = total < best
        best[better], scales[better] = total[better], scale[better]
    codes = _codes(blocks, scales).astype(np.int8).reshape(-1).view(np.uint8) & np.uint8(15)
    if len(codes) % 2:
        codes = np.append(codes, np.uint8(0))
    return codes[0::2] | codes[1::2] << np.uint8(4), scales


def _codes(blocks: F32, scales: F32) -> F32:
    return np.clip(np.rint(blocks / scales[:, None]), -8, 7)
