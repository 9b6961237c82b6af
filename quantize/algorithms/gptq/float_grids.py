"""What FP8 and NVFP4 weights may be, for rounding with error feedback.

Scales stand for themselves: those of NVFP4's blocks are E4M3 numbers times one float for the
whole weight, as they are stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from edgellm.quantize.algorithms.gptq.rounding import search_scales
from edgellm.quantize.formats.activation_rounding import E2M1_VALUES, nearest_e2m1
from edgellm.quantize.formats.modelopt import LARGEST_E2M1, LARGEST_E4M3, NVFP4_BLOCK

_SMALLEST_E4M3 = 2.0**-9
_TINY = 1e-20
# Of the scale that makes the largest weight 6: above one small weights lie on a finer part.
_BLOCK_RATIOS = (1.5, 1.35, 1.2, 1.1, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)


@dataclass(frozen=True, slots=True)
class Fp8Grid:
    """E4M3 numbers with one scale."""

    scale: float

    @classmethod
    def of(cls, weight: torch.Tensor) -> Fp8Grid:
        """The scale of the largest weight."""
        return cls(max(float(weight.abs().max()), _TINY) / LARGEST_E4M3)

    def scales(self, weight: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
        """See `Grid`: the same for all outputs."""
        del importance
        return weight.new_full((len(weight), 1), self.scale)

    def nearest(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """See `Grid`."""
        limited = torch.clamp(weight / scale, -LARGEST_E4M3, LARGEST_E4M3)
        return limited.to(torch.float8_e4m3fn).to(weight.dtype)

    def near(self, scale: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """See `Grid`: no other, since all outputs share it."""
        del scale
        return old


@dataclass(frozen=True, slots=True)
class Nvfp4Grid:
    """E2M1 numbers with an E4M3 scale for each block of 16 inputs, and a factor of these."""

    factor: float

    @classmethod
    def of(cls, weight: torch.Tensor) -> Nvfp4Grid:
        """The factor with which the largest weight is representable."""
        largest = float(weight.abs().max())
        return cls(max(largest, _TINY) / (LARGEST_E2M1 * LARGEST_E4M3))

    def scales(self, weight: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
        """The scales [out, in / 16] with the least error, see `Grid`."""
        blocks = weight.unflatten(1, (-1, NVFP4_BLOCK))
        largest = blocks.abs().amax(-1, keepdim=True) / LARGEST_E2M1
        tried = (self.stored(largest * ratio) * self.factor for ratio in _BLOCK_RATIOS)
        return search_scales(blocks, tried, importance.view(-1, NVFP4_BLOCK), self)

    def stored(self, scale: torch.Tensor) -> torch.Tensor:
        """The E4M3 numbers of scales."""
        limited = torch.clamp(scale / self.factor, _SMALLEST_E4M3, LARGEST_E4M3)
        return limited.to(torch.float8_e4m3fn).float()

    def nearest(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """See `Grid`."""
        ratio = weight / scale
        magnitudes = E2M1_VALUES.to(weight.device)[nearest_e2m1(ratio.abs())]
        return torch.copysign(magnitudes, ratio)

    def near(self, scale: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """See `Grid`: E4M3 numbers times the factor."""
        del old
        return self.stored(scale) * self.factor
