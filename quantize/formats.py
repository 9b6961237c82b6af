"""The unified quantized-checkpoint layout of nvidia-modelopt, read and written with numpy.

Source: nvidia-modelopt 0.47, `export_hf_checkpoint`. Only weight layouts live here; how a weight
was found (AWQ, round-to-nearest, ...) does not matter to a reader. [out, in] is torch order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


def pack_int4(weight: F32, block_size: int) -> tuple[U8, F32]:
    """Round a weight to symmetric INT4 blocks along the input (`W4A16`, no zero points).

    Args:
        weight: float32 [out, in]; `out` even, `in` a multiple of `block_size`.
        block_size: weights that share one scale.

    Returns:
        uint8 [out/2, in], two output rows in one byte (low nibble = even row), and the scales,
        float32 [out, in/block_size] = amax / 7.
    """
    out, width = weight.shape
    blocks = weight.reshape(out, width // block_size, block_size)
    scale = np.abs(blocks).max(axis=-1) / np.float32(7)
    safe = np.where(scale > 0, scale, np.float32(1))
    codes = np.clip(np.rint(blocks / safe[..., None]), -8, 7).astype(np.int8).reshape(out, width)
    nibbles = (codes.view(np.uint8) & 15).astype(np.uint8, copy=False)
    packed = nibbles[0::2] + nibbles[1::2] * np.uint8(16)
    return packed, safe.astype(np.float32)
