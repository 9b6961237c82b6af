"""GPTQ of a layer.

Linear layers are fitted to their inputs after quantized layers, but do not compensate the errors of
those layers. Such errors are seldom a function of the hidden states, and a fit to them overfits the
calibration text (SmolLM2 in 4 bits: KL 2.1 instead of 0.12).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from edgellm.quantize.activations.layer_inputs import Group, each_input
from edgellm.quantize.activations.token_weights import Weights
from edgellm.quantize.algorithms.gptq.coordinate_descent import refine
from edgellm.quantize.algorithms.gptq.forms import FORMS, Form
from edgellm.quantize.algorithms.gptq.rounding import Feedback, Grid, round_with_feedback
from edgellm.quantize.algorithms.modelopt import Exported
from edgellm.quantize.algorithms.smoothquant import own_producer
from edgellm.quantize.formats.activation_rounding import round_input
from edgellm.quantize.formats.schemes import Recipe
from edgellm.quantize.formats.tensors import Tensor, plain_tensor
from edgellm.quantize.models.families import Family
from edgellm.quantize.models.one_layer_model import LAYER

_TINY = 1e-20


@dataclass(slots=True)
class _InputStats:
    """Statistics of a linear layer's inputs."""

    moments: torch.Tensor  # weighted sum of x x^T over quantized inputs x [K, K]
    tokens: int = 0
    largest: float = 0.0

    def add(self, x: torch.Tensor, form: Form, weights: torch.Tensor | None) -> None:
        """Add inputs of a sample [S, K] with the weights of its tokens [S]."""
        largest = float(x.abs().max())
        if form.input_kind:
            x = round_input(x, form.input_kind, max(largest, _TINY) / form.largest_input)
        weighed = x if weights is None else x * weights[:, None].to(x.device)
        self.moments += weighed.T @ x
        self.tokens += len(x)
        self.largest = max(self.largest, largest)


def round_layer(
    model: PreTrainedModel,
    recipe: Recipe,
    states: Iterable[torch.Tensor],
    family: Family,
    weights: Weights | None = None,
    forms: Mapping[str, str] | None = None,
) -> Exported:
    """Quantize the layer of `model` in the recipe's form, or each linear layer in its own.

    Args:
        model: a float model of one layer.
        recipe: the scheme, and the group size of INT4.
        states: hidden states [B, S, H] after quantized layers.
        family: of the layer.
        weights: of the tokens of a sample; None: equal weights.
        forms: names in `FORMS` by linear layer, others stay float; None: the recipe's form.
    """
    layer = model.model.layers[0]
    assert isinstance(layer, nn.Module)
    values = dict(layer.state_dict())
    found: dict[str, Tensor] = {}
    described: dict[str, dict[str, Any]] = {}
    for names, stats in _input_stats(model, states, family, _whole(recipe), weights).items():
        for kind, own in _by_form(names, forms, recipe).items():
            form = FORMS[kind](recipe.block_size, recipe.has_signs)
            matrices = {name: values.pop(f"{name}.weight") for name in own}
            grid = form.grid(torch.cat([*matrices.values()]))
            for name, weight in matrices.items():
                found |= _rounded(name, weight, stats[name], form, grid)
                described[name] = form.described()
    found |= {name: plain_tensor(value.float().cpu().numpy()) for name, value in values.items()}
    prefix = LAYER.format(0)
    tensors = {prefix + name: tensor for name, tensor in found.items()}
    whole = {**_whole(recipe).described(), "kv_cache_quant_algo": None}
    quantization = whole if forms is None else {"modules": described}
    return Exported(tensors, quantization, own_producer())


def _whole(recipe: Recipe) -> Form:
    """Return the recipe's form; of mixed precision, one with float inputs."""
    return FORMS[recipe.scheme.form](recipe.block_size, recipe.has_signs)


def _by_form(names: Group, forms: Mapping[str, str] | None, recipe: Recipe) -> dict[str, list[str]]:
    """Return the quantized linear layers of a group by form."""
    found: dict[str, list[str]] = {}
    for name in names:
        kind = recipe.scheme.form if forms is None else forms[name]
        if kind in FORMS:
            found.setdefault(kind, []).append(name)
    return found


def _rounded(
    name: str, weight: torch.Tensor, stats: _InputStats, form: Form, grid: Grid
) -> dict[str, Tensor]:
    """Quantize a linear layer; return its stored tensors."""
    feedback = Feedback.of(stats.moments / stats.tokens)
    rounded = refine(weight, round_with_feedback(weight, feedback, grid), feedback, grid)
    found = form.tensors(f"{name}.weight", rounded, grid)
    if form.input_kind:
        scale = max(stats.largest, _TINY) / form.largest_input
        found[f"{name}.input_scale"] = plain_tensor(np.array(scale, np.float32))
    return found


def _input_stats(
    model: PreTrainedModel,
    states: Iterable[torch.Tensor],
    family: Family,
    form: Form,
    weights: Weights | None,
) -> dict[Group, dict[str, _InputStats]]:
    found: dict[Group, dict[str, _InputStats]] = {}
    for row in each_input(model, states, family):
        for names, x in row.items():
            stats = found.setdefault(names, {})
            for name in names:
                if name not in stats:
                    stats[name] = _InputStats(torch.zeros(x.shape[1], x.shape[1], device=x.device))
                stats[name].add(x, form, None if weights is None else weights[name])
    return found
