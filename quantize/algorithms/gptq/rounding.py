"""Rounding with error feedback: what a column loses, the columns after it make up for.

The procedure is GPTQ's (arXiv 2210.17323): columns in descending order of what they weigh, each
rounded, its error spread over those not yet rounded by the inverse of the inputs' second moments.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

_DAMPING = 0.01  # of the mean second moment, onto the diagonal
_SLICE = 128  # columns between two updates of all that follow
_RATIOS = (1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # of the largest weight, as scales
_SMALLER = 0.3  # of a scale, at most at once
_TINY = 1e-8


class Grid(Protocol):
    """Codes times a scale for each block of inputs of each output."""

    def scales(self, weight: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
        """The scales [out, blocks] with the least error of `weight` [out, in].

        Args:
            weight: floats.
            importance: of each input [in], a factor of its squared error.
        """
        ...

    def nearest(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """What the codes of weights stand for before their scales."""
        ...

    def near(self, scale: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """What can be stored next to the scales that one wants in the place of `old`."""
        ...


@dataclass(frozen=True, slots=True)
class WholeNumbers:
    """Codes of integer types."""

    lowest: int
    highest: int
    block: int  # 0: one scale for all inputs
    has_signs: bool = False  # of scales: a block's largest weight then takes the lowest code

    def scales(self, weight: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
        """See `Grid`."""
        block = self.block or weight.shape[1]
        blocks = weight.unflatten(1, (-1, block))
        largest = blocks.abs().amax(-1, keepdim=True).clamp(min=_TINY) / self.highest
        signs = (1, -1) if self.has_signs else (1,)
        tried = (largest * ratio * sign for ratio in _RATIOS for sign in signs)
        return search_scales(blocks, tried, importance.view(-1, block), self)

    def nearest(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """See `Grid`."""
        return torch.clamp(torch.round(weight / scale), self.lowest, self.highest)

    def near(self, scale: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """See `Grid`: any number of the same sign."""
        sign = old.sign()
        return sign * torch.maximum(sign * scale, old.abs() * _SMALLER)


def search_scales(
    blocks: torch.Tensor, tried: Iterable[torch.Tensor], factors: torch.Tensor, grid: Grid
) -> torch.Tensor:
    """Of each block the scale with the least error, [out, blocks].

    Args:
        blocks: of a weight [out, blocks, n].
        tried: scales [out, blocks, 1], one after another.
        factors: of squared errors [blocks, n].
        grid: what they scale.
    """
    best = least = None
    for scale in tried:
        lost = grid.nearest(blocks, scale) * scale - blocks
        error = (lost.square() * factors).sum(-1, keepdim=True)
        if best is None or least is None:
            best, least = scale, error
            continue
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    assert best is not None
    return best.squeeze(-1)


def spread(scales: torch.Tensor, width: int) -> torch.Tensor:
    """A scale for each weight [out, in] of scales [out, blocks]."""
    return scales.repeat_interleave(width // scales.shape[1], 1)


@dataclass(frozen=True, slots=True)
class Rounded:
    """Codes and scales of a weight."""

    codes: torch.Tensor  # what they stand for, as floats [out, in]
    scales: torch.Tensor  # [out, blocks]

    def values(self) -> torch.Tensor:
        """The weight that they stand for [out, in]."""
        return self.codes * spread(self.scales, self.codes.shape[1])


def round_nearest(weight: torch.Tensor, importance: torch.Tensor, grid: Grid) -> Rounded:
    """Every weight for itself, with scales that weigh errors by `importance` [in]."""
    scales = grid.scales(weight, importance)
    return Rounded(grid.nearest(weight, spread(scales, weight.shape[1])), scales)


@dataclass(frozen=True, slots=True)
class Feedback:
    """How errors spread over columns, whatever the weight."""

    moments: torch.Tensor  # damped [in, in]
    importance: torch.Tensor  # of each input [in]
    order: torch.Tensor  # of rounding [in]
    shares: torch.Tensor  # from a column to those after it, in that order: upper [in, in]

    @classmethod
    def of(cls, moments: torch.Tensor) -> Feedback:
        """For inputs with these second moments, the mean of x x^T [in, in]."""
        importance = moments.diagonal().clone()
        order = torch.argsort(importance, descending=True)
        damping = _DAMPING * float(importance.mean()) + _TINY
        damped = moments + damping * torch.eye(len(moments), device=moments.device)
        return cls(damped, importance, order, _upper_inverse(damped[order][:, order], damping))


def round_with_feedback(weight: torch.Tensor, feedback: Feedback, grid: Grid) -> Rounded:
    """Columns of `weight` [out, in] one by one."""
    scales = grid.scales(weight, feedback.importance)
    steps = spread(scales, weight.shape[1])
    order, shares = feedback.order, feedback.shares
    left, steps = weight[:, order], steps[:, order]
    codes = torch.empty_like(left)
    for begin in range(0, left.shape[1], _SLICE):
        end = min(begin + _SLICE, left.shape[1])
        own, errors = left[:, begin:end].clone(), torch.empty_like(left[:, begin:end])
        for at in range(end - begin):
            column = begin + at
            codes[:, column] = grid.nearest(own[:, at], steps[:, column])
            lost = own[:, at] - codes[:, column] * steps[:, column]
            errors[:, at] = lost / shares[column, column]
            own[:, at:] -= errors[:, at, None] * shares[column, column:end]
        left[:, end:] -= errors @ shares[begin:end, end:]
    return Rounded(codes[:, torch.argsort(order)], scales)


def _upper_inverse(moments: torch.Tensor, damping: float) -> torch.Tensor:
    """The upper Cholesky factor of the inverse; damped more until there is one."""
    while True:
        factor, failed = torch.linalg.cholesky_ex(moments)
        if not failed:
            return torch.linalg.cholesky(torch.cholesky_inverse(factor), upper=True)
        damping *= 10
        moments = moments + damping * torch.eye(len(moments), device=moments.device)
