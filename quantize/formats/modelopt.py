"""The unified quantized-checkpoint layout of nvidia-modelopt, read and written with numpy.

Source: nvidia-modelopt 0.47, `export_hf_checkpoint`. The layout does not depend on the algorithm.
[out, in] is torch's order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SMOOTHING = ".pre_quant_scale"
KEY_SCALE, VALUE_SCALE = "k_proj.k_scale", "v_proj.v_scale"  # of the attention

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]

NVFP4_BLOCK = 16
LARGEST_E4M3 = 448.0
LARGEST_E2M1 = 6.0
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _e4m3_values() -> F32:
    """Return the value of each float8_e4m3fn code: 4 bits of exponent (bias 7), 3 of mantissa."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    values = np.where(exponent > 0, normal, mantissa * 2.0**-9)
    values[codes & 127 == 127] = np.nan
    return np.where(codes > 127, -values, values).astype(np.float32)


E4M3 = _e4m3_values()


def pack_int4(weight: F32, block_size: int) -> tuple[U8, F32]:
    """Quantize a weight to symmetric INT4 in blocks along the input (`W4A16`, no zero points).

    Args:
        weight: float32 [out, in]; `out` even, `in` a multiple of `block_size`.
        block_size: number of weights that share one scale.

    Returns:
        uint8 [out/2, in], two output rows in one byte (low nibble = even row), and the scales,
        float32 [out, in/block_size] = amax / 7.
    """
    out, width = weight.shape
    blocks = weight.reshape(out, width // block_size, block_size)
    scale = np.abs(blocks).max(axis=-1) / np.float32(7)
    safe = np.where(scale > 0, scale, np.float32(1))
    codes = np.clip(np.rint(blocks / safe[..., None]), -8, 7).astype(np.int8).reshape(out, width)
    return pack_int4_codes(codes), safe.astype(np.float32)


def pack_int4_codes(codes: NDArray[np.int8]) -> U8:
    """Pack int8 codes [out, in] from -8 to 7, as `pack_int4` does: uint8 [out/2, in]."""
    nibbles = (codes.view(np.uint8) & 15).astype(np.uint8, copy=False)
    return nibbles[0::2] + nibbles[1::2] * np.uint8(16)


def unpack_int4(packed: U8, scale: F32) -> F32:
    """Dequantize the result of `pack_int4` to float32 [out, in]."""
    return unpack_int4_codes(packed) * np.repeat(scale, packed.shape[1] // scale.shape[1], axis=1)


def unpack_int4_codes(packed: U8) -> NDArray[np.int8]:
    """Unpack the result of `pack_int4_codes`: uint8 [out/2, in] to int8 [out, in]."""
    codes = np.empty((2 * len(packed), packed.shape[1]), np.int8)
    codes[0::2] = (packed << np.uint8(4)).view(np.int8) >> 4  # the shift back keeps the sign
    codes[1::2] = packed.view(np.int8) >> 4
    return codes


def unpack_nvfp4(packed: U8, scale: F32, global_scale: np.float32) -> F32:
    """Dequantize NVFP4: uint8 [out, in/2] (low nibble first), float32 [out, in/16] to [out, in]."""
    values = np.empty((len(packed), 2 * packed.shape[1]), np.float32)
    values[:, 0::2], values[:, 1::2] = E2M1[packed & 15], E2M1[packed >> 4]
    values *= np.repeat(scale * global_scale, NVFP4_BLOCK, axis=1)
    return values
