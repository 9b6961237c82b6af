"""What rounding by columns leaves is lessened: each code and scale once more, given all others.

A sweep is coordinate descent on the error of the outputs, sum (w - q) H (w - q)^T with H the second
moments of the inputs (arXiv 2309.01885 does so for codes): no step makes it larger.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from edgellm.quantize.algorithms.gptq.rounding import Feedback, Grid, Rounded, spread

SWEEPS = 2
_SLICE = 128  # columns between two updates of all others
_TINY = 1e-20


@dataclass(slots=True)
class _State:
    """A weight on its way."""

    codes: torch.Tensor  # [out, in]
    scales: torch.Tensor  # [out, blocks]
    pull: torch.Tensor  # error times moments [out, in]


def refine(
    weight: torch.Tensor, rounded: Rounded, feedback: Feedback, grid: Grid, sweeps: int = SWEEPS
) -> Rounded:
    """`rounded` with a smaller error of the outputs.

    Args:
        weight: floats [out, in].
        rounded: what it became.
        feedback: of its inputs.
        grid: of its codes.
        sweeps: over all scales and codes.
    """
    moments = feedback.moments
    state = _State(rounded.codes.clone(), rounded.scales.clone(), torch.empty_like(weight))
    state.pull = (rounded.values() - weight) @ moments
    for _ in range(sweeps):
        _sweep_scales(state, moments, grid)
        _sweep_codes(state, moments, grid)
    return Rounded(state.codes, state.scales)


def _sweep_scales(state: _State, moments: torch.Tensor, grid: Grid) -> None:
    """Each scale where its block's codes want it."""
    blocks = state.scales.shape[1]
    width = state.codes.shape[1] // blocks
    for block in range(blocks):
        own = slice(block * width, (block + 1) * width)
        codes = state.codes[:, own]
        curved = ((codes @ moments[own, own]) * codes).sum(1)
        slope = (state.pull[:, own] * codes).sum(1)
        old = state.scales[:, block]
        new = grid.near(old - slope / curved.clamp(min=_TINY), old)
        gain = (new - old) * (2 * slope + (new - old) * curved)
        change = torch.where((gain < 0) & (curved > _TINY), new - old, torch.zeros_like(old))
        state.scales[:, block] += change
        state.pull += (change[:, None] * codes) @ moments[own]


def _sweep_codes(state: _State, moments: torch.Tensor, grid: Grid) -> None:
    """Each code to the nearest of what the others leave it to do."""
    width = state.codes.shape[1]
    steps = spread(state.scales, width)
    diagonal = moments.diagonal().clamp(min=_TINY)
    for begin in range(0, width, _SLICE):
        own = slice(begin, min(begin + _SLICE, width))
        pull, step, inner = state.pull[:, own].clone(), steps[:, own], moments[own, own]
        before = state.codes[:, own] * step
        values = before.clone()
        for at in range(values.shape[1]):
            wanted = values[:, at] - pull[:, at] / diagonal[begin + at]
            code = grid.nearest(wanted, step[:, at])
            change = code * step[:, at] - values[:, at]
            state.codes[:, begin + at] = code
            values[:, at] += change
            pull += change[:, None] * inner[at]
        state.pull += (values - before) @ moments[own]
