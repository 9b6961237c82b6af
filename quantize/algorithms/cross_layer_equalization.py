"""Cross-layer equalization of weight columns: exact in float, and free at run time.

A block's scale follows its largest weight, so smaller columns have larger relative errors. A factor
of a column divides the norm before it, or the output channels of v_proj or up_proj (arXiv
1906.04721 does so between any two linear layers). For inputs quantized in blocks, the factors
balance columns and inputs.
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

_BLOCK_FORMS = ("int4", "nvfp4")  # with a scale for a block of columns
_OF_WEIGHTS, _OF_INPUTS = 0.5, 0.25  # exponents of magnitudes, tuned with SmolLM2
_PRODUCERS = {OUTPUT: VALUE, DOWN: UP}  # linear layers, instead of norms, that are divided
_SAMPLES = 8  # that measure the inputs
_WIDEST = 16.0  # maximum factor; its inverse is the minimum
_TINY = 1e-12

Squares = Mapping[str, torch.Tensor]  # mean squares of input channels [in], by linear layer


def equalize(
    plan: Plan, index: int, source: dict[str, F32], states: States | None
) -> dict[str, F32]:
    """Equalize a layer's tensors if its scheme has blocks of columns.

    Args:
        plan: of the run.
        index: of the layer.
        source: names such as "self_attn.q_proj.weight".
        states: that enter the layer after quantized layers; None: the scheme has none.
    """
    subject, scheme, device = plan.subject, plan.recipe.scheme, plan.task.device
    if scheme.form not in _BLOCK_FORMS:
        return source
    squares = None
    if scheme.is_nvfp4 and states is not None and weighs_tokens(plan):
        model = subject.layer_model(index, source, device)
        weights = layer_weights(plan, index)
        squares = input_squares(model, states.batches(device), subject.family, weights)
    forms = mix(plan).modules[index] if scheme.is_mixed else {}
    floats = [name for name, form in forms.items() if form == FLOAT_FORM]
    return equalize_columns(source, subject.family, subject.config.head_dim, squares, floats)


def equalize_columns(
    source: Mapping[str, F32],
    family: Family,
    head_dim: int,
    inputs: Squares | None = None,
    floats: Collection[str] = (),
) -> dict[str, F32]:
    """Return a layer's tensors with columns of more equal size and the same output.

    Args:
        source: names such as "self_attn.q_proj.weight".
        family: of the layer; layers with experts stay unchanged.
        head_dim: of the attention.
        inputs: mean squares of inputs quantized in blocks; None: float inputs.
        floats: linear layers that stay float, and unchanged.
    """
    if family.experts is not None:
        return dict(source)
    found = {name: torch.from_numpy(value.copy()) for name, value in source.items()}
    for names in (*family.readers.values(), (OUTPUT,), (DOWN,)):
        weights = [found[f"{name}.weight"] for name in names if f"{name}.weight" in found]
        if len(weights) < len(names) or _is_float(names, floats):
            continue
        shared = _value_heads(names, found, weights[0].shape[1], head_dim)
        if names == (OUTPUT,) and not family.scales_values:
            continue
        logs = -_OF_WEIGHTS * _logs(torch.cat(weights).square().mean(0), shared)
        if inputs is not None:
            logs += _OF_INPUTS * _logs(inputs[names[0]].cpu(), shared)
        factors = (logs - logs.mean()).exp().clamp(1 / _WIDEST, _WIDEST)
        if fold(found, names, factors, family, shared):
            for name in names:
                found[f"{name}.weight"] = found[f"{name}.weight"] * factors
    return {name: np.ascontiguousarray(value.numpy()) for name, value in found.items()}


def _is_float(names: tuple[str, ...], floats: Collection[str]) -> bool:
    """Return whether one of these linear layers, or the producer of its input, stays float."""
    return any(name in floats or _PRODUCERS.get(name) in floats for name in names)


def input_squares(
    model: PreTrainedModel, states: Iterable[torch.Tensor], family: Family, weights: Weights
) -> Squares:
    """Return the mean squares of the inputs of linear layers.

    Args:
        model: of one layer.
        states: that enter it [B, S, H]; the first samples are used.
        family: of the layer.
        weights: of the tokens of a sample.
    """
    sums: dict[str, torch.Tensor] = {}
    for row in itertools.islice(each_input(model, states, family), _SAMPLES):
        for names, x in row.items():
            for name in names:
                squares = (x.square() * weights[name][:, None].to(x.device)).sum(0)
                sums[name] = sums.get(name, 0) + squares
    return sums


def _logs(squares: torch.Tensor, shared: tuple[int, int]) -> torch.Tensor:
    """Return logarithms of the roots, up to a constant; equal for heads that share values."""
    heads, head_dim = shared
    if heads > 1:
        groups = squares.view(-1, heads, head_dim)
        squares = groups.mean(1, keepdim=True).expand_as(groups).reshape(-1)
    return 0.5 * (squares / squares.mean().clamp(min=_TINY)).clamp(min=_TINY).log()


def _value_heads(
    names: tuple[str, ...], found: Mapping[str, torch.Tensor], width: int, head_dim: int
) -> tuple[int, int]:
    """Return the number of query heads that share values, and their width; else (1, 0)."""
    value = found.get(f"{VALUE}.weight")
    if names != (OUTPUT,) or value is None or width % len(value):
        return 1, 0
    return width // len(value), head_dim
