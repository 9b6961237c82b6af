"""Estimates the KL divergence of quantizing one linear layer alone, for all of them at once.

To second order it is half the mean square, over tokens, of the gradient of a sampled token's
log-likelihood times the change of the layer's output.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch

from edgellm.quantize.activations.gradients import Trace, trace
from edgellm.quantize.algorithms.gptq.rounding import IntegerGrid, round_nearest
from edgellm.quantize.algorithms.mixed_precision.allocation import Form, Unit
from edgellm.quantize.models.families import Family
from edgellm.quantize.models.language_model import QuantizedNetwork, Task
from edgellm.quantize.models.one_layer_model import linears

FLOAT_FORM = "16"
FLOAT_BITS = 16
_SCALE_BITS = 16  # of a scale in an engine
_SAMPLES = 4

Grids = Mapping[str, IntegerGrid]  # by the name of a form
_Place = tuple[int, str]  # a layer, and a linear layer in it


def estimate(subject: QuantizedNetwork, task: Task, grids: Grids) -> list[Unit]:
    """Return the forms of all linear layers with their divergences.

    Args:
        subject: a language model.
        task: text and device.
        grids: of the quantized forms, by name.
    """
    rows = task.calibration.rows[:_SAMPLES]
    sizes: dict[_Place, tuple[int, int]] = {}
    sums: dict[tuple[_Place, str], float] = {}
    for layer, traces in itertools.groupby(
        trace(subject, rows, task.device), lambda each: each.layer
    ):
        changes: dict[str, dict[str, torch.Tensor]] = {}  # of one layer: they are large
        for traced in traces:
            for name in _rounded(traced, subject.family):
                if name not in changes:
                    changes[name] = _changes(traced, name, grids)
                    out, width = linears(traced.model)[name].weight.shape
                    sizes[layer, name] = out, width
                for form, change in changes[name].items():
                    moved = ((traced.gradients[name] @ change) * traced.inputs[name]).sum(-1)
                    key = (layer, name), form
                    sums[key] = sums.get(key, 0.0) + float(moved.square().sum()) / 2 / rows.size
    return [_unit(place, size, grids, sums) for place, size in sorted(sizes.items(), key=_layer_of)]


def _rounded(traced: Trace, family: Family) -> list[str]:
    return [name for name in traced.inputs if not family.is_float(f"{name}.weight")]


def _changes(traced: Trace, name: str, grids: Grids) -> dict[str, torch.Tensor]:
    """Return the change of a weight [out, in] by each form."""
    weight = linears(traced.model)[name].weight.detach()
    importance = traced.inputs[name].square().mean(0)
    return {
        form: round_nearest(weight, importance, grid).values() - weight
        for form, grid in grids.items()
    }


def _unit(
    place: _Place, size: tuple[int, int], grids: Grids, sums: dict[tuple[_Place, str], float]
) -> Unit:
    layer, name = place
    forms = [Form(FLOAT_FORM, FLOAT_BITS * size[0] * size[1], 0.0)]
    forms += [Form(form, _bits(grid, *size), sums[place, form]) for form, grid in grids.items()]
    return Unit(layer=layer, names=(name,), weights=size[0] * size[1], forms=tuple(forms))


def _layer_of(item: tuple[_Place, tuple[int, int]]) -> int:
    return item[0][0]


def _bits(grid: IntegerGrid, out: int, width: int) -> float:
    """Return the bits of quantized values and scales."""
    code = (grid.highest - grid.lowest).bit_length()
    return out * (width * code + width // (grid.block or width) * _SCALE_BITS)
