"""AutoAWQ (version "gemm"): asymmetric INT4 with folded smoothing.

Source: AutoAWQ 0.2.9. `qweight` int32 [in, out / 8] and `qzeros` int32 [in / g, out / 8] hold eight
neighbours of `out` in the nibble order 0 2 4 6 1 3 5 7; `scales` float16 [in / g, out].
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.gptq_conventions import check_zero_points, num_groups
from edgellm.export.checkpoints.int_packing import unpack
from edgellm.export.checkpoints.quantized_weight import (
    QuantizedLinear,
    UnsignedBlocks,
    integer_blocks,
)
from edgellm.export.checkpoints.weights import Weights

_PLACE = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of each of eight neighbours in a word


def read(weights: Weights, shape: tuple[int, int], dtype: ir.DataType) -> QuantizedLinear | None:
    """See `edgellm.export.checkpoints.quantized.Layout`."""
    out, width = shape
    info, scale_info = weights.info("qweight"), weights.info("scales")
    if info is None or scale_info is None or info.shape != (width, out // 8):
        return None
    version = weights.quantization.get("version", "gemm")
    if str(version).lower() != "gemm":
        raise UnsupportedModelError(
            f"AWQ version {version!r} packs in another order", hint='"gemm" is supported'
        )
    blocks = num_groups(weights, width, scale_info, 0)
    words = weights.array("qweight", (width, out // 8), "I32")
    scale = weights.array("scales", (blocks, out), scale_info.dtype)
    zeros = _in_order(weights.array("qzeros", (blocks, out // 8), "I32")())
    check_zero_points(weights, zeros, 4)
    layer = UnsignedBlocks(
        name=weights.prefix,
        bits=4,
        shape=shape,
        codes=lambda: _in_order(words()),
        zeros=zeros,
        scale=scale,
        blocks=blocks,
    )
    return integer_blocks(layer, dtype)


def _in_order(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """int32 [rows, out / 8] -> values [rows, out]."""
    values = unpack(words, 4).reshape(len(words), -1, 8)
    return values[..., _PLACE].reshape(len(words), -1)
