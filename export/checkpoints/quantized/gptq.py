"""GPTQ: 4 or 8 bits, symmetric or not, with or without activation order.

Source: GPTQModel 7.7. `qweight` int32 [in * bits / 32, out] packed along the input, `qzeros` int32
[in / g, out * bits / 32], `scales` float16 [in / g, out], `g_idx` int32 [in]: the group of each
input. Format v1 stores zero points minus one; v2 and auto-round's packing store them unchanged.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.gptq_conventions import (
    check_zero_points,
    input_order,
    num_groups,
    remedy,
    stores_less_one,
)
from edgellm.export.checkpoints.int_packing import unpack
from edgellm.export.checkpoints.quantized_weight import (
    QuantizedLinear,
    UnsignedBlocks,
    integer_blocks,
)
from edgellm.export.checkpoints.weights import Weights


def read(weights: Weights, shape: tuple[int, int], dtype: ir.DataType) -> QuantizedLinear | None:
    """See `edgellm.export.checkpoints.quantized.Layout`."""
    out, width = shape
    info, scale_info = weights.info("qweight"), weights.info("scales")
    if info is None or scale_info is None or len(info.shape) != 2 or info.shape[1] != out:
        return None
    bits = 32 * info.shape[0] // width
    if bits not in (4, 8) or info.shape[0] * 32 != bits * width:
        raise UnsupportedModelError(
            f"{weights.prefix}qweight holds {bits}-bit weights", hint="4 and 8 bits are supported"
        )
    blocks = num_groups(weights, width, scale_info, 0)
    words = weights.array("qweight", info.shape, "I32")
    scale = weights.array("scales", (blocks, out), scale_info.dtype)
    order = input_order(weights, "g_idx", width, blocks)
    weights.drop_zeros("bias")  # AutoGPTQ writes one for every layer

    def codes() -> np.ndarray:
        values = unpack(np.ascontiguousarray(words().T), bits).T  # [in, out]
        return values if order is None else values[order]

    layer = UnsignedBlocks(
        name=weights.prefix,
        bits=bits,
        shape=shape,
        codes=codes,
        zeros=_zeros(weights, blocks, out, bits),
        scale=scale,
        blocks=blocks,
        input_order=order,
    )
    return integer_blocks(layer, dtype)


def _zeros(weights: Weights, blocks: int, out: int, bits: int) -> np.ndarray:
    """Zero points [in / g, out]."""
    zeros = unpack(weights.array("qzeros", (blocks, out * bits // 32), "I32")(), bits)
    if less_one := stores_less_one(weights):
        if int(zeros.max()) == 2**bits - 1:
            raise UnsupportedModelError(
                f"{weights.prefix}qzeros has a zero point of {2**bits}, which {bits} bits cannot "
                "hold",
                hint="convert the checkpoint to gptq_v2",
            )
        zeros = zeros + np.uint8(1)
    check_zero_points(weights, zeros, bits, remedy(weights, less_one=less_one))
    return zeros
