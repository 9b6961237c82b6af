"""Rounding with error feedback: what a column loses, the columns behind it make up for.

The procedure is GPTQ's (arXiv 2210.17323): columns in descending order of what they weigh, each
rounded, its error spread over those not yet rounded by the inverse of the inputs' second moments.
What is aimed at may be what the float model computes from its own inputs, so that errors of earlier
layers are made up for, too (as in arXiv 2504.02692).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_DAMPING = 0.01  # of the mean second moment, onto the diagonal
_SLICE = 128  # columns between two updates of all that follow
_RATIOS = (1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # of the largest weight, as scales
_TINY = 1e-8

Round = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # weights [out], their column


@dataclass(frozen=True, slots=True)
class Grid:
    """Whole numbers times a scale for each block of inputs of each output."""

    lowest: int
    highest: int
    block: int  # 0: one scale for all inputs

    def scales(self, weight: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
        """The scales [out, blocks] with the least error of `weight` [out, in].

        Args:
            weight: floats.
            importance: of each input [in], a factor of its squared error.
        """
        block = self.block or weight.shape[1]
        blocks = weight.unflatten(1, (-1, block))
        factors = importance.view(-1, block)
        largest = blocks.abs().amax(-1, keepdim=True).clamp(min=_TINY) / self.highest
        best, least = largest, torch.full_like(largest, torch.inf)
        for ratio in _RATIOS:
            scale = largest * ratio
            error = ((self.nearest(blocks, scale) * scale - blocks).square() * factors).sum(
                -1, True
            )
            best = torch.where(error < least, scale, best)
            least = torch.minimum(error, least)
        return best.squeeze(-1)

    def nearest(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Codes, as floats."""
        return torch.clamp(torch.round(weight / scale), self.lowest, self.highest)

    def spread(self, scales: torch.Tensor, width: int) -> torch.Tensor:
        """A scale for each weight [out, in] of scales [out, blocks]."""
        return scales.repeat_interleave(width // scales.shape[1], 1)


@dataclass(frozen=True, slots=True)
class Rounded:
    """Codes and scales of a weight."""

    codes: torch.Tensor  # whole numbers as floats [out, in]
    scales: torch.Tensor  # [out, blocks]

    def values(self) -> torch.Tensor:
        """The weight that they stand for [out, in]."""
        return self.codes * self.scales.repeat_interleave(
            self.codes.shape[1] // self.scales.shape[1], 1
        )


def round_nearest(weight: torch.Tensor, importance: torch.Tensor, grid: Grid) -> Rounded:
    """Every weight for itself, with scales that weigh errors by `importance` [in]."""
    scales = grid.scales(weight, importance)
    return Rounded(grid.nearest(weight, grid.spread(scales, weight.shape[1])), scales)


@dataclass(frozen=True, slots=True)
class Feedback:
    """How errors spread over columns, whatever the weight."""

    importance: torch.Tensor  # of each input [in]
    order: torch.Tensor  # of rounding [in]
    spread: torch.Tensor  # from a column to those behind it, in that order: upper [in, in]

    @classmethod
    def of(cls, moments: torch.Tensor) -> Feedback:
        """For inputs with these second moments, the mean of x x^T [in, in]."""
        importance = moments.diagonal().clone()
        order = torch.argsort(importance, descending=True)
        return cls(importance, order, _upper_inverse(moments[order][:, order]))


def round_with_feedback(weight: torch.Tensor, feedback: Feedback, grid: Grid) -> Rounded:
    """Columns of `weight` [out, in] one by one."""
    scales = grid.scales(weight, feedback.importance)
    steps = grid.spread(scales, weight.shape[1])
    order, spread = feedback.order, feedback.spread
    left, steps = weight[:, order], steps[:, order]
    codes = torch.empty_like(left)
    for begin in range(0, left.shape[1], _SLICE):
        end = min(begin + _SLICE, left.shape[1])
        own, errors = left[:, begin:end].clone(), torch.empty_like(left[:, begin:end])
        for at in range(end - begin):
            column = begin + at
            codes[:, column] = grid.nearest(own[:, at], steps[:, column])
            lost = own[:, at] - codes[:, column] * steps[:, column]
            errors[:, at] = lost / spread[column, column]
            own[:, at:] -= errors[:, at, None] * spread[column, column:end]
        left[:, end:] -= errors @ spread[begin:end, end:]
    return Rounded(codes[:, torch.argsort(order)], scales)


def _upper_inverse(moments: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse; damped until there is one."""
    damping = _DAMPING * float(moments.diagonal().mean()) + _TINY
    while True:
        damped = moments + damping * torch.eye(len(moments), device=moments.device)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            return torch.linalg.cholesky(torch.cholesky_inverse(factor), upper=True)
        damping *= 10


def aimed(
    weight: torch.Tensor, moments: torch.Tensor, crossed: torch.Tensor, trust: float
) -> torch.Tensor:
    """The float weight that makes of rounded inputs what `weight` makes of the float ones.

    Args:
        weight: [out, in].
        moments: of the rounded inputs, the mean of y y^T [in, in].
        crossed: the mean of x y^T, of float and rounded inputs [in, in].
        trust: the larger, the further the result may go from `weight`; 0: it stays.
    """
    if not trust:
        return weight
    damping = moments.diagonal().mean() / trust + _TINY
    eye = torch.eye(len(moments), device=moments.device)
    wanted = weight @ (crossed - moments)
    return weight + torch.linalg.solve(moments + damping * eye, wanted.T).T
