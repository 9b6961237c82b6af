"""Quantizes an expert's weight by its inputs, in ModelOpt's unified layout.

The expected squared error of an output is the sum of squared weight errors, times the mean squares
of their inputs: the diagonal of GPTQ's Hessian, as in llama.cpp's importance matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from edgellm.export.checkpoints.checkpoint import TensorInfo
from edgellm.quantize.formats.activation_rounding import nearest_e2m1
from edgellm.quantize.formats.modelopt import (
    E2M1,
    LARGEST_E2M1,
    LARGEST_E4M3,
    NVFP4_BLOCK,
    pack_int4_codes,
)
from edgellm.quantize.formats.schemes import Recipe
from edgellm.quantize.formats.tensors import Tensor

_CLIPPING = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # of a block's largest weight
_MIN_WEIGHT = 1e-3  # of the mean: weight of an input that was always zero
_SMALLEST_E4M3 = 2.0**-9
_TINY = 1e-20
_INT8, _INT4 = 127.0, 7.0
_MAGNITUDES = torch.from_numpy(E2M1[:8].copy())


@dataclass(slots=True)
class Products:
    """Statistics of a layer's inputs."""

    squares: torch.Tensor  # sums of squares, float64 [in]
    rows: int = 0  # number of tokens
    largest: float = 0.0

    @classmethod
    def none(cls, width: int, device: torch.device) -> Products:
        """Return the statistics of no token."""
        return cls(torch.zeros(width, dtype=torch.float64, device=device))

    def add(self, x: torch.Tensor) -> None:
        """Add inputs [n, in]."""
        self.squares += x.double().square().sum(0)
        self.rows += len(x)
        self.largest = max(self.largest, float(x.abs().max()) if len(x) else 0.0)

    def weights(self) -> torch.Tensor:
        """Return the weight of each input's error, float32 [in]; positive."""
        mean = self.squares.mean()
        if not mean > 0:
            return torch.ones_like(self.squares, dtype=torch.float32)
        return (self.squares / mean + _MIN_WEIGHT).float()


def round_weight(
    weight: torch.Tensor, inputs: Products, recipe: Recipe, largest: float, largest_input: float
) -> dict[str, Tensor]:
    """Quantize a weight; return `weight`, `weight_scale` and the scheme's other tensors by name.

    Args:
        weight: float32 [out, in].
        inputs: of this layer.
        recipe: the scheme, and INT4's group size.
        largest: magnitude of the weights that share a global scale with this one.
        largest_input: magnitude of the inputs that share an input scale.
    """
    scheme = recipe.scheme
    if scheme.is_int4:
        return _int4(weight, inputs.weights(), recipe.block_size)
    if scheme.is_nvfp4:
        found, top = _nvfp4(weight, inputs.weights(), largest), LARGEST_E2M1 * LARGEST_E4M3
    elif scheme.algorithm == "FP8":
        found, top = _fp8(weight), LARGEST_E4M3
    else:
        found, top = _int8(weight), _INT8
    return {**found, "input_scale": _number(max(largest_input, _TINY) / top)}


def _int4(weight: torch.Tensor, counts: torch.Tensor, block: int) -> dict[str, Tensor]:
    """Choose the clipping with the least error, then fit the scale by least squares."""
    blocks, counted = weight.unflatten(-1, (-1, block)), counts.unflatten(-1, (-1, block))
    amax = blocks.abs().amax(-1, keepdim=True)
    top = torch.where(amax > 0, amax, torch.ones_like(amax)) / _INT4
    best = torch.full_like(top, -1.0)
    codes, scales = torch.zeros_like(blocks), top.clone()
    for clipping in _CLIPPING:
        tried = (blocks / (top * clipping)).round_().clamp_(-8, 7)
        along = (counted * blocks * tried).sum(-1, keepdim=True)
        size = (counted * tried * tried).sum(-1, keepdim=True)
        explained = along * along.clamp_min(0) / size.clamp_min(_TINY)
        better = explained > best
        best = torch.where(better, explained, best)
        fitting = torch.where(along > 0, along / size.clamp_min(_TINY), top)
        codes, scales = torch.where(better, tried, codes), torch.where(better, fitting, scales)
    packed = pack_int4_codes(codes.flatten(-2).to(torch.int8).cpu().numpy())
    return {"weight": _tensor("U8", packed), "weight_scale": _tensor("F32", _array(scales[..., 0]))}


def _nvfp4(weight: torch.Tensor, counts: torch.Tensor, largest: float) -> dict[str, Tensor]:
    of_scales = max(largest, _TINY) / (LARGEST_E2M1 * LARGEST_E4M3)
    blocks = weight.unflatten(-1, (-1, NVFP4_BLOCK))
    counted = counts.unflatten(-1, (-1, NVFP4_BLOCK))
    wanted = blocks.abs().amax(-1, keepdim=True) / LARGEST_E2M1 / of_scales
    best = torch.full_like(wanted, torch.inf)
    codes, scales = torch.zeros_like(blocks, dtype=torch.uint8), torch.zeros_like(wanted)
    for clipping in _CLIPPING:
        limited = torch.clamp(wanted * clipping, _SMALLEST_E4M3, LARGEST_E4M3)
        scale = limited.to(torch.float8_e4m3fn).float()
        ratio = blocks / (scale * of_scales)
        tried = nearest_e2m1(ratio.abs())
        values = torch.copysign(_MAGNITUDES.to(weight.device)[tried], ratio) * scale * of_scales
        error = (counted * (values - blocks).square()).sum(-1, keepdim=True)
        better = error < best
        best, scales = torch.where(better, error, best), torch.where(better, scale, scales)
        signed = (tried + 8 * (ratio < 0)).to(torch.uint8)
        codes = torch.where(better, signed, codes)
    pairs = codes.flatten(-2)
    packed = (pairs[:, 0::2] | pairs[:, 1::2] << 4).cpu().numpy()
    eight = scales[..., 0].to(torch.float8_e4m3fn).view(torch.uint8).cpu().numpy()
    return {
        "weight": _tensor("U8", packed),
        "weight_scale": _tensor("F8_E4M3", eight),
        "weight_scale_2": _number(of_scales),
    }


def _fp8(weight: torch.Tensor) -> dict[str, Tensor]:
    scale = max(float(weight.abs().max()), _TINY) / LARGEST_E4M3
    codes = (weight / scale).clamp_(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)
    stored = codes.view(torch.uint8).cpu().numpy()
    return {"weight": _tensor("F8_E4M3", stored), "weight_scale": _number(scale)}


def _int8(weight: torch.Tensor) -> dict[str, Tensor]:
    scale = weight.abs().amax(-1).clamp_min(_TINY) / _INT8
    codes = (weight / scale[:, None]).round_().to(torch.int8).cpu().numpy()
    return {"weight": _tensor("I8", codes), "weight_scale": _tensor("F32", _array(scale))}


def _array(values: torch.Tensor) -> np.ndarray:
    return values.contiguous().cpu().numpy()


def _number(value: float) -> Tensor:
    return _tensor("F32", np.array(value, np.float32))


def _tensor(dtype: str, array: np.ndarray) -> Tensor:
    return Tensor(TensorInfo(dtype, array.shape), np.ascontiguousarray(array).tobytes())
