"""INT4 by error feedback: the recipe of a layer.

Each weight is rounded in several ways, and the one with the least output error over rows that
nothing was fitted to stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from edgellm.export.checkpoint import TensorInfo
from edgellm.quantize.error_feedback import (
    Feedback,
    Grid,
    Rounded,
    aimed,
    round_nearest,
    round_with_feedback,
)
from edgellm.quantize.families import Family
from edgellm.quantize.formats import pack_int4_codes
from edgellm.quantize.layer_inputs import JUDGED_SHARE, Group, each_input
from edgellm.quantize.modelopt_adapter import Exported, Recipe
from edgellm.quantize.one_layer_model import LAYER
from edgellm.quantize.smoothing import own_producer, plain_tensor
from edgellm.quantize.tensors import Tensor

_TOKENS = 512  # that judge
_TRUSTS = (0.0, 3.0)  # in the errors of the inputs


@dataclass(slots=True)
class _Seen:
    """What a group of linear layers reads, in the float model (x) and behind rounded layers (y)."""

    moments: torch.Tensor  # sum of y y^T over the rows that are fitted to [K, K]
    crossed: torch.Tensor  # sum of x y^T
    tokens: int
    judged: list[tuple[torch.Tensor, torch.Tensor]]  # x and y of the others [T, K]

    def add(self, x: torch.Tensor, y: torch.Tensor, *, judges: bool) -> None:
        """One row of text [S, K]."""
        if judges:
            self.judged.append((x, y))
            return
        self.moments += y.T @ y
        self.crossed += x.T @ y
        self.tokens += len(x)


def round_layer(
    model: PreTrainedModel,
    recipe: Recipe,
    states: Iterable[torch.Tensor],
    rounded: Iterable[torch.Tensor],
    family: Family,
    forms: Mapping[str, str] | None = None,
) -> Exported:
    """The only layer of `model` in INT4 blocks, or each linear layer in a form of its own.

    Args:
        model: of one layer, in floats.
        recipe: gives the block size.
        states: hidden states [B, S, H] of the float model that enter the layer.
        rounded: those of the model whose layers before this one are rounded already.
        family: of the layer.
        forms: names in `FORMS`, by linear layer; others stay floats. None: all are INT4.
    """
    layer = model.model.layers[0]
    assert isinstance(layer, nn.Module)
    values = dict(layer.state_dict())
    found: dict[str, Tensor] = {}
    described: dict[str, dict[str, Any]] = {}
    for names, seen in _look(model, states, rounded, family).items():
        form = "int4" if forms is None else forms[names[0]]
        if form not in FORMS:
            continue
        weights = [values.pop(f"{name}.weight") for name in names]
        for name, each in zip(names, _best(weights, seen, grid_of(form, recipe)), strict=True):
            found |= FORMS[form](f"{name}.weight", each)
            described[name] = _described(form, recipe)
    found |= {name: plain_tensor(value.float().cpu().numpy()) for name, value in values.items()}
    prefix = LAYER.format(0)
    tensors = {prefix + name: tensor for name, tensor in found.items()}
    quantization = described_int4(recipe) if forms is None else {"modules": described}
    return Exported(tensors, quantization, own_producer())


def _look(
    model: PreTrainedModel,
    states: Iterable[torch.Tensor],
    rounded: Iterable[torch.Tensor],
    family: Family,
) -> dict[Group, _Seen]:
    found: dict[Group, _Seen] = {}
    rows = zip(each_input(model, states, family), each_input(model, rounded, family), strict=True)
    for number, (xs, ys) in enumerate(_twice_if_single(rows)):
        for names, x in xs.items():
            if names not in found:
                empty = torch.zeros(x.shape[1], x.shape[1], device=x.device)
                found[names] = _Seen(empty, empty.clone(), 0, [])
            found[names].add(x, ys[names], judges=number % JUDGED_SHARE == 0)
    return found


def _twice_if_single(rows: Iterator[Any]) -> Iterator[Any]:
    """A single row of text judges and is fitted to."""
    first = next(rows)
    yield first
    second = next(rows, first)
    yield second
    yield from rows


def _best(weights: list[torch.Tensor], seen: _Seen, grid: Grid) -> list[Rounded]:
    """Of each weight the rounding with the least output error over the rows that judge."""
    moments, crossed = seen.moments / seen.tokens, seen.crossed / seen.tokens
    xs, ys = (torch.cat(parts) for parts in zip(*seen.judged, strict=True))
    every = -(-len(xs) // _TOKENS)
    xs, ys = xs[::every], ys[::every]
    whole, feedback = torch.cat(weights), Feedback.of(moments)
    tried = [round_nearest(whole, feedback.importance, grid)]
    tried += [
        round_with_feedback(aimed(whole, moments, crossed, trust), feedback, grid)
        for trust in _TRUSTS
    ]
    wanted = xs @ whole.T
    errors = torch.stack([(ys @ each.values().T - wanted).square().sum(0) for each in tried])
    found, begin = [], 0
    for weight in weights:
        part = slice(begin, begin := begin + len(weight))
        best = tried[int(errors[:, part].sum(1).argmin())]
        found.append(Rounded(best.codes[part], best.scales[part]))
    return found


def grid_of(form: str, recipe: Recipe) -> Grid:
    """What the codes of a form may be."""
    return Grid(-8, 7, recipe.block_size) if form == "int4" else Grid(-127, 127, 0)


def _int4(name: str, rounded: Rounded) -> dict[str, Tensor]:
    packed = pack_int4_codes(rounded.codes.cpu().numpy().astype(np.int8))
    return {
        name: Tensor(TensorInfo("U8", packed.shape), packed.tobytes()),
        f"{name}_scale": plain_tensor(rounded.scales.float().cpu().numpy()),
    }


def _int8(name: str, rounded: Rounded) -> dict[str, Tensor]:
    codes = rounded.codes.cpu().numpy().astype(np.int8)
    return {
        name: Tensor(TensorInfo("I8", codes.shape), codes.tobytes()),
        f"{name}_scale": plain_tensor(rounded.scales[:, 0].float().cpu().numpy()),
    }


# How the codes of a weight of that name are stored.
FORMS: dict[str, Callable[[str, Rounded], dict[str, Tensor]]] = {"int4": _int4, "int8": _int8}


def _described(form: str, recipe: Recipe) -> dict[str, Any]:
    if form == "int4":
        return {key: value for key, value in described_int4(recipe).items() if "kv" not in key}
    return {"quant_algo": "W8A16"}


def described_int4(recipe: Recipe) -> dict[str, Any]:
    """As ModelOpt describes INT4 blocks; nothing is smoothed."""
    return {
        "quant_algo": "W4A16_AWQ",
        "kv_cache_quant_algo": None,
        "group_size": recipe.block_size,
        "has_zero_point": False,
        "pre_quant_scale": False,
    }
