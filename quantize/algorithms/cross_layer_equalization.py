"""Columns of a weight made more alike before it is rounded: exact in floats, and free at run time.

A block's scale follows its largest weight, and columns that are small beside it lose most. What
multiplies a column divides the input that it reads, in the norm that made it, or in the rows of
v_proj or up_proj (arXiv 1906.04721 does so between any two linear layers). Inputs that are rounded
in blocks as well lose likewise; there the factors serve both.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import torch
from transformers import PreTrainedModel

from edgellm.quantize.activations.layer_inputs import each_input
from edgellm.quantize.activations.token_weights import Weights, layer_weights, weighs_tokens
from edgellm.quantize.algorithms.mixed_precision.search import mix
from edgellm.quantize.algorithms.mixed_precision.sensitivity import FLOAT_FORM
from edgellm.quantize.algorithms.smoothquant import DOWN, OUTPUT, UP, VALUE, fold
from edgellm.quantize.calibration.hidden_states import States
from edgellm.quantize.formats.modelopt import F32
from edgellm.quantize.models.families import Family
from edgellm.quantize.plan import Plan

_EVENED = ("int4", "nvfp4")  # forms with a scale for a block of columns
_OF_WEIGHTS, _OF_INPUTS = 0.5, 0.25  # exponents of sizes, found with SmolLM2
_MAKERS = {OUTPUT: VALUE, DOWN: UP}  # linear layers that take factors, not norms
_ROWS = 8  # of text that say how large inputs are
_WIDEST = 16.0  # a factor, and one over it
_TINY = 1e-12

Squares = Mapping[str, torch.Tensor]  # means by linear layer, of the channels of its input [in]


def evened(plan: Plan, index: int, source: dict[str, F32], states: States | None) -> dict[str, F32]:
    """A layer's tensors as its scheme wants them before they are rounded.

    Args:
        plan: of the run.
        index: of the layer.
        source: named from "self_attn.q_proj.weight" on.
        states: that enter the layer after rounded ones; None where the scheme has none.
    """
    subject, scheme, device = plan.subject, plan.recipe.scheme, plan.task.device
    if scheme.form not in _EVENED:
        return source
    squares = None
    if scheme.is_nvfp4 and states is not None and weighs_tokens(plan):
        model = subject.layer_model(index, source, device)
        weights = layer_weights(plan, index)
        squares = input_squares(model, states.batches(device), subject.family, weights)
    forms = mix(plan).modules[index] if scheme.is_mixed else {}
    floats = [name for name, form in forms.items() if form == FLOAT_FORM]
    return even_columns(source, subject.family, subject.config.head_dim, squares, floats)


def even_columns(
    source: Mapping[str, F32],
    family: Family,
    head_dim: int,
    inputs: Squares | None = None,
    floats: Collection[str] = (),
) -> dict[str, F32]:
    """A layer's tensors that compute the same with columns of more equal size.

    Args:
        source: named from "self_attn.q_proj.weight" on.
        family: of the layer; one with experts stays as it is.
        head_dim: of the attention.
        inputs: that are rounded in blocks, too. None: they are not.
        floats: linear layers that are not rounded and stay as they are.
    """
    if family.experts is not None:
        return dict(source)
    found = {name: torch.from_numpy(value.copy()) for name, value in source.items()}
    for names in (*family.readers.values(), (OUTPUT,), (DOWN,)):
        weights = [found[f"{name}.weight"] for name in names if f"{name}.weight" in found]
        if len(weights) < len(names) or _is_float(names, floats):
            continue
        shared = _value_heads(names, found, weights[0].shape[1], head_dim)
        logs = -_OF_WEIGHTS * _logs(torch.cat(weights).square().mean(0), shared)
        if inputs is not None:
            logs += _OF_INPUTS * _logs(inputs[names[0]].cpu(), shared)
        factors = (logs - logs.mean()).exp().clamp(1 / _WIDEST, _WIDEST)
        if fold(found, names, factors, family, shared):
            for name in names:
                found[f"{name}.weight"] = found[f"{name}.weight"] * factors
    return {name: np.ascontiguousarray(value.numpy()) for name, value in found.items()}


def _is_float(names: tuple[str, ...], floats: Collection[str]) -> bool:
    """Whether one of these linear layers stays as it is, or the one that makes what they read."""
    return any(name in floats or _MAKERS.get(name) in floats for name in names)


def input_squares(
    model: PreTrainedModel, states: Iterable[torch.Tensor], family: Family, weights: Weights
) -> Squares:
    """What the linear layers of a layer read.

    Args:
        model: of one layer.
        states: that enter it [B, S, H]; some rows are taken.
        family: of the layer.
        weights: of the tokens of a row.
    """
    sums: dict[str, torch.Tensor] = {}
    for row in itertools.islice(each_input(model, states, family), _ROWS):
        for names, x in row.items():
            for name in names:
                squares = (x.square() * weights[name][:, None].to(x.device)).sum(0)
                sums[name] = sums.get(name, 0) + squares
    return sums


def _logs(squares: torch.Tensor, shared: tuple[int, int]) -> torch.Tensor:
    """Of the roots, up to a summand; alike for heads that read the same values."""
    heads, head_dim = shared
    if heads > 1:
        groups = squares.view(-1, heads, head_dim)
        squares = groups.mean(1, keepdim=True).expand_as(groups).reshape(-1)
    return 0.5 * (squares / squares.mean().clamp(min=_TINY)).clamp(min=_TINY).log()


def _value_heads(
    names: tuple[str, ...], found: Mapping[str, torch.Tensor], width: int, head_dim: int
) -> tuple[int, int]:
    """Query heads that read the same values, and their width; (1, 0) of other inputs."""
    value = found.get(f"{VALUE}.weight")
    if names != (OUTPUT,) or value is None or width % len(value):
        return 1, 0
    return width // len(value), head_dim
