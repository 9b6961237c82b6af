"""compressed-tensors: `pack-quantized` (4 and 8 bits) and `nvfp4-pack-quantized`.

Source: compressed-tensors 0.20 (llm-compressor, AutoRound). `weight_packed` int32 [out, in * bits /
32] holds codes + 2**(bits - 1) in the order of the input; `weight_scale` [out, in / g] or [out, 1];
`weight_zero_point` int32 packed along `out`; `weight_g_idx` int32 [in] is the group of each input
(activation order). NVFP4 stores global scales as their reciprocals.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm.core.errors import (
    BrokenArtifactError,
    UnsupportedModelError,
)
from edgellm.export.checkpoints.gptq_conventions import check_zero_points, input_order, num_groups
from edgellm.export.checkpoints.int_packing import unpack
from edgellm.export.checkpoints.quantized.microscaling import is_microscaled
from edgellm.export.checkpoints.quantized.modelopt import scalar
from edgellm.export.checkpoints.quantized_weight import (
    InputRounding,
    QuantizedLinear,
    UnsignedBlocks,
    finite_fp8,
    integer_blocks,
    stored,
)
from edgellm.export.checkpoints.weights import Weights


def read(weights: Weights, shape: tuple[int, int], dtype: ir.DataType) -> QuantizedLinear | None:
    """See `edgellm.export.checkpoints.quantized.Layout`."""
    info = weights.info("weight_packed")
    if info is None or is_microscaled(weights, shape):
        return None
    if info.dtype == "U8":
        return _nvfp4(weights, shape)
    return _integers(weights, shape, dtype)


def _integers(weights: Weights, shape: tuple[int, int], dtype: ir.DataType) -> QuantizedLinear:
    out, width = shape
    name, info = weights.prefix, weights.info("weight_packed")
    scale_info = weights.info("weight_scale")
    if info is None or scale_info is None or len(info.shape) != 2 or len(scale_info.shape) != 2:
        raise BrokenArtifactError(f"{name}weight_packed or its weight_scale is not a matrix")
    bits = 32 * info.shape[1] // width
    if bits not in (4, 8):
        raise UnsupportedModelError(
            f"{name}weight_packed holds {bits}-bit weights", hint="4 and 8 bits are supported"
        )
    _check_shape(weights, shape)
    blocks = num_groups(weights, width, scale_info, 1)
    order = input_order(weights, "weight_g_idx", width, blocks)
    words = weights.array("weight_packed", (out, width * bits // 32), "I32")
    scale = weights.array("weight_scale", (out, blocks), scale_info.dtype)
    zeros = None
    if weights.info("weight_zero_point") is not None:
        packed = weights.array("weight_zero_point", (-(-out * bits // 32), blocks), "I32")()
        zeros = unpack(np.ascontiguousarray(packed.T), bits)[:, :out]  # [blocks, out]
        check_zero_points(weights, zeros, bits)

    def codes() -> np.ndarray:
        values = unpack(words(), bits).T  # [in, out]
        return values if order is None else values[order]

    layer = UnsignedBlocks(
        name=name,
        bits=bits,
        shape=shape,
        codes=codes,
        zeros=zeros,
        scale=lambda: scale().T,
        blocks=blocks,
        input_order=order,
    )
    return integer_blocks(layer, dtype)


def _check_shape(weights: Weights, shape: tuple[int, int]) -> None:
    info = weights.info("weight_shape")
    if info is None:
        return
    stated = weights.array("weight_shape", (2,), info.dtype)()
    if tuple(stated.tolist()) != shape:
        raise BrokenArtifactError(
            f"{weights.prefix}weight_shape is {stated.tolist()}, config.json implies {list(shape)}"
        )


def _nvfp4(weights: Weights, shape: tuple[int, int]) -> QuantizedLinear:
    out, width = shape
    name = weights.prefix
    if width % 16:
        raise BrokenArtifactError(f"{name}weight_packed: {width} inputs are not a multiple of 16")
    blocks = (out, width // 16)
    codes = weights.array("weight_packed", (out, width // 2), "U8")
    scale = weights.array("weight_scale", blocks, "F8_E4M3")
    rounding = None
    if weights.info("input_global_scale") is not None:
        rounding = InputRounding(ir.DataType.FLOAT4E2M1, 1 / scalar(weights, "input_global_scale"))
    return QuantizedLinear(
        codes=stored(f"{name}weight", ir.DataType.FLOAT4E2M1, shape, codes),
        scales=stored(
            f"{name}weight_scale",
            ir.DataType.FLOAT8E4M3FN,
            blocks,
            lambda: finite_fp8(name, scale()),
        ),
        block_size=16,
        global_scale=1 / scalar(weights, "weight_global_scale"),
        input=rounding,
    )
