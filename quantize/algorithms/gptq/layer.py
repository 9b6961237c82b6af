"""Error feedback: the recipe of a layer.

Linear layers are fitted to what they read after rounded layers. They do not try to make up for
what those lost: a stream's error is seldom a function of the stream, and a layer that is bent to
undo it over some text ruins others (SmolLM2 in four bits: KL 2.1 instead of 0.12).
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
class _Seen:
    """What a linear layer reads."""

    moments: torch.Tensor  # sum of x x^T, tokens weighed, x as the layer rounds it [K, K]
    tokens: int = 0
    largest: float = 0.0

    def add(self, x: torch.Tensor, form: Form, weights: torch.Tensor | None) -> None:
        """One row of text [S, K], and how much its tokens count [S]."""
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
    """The only layer of `model` in the recipe's form, or each linear layer in one of its own.

    Args:
        model: of one layer, in floats.
        recipe: the scheme, and the size of INT4's blocks.
        states: hidden states [B, S, H] behind layers that are rounded already.
        family: of the layer.
        weights: of the tokens of a row. None: all count alike.
        forms: names in `FORMS`, by linear layer; others stay floats. None: all are the recipe's.
    """
    layer = model.model.layers[0]
    assert isinstance(layer, nn.Module)
    values = dict(layer.state_dict())
    found: dict[str, Tensor] = {}
    described: dict[str, dict[str, Any]] = {}
    for names, seen in _look(model, states, family, _whole(recipe), weights).items():
        for kind, own in _by_form(names, forms, recipe).items():
            form = FORMS[kind](recipe.block_size, recipe.has_signs)
            matrices = {name: values.pop(f"{name}.weight") for name in own}
            grid = form.grid(torch.cat([*matrices.values()]))
            for name, weight in matrices.items():
                found |= _rounded(name, weight, seen[name], form, grid)
                described[name] = form.described()
    found |= {name: plain_tensor(value.float().cpu().numpy()) for name, value in values.items()}
    prefix = LAYER.format(0)
    tensors = {prefix + name: tensor for name, tensor in found.items()}
    whole = {**_whole(recipe).described(), "kv_cache_quant_algo": None}
    quantization = whole if forms is None else {"modules": described}
    return Exported(tensors, quantization, own_producer())


def _whole(recipe: Recipe) -> Form:
    """The recipe's form; of mixed precision it says that inputs stay floats."""
    return FORMS[recipe.scheme.form](recipe.block_size, recipe.has_signs)


def _by_form(names: Group, forms: Mapping[str, str] | None, recipe: Recipe) -> dict[str, list[str]]:
    """The linear layers of a group that are rounded, by their form."""
    found: dict[str, list[str]] = {}
    for name in names:
        kind = recipe.scheme.form if forms is None else forms[name]
        if kind in FORMS:
            found.setdefault(kind, []).append(name)
    return found


def _rounded(
    name: str, weight: torch.Tensor, seen: _Seen, form: Form, grid: Grid
) -> dict[str, Tensor]:
    """What is stored of a linear layer."""
    feedback = Feedback.of(seen.moments / seen.tokens)
    rounded = refine(weight, round_with_feedback(weight, feedback, grid), feedback, grid)
    found = form.tensors(f"{name}.weight", rounded, grid)
    if form.input_kind:
        scale = max(seen.largest, _TINY) / form.largest_input
        found[f"{name}.input_scale"] = plain_tensor(np.array(scale, np.float32))
    return found


def _look(
    model: PreTrainedModel,
    states: Iterable[torch.Tensor],
    family: Family,
    form: Form,
    weights: Weights | None,
) -> dict[Group, dict[str, _Seen]]:
    found: dict[Group, dict[str, _Seen]] = {}
    for row in each_input(model, states, family):
        for names, x in row.items():
            seen = found.setdefault(names, {})
            for name in names:
                if name not in seen:
                    seen[name] = _Seen(torch.zeros(x.shape[1], x.shape[1], device=x.device))
                seen[name].add(x, form, None if weights is None else weights[name])
    return found
