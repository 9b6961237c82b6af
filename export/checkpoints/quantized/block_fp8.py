"""FP8 in square blocks (DeepSeek-V3, Qwen3-FP8): `weight` and `weight_scale_inv`.

`W = e4m3 * weight_scale_inv` [out / 128, in / 128]; the last blocks may be smaller. Other engines
round inputs at run time in groups of 128; here they stay floats, which is more exact.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm.core.errors import BrokenArtifactError, UnsupportedModelError
from edgellm.export.checkpoints.quantized_weight import (
    QuantizedLinear,
    finite_fp8,
    scale_tensor,
    stored,
)
from edgellm.export.checkpoints.weights import Weights

_BLOCK = 128


def read(weights: Weights, shape: tuple[int, int], dtype: ir.DataType) -> QuantizedLinear | None:
    """See `edgellm.export.checkpoints.quantized.Layout`."""
    out, width = shape
    info = weights.info("weight_scale_inv")
    if info is None:
        return None
    rows, columns = _block_size(weights)
    if width % columns:
        raise UnsupportedModelError(
            f"{weights.prefix}weight: {width} inputs are not a multiple of the block's {columns}"
        )
    blocks = (-(-out // rows), width // columns)
    codes = weights.array("weight", shape, "F8_E4M3")
    scale = weights.array("weight_scale_inv", blocks, info.dtype)
    name = weights.prefix
    return QuantizedLinear(
        codes=stored(
            f"{name}weight",
            ir.DataType.FLOAT8E4M3FN,
            (width, out),
            lambda: finite_fp8(name, codes().T),
        ),
        scales=scale_tensor(
            f"{name}weight_scale_inv",
            (blocks[1], out),
            dtype,
            lambda: np.repeat(scale(), rows, axis=0)[:out].T,
        ),
        block_size=columns,
    )


def _block_size(weights: Weights) -> tuple[int, int]:
    """Outputs and inputs of a block."""
    size = weights.quantization.get("weight_block_size") or [_BLOCK, _BLOCK]
    is_pair = isinstance(size, list) and len(size) == 2
    if not is_pair or not all(type(extent) is int and extent > 0 for extent in size):
        raise BrokenArtifactError(
            f"the quantization config says weight_block_size {size!r}, not two positive integers"
        )
    return size[0], size[1]
