"""Coordinate descent after GPTQ: each quantized value and scale is optimized given all others.

The objective is the output error, sum (w - q) H (w - q)^T with H the second moments of the inputs
(arXiv 2309.01885 does so for quantized values). No step increases it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from edgellm.quantize.algorithms.gptq.rounding import Feedback, Grid, Rounded, spread

SWEEPS = 2
_SLICE = 128  # columns between updates of all others
_TINY = 1e-20


@dataclass(slots=True)
class _State:
    """A weight during coordinate descent."""

    codes: torch.Tensor  # [out, in]
    scales: torch.Tensor  # [out, blocks]
    gradient: torch.Tensor  # error times moments [out, in]


def refine(
    weight: torch.Tensor, rounded: Rounded, feedback: Feedback, grid: Grid, sweeps: int = SWEEPS
) -> Rounded:
    """Reduce the output error of a quantized weight.

    Args:
        weight: float [out, in].
        rounded: the quantized weight.
        feedback: of its inputs.
        grid: of its quantized values.
        sweeps: number of passes over all scales and values.
    """
    moments = feedback.moments
    state = _State(rounded.codes.clone(), rounded.scales.clone(), torch.empty_like(weight))
    state.gradient = (rounded.values() - weight) @ moments
    for _ in range(sweeps):
        _sweep_scales(state, moments, grid)
        _sweep_codes(state, moments, grid)
    return Rounded(state.codes, state.scales)


def _sweep_scales(state: _State, moments: torch.Tensor, grid: Grid) -> None:
    """Set each scale to the optimum for its block's quantized values."""
    blocks = state.scales.shape[1]
    width = state.codes.shape[1] // blocks
    for block in range(blocks):
        own = slice(block * width, (block + 1) * width)
        codes = state.codes[:, own]
        curved = ((codes @ moments[own, own]) * codes).sum(1)
        slope = (state.gradient[:, own] * codes).sum(1)
        old = state.scales[:, block]
        new = grid.near(old - slope / curved.clamp(min=_TINY), old)
        gain = (new - old) * (2 * slope + (new - old) * curved)
        change = torch.where((gain < 0) & (curved > _TINY), new - old, torch.zeros_like(old))
        state.scales[:, block] += change
        state.gradient += (change[:, None] * codes) @ moments[own]


def _sweep_codes(state: _State, moments: torch.Tensor, grid: Grid) -> None:
    """Set each quantized value to the nearest of its optimum given all others."""
    width = state.codes.shape[1]
    steps = spread(state.scales, width)
    diagonal = moments.diagonal().clamp(min=_TINY)
    for begin in range(0, width, _SLICE):
        own = slice(begin, min(begin + _SLICE, width))
        gradient, step, inner = state.gradient[:, own].clone(), steps[:, own], moments[own, own]
        before = state.codes[:, own] * step
        values = before.clone()
        for at in range(values.shape[1]):
            wanted = values[:, at] - gradient[:, at] / diagonal[begin + at]
            code = grid.nearest(wanted, step[:, at])
            change = code * step[:, at] - values[:, at]
            state.codes[:, begin + at] = code
            values[:, at] += change
            gradient += change[:, None] * inner[at]
        state.gradient += (values - before) @ moments[own]
