"""Grids of FP8 and NVFP4 weights for GPTQ.

Scales are representable: those of NVFP4's blocks are E4M3 numbers times the weight's global scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from edgellm.quantize.algorithms.gptq.rounding import search_scales
from edgellm.quantize.formats.activation_rounding import E2M1_VALUES, nearest_e2m1
from edgellm.quantize.formats.modelopt import LARGEST_E2M1, LARGEST_E4M3, NVFP4_BLOCK

_SMALLEST_E4M3 = 2.0**-9
_TINY = 1e-20
# Factors of amax / 6; above 1, small weights lie on a finer part of the grid
_BLOCK_RATIOS = (1.5, 1.35, 1.2, 1.1, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)


@dataclass(frozen=True, slots=True)
class Fp8Grid:
    """E4M3 numbers with one scale."""

    scale: float

    @classmethod
    def of(cls, weight: torch.Tensor) -> Fp8Grid:
        """Return the grid whose scale fits the largest weight."""
        return cls(max(float(weight.abs().max()), _TINY) / LARGEST_E4M3)

    def scales(self, weight: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
        """See `Grid`; one scale for all outputs."""
        del importance
        return weight.new_full((len(weight), 1), self.scale)

    def nearest(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """See `Grid`."""
        limited = torch.clamp(weight / scale, -LARGEST_E4M3, LARGEST_E4M3)
        return limited.to(torch.float8_e4m3fn).to(weight.dtype)

    def near(self, scale: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """See `Grid`; the shared scale does not change."""
        del scale
        return old


@dataclass(frozen=True, slots=True)
class Nvfp4Grid:
    """E2M1 numbers with an E4M3 scale for each block of 16 inputs, and a global scale."""

    factor: float

    @classmethod
    def of(cls, weight: torch.Tensor) -> Nvfp4Grid:
        """Return the grid whose global scale fits the largest weight."""
        largest = float(weight.abs().max())
        return cls(max(largest, _TINY) / (LARGEST_E2M1 * LARGEST_E4M3))

    def scales(self, weight: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
        """Return the scales [out, in / 16] with the least error, see `Grid`."""
        blocks = weight.unflatten(1, (-1, NVFP4_BLOCK))
        largest = blocks.abs().amax(-1, keepdim=True) / LARGEST_E2M1
        tried = (self.stored(largest * ratio) * self.factor for ratio in _BLOCK_RATIOS)
        return search_scales(blocks, tried, importance.view(-1, NVFP4_BLOCK), self)

    def stored(self, scale: torch.Tensor) -> torch.Tensor:
        """Return the E4M3 numbers of scales."""
        limited = torch.clamp(scale / self.factor, _SMALLEST_E4M3, LARGEST_E4M3)
        return limited.to(torch.float8_e4m3fn).float()

    def nearest(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """See `Grid`."""
        ratio = weight / scale
        magnitudes = E2M1_VALUES.to(weight.device)[nearest_e2m1(ratio.abs())]
        return torch.copysign(magnitudes, ratio)

    def near(self, scale: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """See `Grid`; E4M3 numbers times the global scale."""
        del old
        return self.stored(scale) * self.factor
