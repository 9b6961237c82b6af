"""Quantization of activations as engines do it, in torch.

GPUs use static FP8, static INT8 and dynamic NVFP4; edgellm's CPU kernels use INT8 in blocks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from edgellm.quantize.formats.modelopt import E2M1, LARGEST_E2M1, LARGEST_E4M3, NVFP4_BLOCK

_SMALLEST_E4M3 = 2.0**-9
_SMALLEST_AMAX = 1e-12  # of a token of zeros


def _limits() -> Tensor:
    """Return the upper limit of each E2M1 code's magnitudes; ties go to the even code."""
    values = E2M1[:8]
    middles = (values[:-1] + values[1:]) / 2
    odd = np.arange(7) % 2 == 1
    return torch.from_numpy(np.where(odd, np.nextafter(middles, np.float32(0)), middles))


_LIMITS = _limits()
E2M1_VALUES = torch.from_numpy(E2M1[:8].copy())


def round_input(x: Tensor, kind: str, scale: float) -> Tensor:
    """Quantize and dequantize the input of a linear layer [..., K].

    Args:
        x: the input in float.
        kind: `DecodedLinear.input_type`, or "int8 blocks", which needs no `scale`.
        scale: the calibrated scale.
    """
    if kind == "int8 blocks":
        return round_int8_blocks(x)
    if kind == "fp8":
        return round_fp8(x, scale)
    if kind == "int8":
        return round_int8(x, scale)
    if kind == "int8_tokens":
        return round_int8(x, x.abs().amax(-1, keepdim=True).clamp(min=_SMALLEST_AMAX) / 127)
    return round_nvfp4(x, scale) if kind == "nvfp4" else x


def round_fp8(x: Tensor, scale: float) -> Tensor:
    """Round to E4M3 with one scale; saturates."""
    codes = torch.clamp(x / scale, -LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)
    return codes.to(x.dtype) * scale


def round_nvfp4(x: Tensor, global_scale: float | Tensor) -> Tensor:
    """Round to E2M1 in blocks of 16 along the last axis, with E4M3 scales times `global_scale`."""
    blocks = x.float().unflatten(-1, (-1, NVFP4_BLOCK))
    wanted = blocks.abs().amax(-1, keepdim=True) / LARGEST_E2M1 / global_scale
    limited = torch.clamp(wanted, _SMALLEST_E4M3, LARGEST_E4M3)
    effective = limited.to(torch.float8_e4m3fn).float() * global_scale
    ratio = blocks / effective
    magnitudes = E2M1_VALUES.to(x.device)[nearest_e2m1(ratio.abs())]
    return (torch.copysign(magnitudes, ratio) * effective).flatten(-2).to(x.dtype)


def nearest_e2m1(magnitudes: Tensor) -> Tensor:
    """Return the nearest E2M1 codes, 0 to 7, of magnitudes."""
    return torch.bucketize(magnitudes, _LIMITS.to(magnitudes.device))


def round_int8(x: Tensor, scale: float | Tensor) -> Tensor:
    """Round to INT8 from -128 to 127, and dequantize."""
    return torch.clamp(torch.round(x / scale), -128, 127) * scale


def round_int8_blocks(x: Tensor) -> Tensor:
    """Round to INT8 with a dynamic scale for each block of a token's channels.

    The block sizes are those of edgellm's CPU kernels for weights with a scale for each output.
    """
    width = x.shape[-1]
    block = next((size for size in (128, 64) if width % size == 0), 32)
    blocks = torch.nn.functional.pad(x, (0, -width % block)).unflatten(-1, (-1, block))
    step = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-20) / 127
    return (torch.round(blocks / step) * step).flatten(-2)[..., :width]
