"""Rounding with error feedback: later columns compensate the error of each rounded column.

The algorithm is GPTQ (arXiv 2210.17323). Columns are rounded in descending order of importance. The
inverse of the inputs' second moments spreads each error over the remaining columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

_DAMPING = 0.01  # of the mean second moment, added to the diagonal
_SLICE = 128  # columns between updates of all later ones
_RATIOS = (1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # of the scale of the largest weight
_SMALLEST_STEP = 0.3  # of the old scale
_TINY = 1e-8


class Grid(Protocol):
    """Representable values: a grid times a scale for each block of inputs of each output."""

    def scales(self, weight: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
        """Return the scales [out, blocks] with the least error of `weight` [out, in].

        Args:
            weight: float.
            importance: weight of each input's squared error [in].
        """
        ...

    def nearest(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the nearest grid values of weights, before scaling."""
        ...

    def near(self, scale: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """Return representable scales near `scale`, to replace `old`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerGrid:
    """Integers from `lowest` to `highest`."""

    lowest: int
    highest: int
    block: int  # 0: one scale for all inputs
    has_signs: bool = False  # scales may be negative: a block's largest weight may become `lowest`

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
        """See `Grid`; any number of the same sign."""
        sign = old.sign()
        return sign * torch.maximum(sign * scale, old.abs() * _SMALLEST_STEP)


def search_scales(
    blocks: torch.Tensor, tried: Iterable[torch.Tensor], factors: torch.Tensor, grid: Grid
) -> torch.Tensor:
    """Return each block's scale with the least error, [out, blocks].

    Args:
        blocks: of a weight [out, blocks, n].
        tried: candidate scales [out, blocks, 1].
        factors: weights of squared errors [blocks, n].
        grid: of the values.
    """
    best = least = None
    for scale in tried:
        errors = grid.nearest(blocks, scale) * scale - blocks
        error = (errors.square() * factors).sum(-1, keepdim=True)
        if best is None or least is None:
            best, least = scale, error
            continue
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    assert best is not None
    return best.squeeze(-1)


def spread(scales: torch.Tensor, width: int) -> torch.Tensor:
    """Repeat scales [out, blocks] for each weight [out, in]."""
    return scales.repeat_interleave(width // scales.shape[1], 1)


@dataclass(frozen=True, slots=True)
class Rounded:
    """A quantized weight."""

    codes: torch.Tensor  # grid values, float [out, in]
    scales: torch.Tensor  # [out, blocks]

    def values(self) -> torch.Tensor:
        """Dequantize to [out, in]."""
        return self.codes * spread(self.scales, self.codes.shape[1])


def round_nearest(weight: torch.Tensor, importance: torch.Tensor, grid: Grid) -> Rounded:
    """Round to nearest, with scales that weight errors by `importance` [in]."""
    scales = grid.scales(weight, importance)
    return Rounded(grid.nearest(weight, spread(scales, weight.shape[1])), scales)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """Shares of error feedback between columns, independent of the weight."""

    moments: torch.Tensor  # damped [in, in]
    importance: torch.Tensor  # of each input [in]
    order: torch.Tensor  # of columns [in]
    shares: torch.Tensor  # of a column's error for later columns, in `order`: upper [in, in]

    @classmethod
    def of(cls, moments: torch.Tensor) -> Feedback:
        """Compute the shares of second moments, the mean of x x^T [in, in]."""
        importance = moments.diagonal().clone()
        order = torch.argsort(importance, descending=True)
        damping = _DAMPING * float(importance.mean()) + _TINY
        damped = moments + damping * torch.eye(len(moments), device=moments.device)
        return cls(
            moments=damped,
            importance=importance,
            order=order,
            shares=_upper_inverse(damped[order][:, order], damping),
        )


def round_with_feedback(weight: torch.Tensor, feedback: Feedback, grid: Grid) -> Rounded:
    """Round the columns of `weight` [out, in] with error feedback."""
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
            error = own[:, at] - codes[:, column] * steps[:, column]
            errors[:, at] = error / shares[column, column]
            own[:, at:] -= errors[:, at, None] * shares[column, column:end]
        left[:, end:] -= errors @ shares[begin:end, end:]
    return Rounded(codes[:, torch.argsort(order)], scales)


def _upper_inverse(moments: torch.Tensor, damping: float) -> torch.Tensor:
    """Return the upper Cholesky factor of the inverse; increase damping until it exists."""
    while True:
        factor, failed = torch.linalg.cholesky_ex(moments)
        if not failed:
            return torch.linalg.cholesky(torch.cholesky_inverse(factor), upper=True)
        damping *= 10
        moments = moments + damping * torch.eye(len(moments), device=moments.device)
