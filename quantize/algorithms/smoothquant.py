"""INT8 weights with INT8 inputs: a smoothing of each input that is searched, not fixed.

SmoothQuant (arXiv 2211.10438) divides input channels by s = a^alpha / w^(1 - alpha), a and w the
largest magnitudes of channel and weight, and multiplies the weight's columns. Too much of it moves
all outliers into the weights, whose rows have one scale. Here each input has the alpha with the
least error over rows that it was not fitted to, none (0) included. What multiplies a norm's output,
or what v_proj or up_proj make, goes into these, so that nothing is left to compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import torch
from transformers import PreTrainedModel

from edgellm.export.checkpoints.hf import TensorInfo
from edgellm.quantize.activations.layer_inputs import Inputs, read_inputs
from edgellm.quantize.algorithms.modelopt import Exported
from edgellm.quantize.formats.activation_rounding import round_int8, round_int8_blocks
from edgellm.quantize.formats.modelopt import F32
from edgellm.quantize.formats.schemes import Recipe
from edgellm.quantize.formats.tensors import Tensor, plain_tensor
from edgellm.quantize.models.families import Family
from edgellm.quantize.models.one_layer_model import LAYER

_ALPHAS = (0.0, 0.3, 0.5, 0.65, 0.8, 0.9, 1.0)
_CLIPS = (1.0, 0.8, 0.6)  # of a calibrated scale; few values may be cut off
_TOKENS = 256  # that judge a candidate
_WIDEST = 64.0  # a scale over the geometric mean of all, and below it
_AS_GOOD = 1.03  # errors that are no reason to choose
_TINY = 1e-8
VALUE, OUTPUT = "self_attn.v_proj", "self_attn.o_proj"
UP, DOWN = "mlp.up_proj", "mlp.down_proj"


@dataclass(frozen=True, slots=True)
class _Choice:
    """How the input of a group is treated."""

    scales: torch.Tensor  # that divide it [K]
    step: float  # of its calibrated rounding


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A smoothing that was tried."""

    error: float  # with inputs rounded as the target does it
    alpha: float
    product: torch.Tensor  # the rounded weight [out, K]
    smoothed: torch.Tensor  # rows [T, K]
    step: float  # of their calibrated rounding


def smooth(
    model: PreTrainedModel,
    recipe: Recipe,
    batches: Iterable[torch.Tensor],
    family: Family,
    head_dim: int,
) -> Exported:
    """The only layer of `model` in INT8.

    Args:
        model: of one layer, in floats.
        recipe: says whether the target finds scales of inputs itself, and holds its cache in bytes
            (values then stay as they are).
        batches: states that enter the layer [B, S, H].
        family: knows the norms.
        head_dim: of the attention.
    """
    layer = model.model.layers[0]
    assert isinstance(layer, torch.nn.Module)
    found = {name: value.detach().clone() for name, value in layer.state_dict().items()}
    outputs: dict[str, Tensor] = {}
    for inputs in read_inputs(model, batches, _TOKENS, family):
        weights = [found[f"{name}.weight"] for name in inputs.names]
        shared = _value_group(inputs, found, head_dim)
        choice = _choose(inputs, torch.cat(weights), recipe.target, shared)
        for name, weight in zip(inputs.names, weights, strict=True):
            found[f"{name}.weight"] = weight * choice.scales
            outputs[f"{name}.input_scale"] = plain_tensor(np.array(choice.step, np.float32))
        if not (
            _may_fold(inputs.names, outputs, recipe)
            and fold(found, inputs.names, choice.scales, family, shared)
        ):
            for name in inputs.names:
                outputs[f"{name}.pre_quant_scale"] = plain_tensor((1 / choice.scales).cpu().numpy())
    names = {name.rpartition(".")[0] for name in outputs}
    for name, value in found.items():
        values: F32 = value.float().cpu().numpy()
        if name.removesuffix(".weight") in names:
            outputs |= int8_rows(name, values)
        else:
            outputs[name] = plain_tensor(values)
    prefix = LAYER.format(0)
    tensors = {prefix + name: tensor for name, tensor in outputs.items()}
    return Exported(tensors, _described(recipe), own_producer())


def _may_fold(names: tuple[str, ...], outputs: Mapping[str, Tensor], recipe: Recipe) -> bool:
    """Whether what makes an input may be scaled.

    A cache of bytes has scales of the values as they are; and what is smoothed itself may be
    rounded anew, by a format that folds all that is left.
    """
    if names not in ((OUTPUT,), (DOWN,)):
        return True
    maker = VALUE if names == (OUTPUT,) else UP
    return f"{maker}.pre_quant_scale" not in outputs and (maker != VALUE or recipe.kv_cache is None)


def _choose(inputs: Inputs, weight: torch.Tensor, target: str, shared: tuple[int, int]) -> _Choice:
    """The smoothing with the least output error over the rows that judge.

    Where the target finds scales itself, the best for calibrated ones among those as good.
    """
    rows = inputs.judged
    wanted = rows @ weight.T
    tried: list[_Candidate] = []
    for alpha in _ALPHAS:
        scales = _scales(inputs.largest_fitted, weight, alpha, shared)
        product, smoothed = _rounded_rows(weight * scales), rows / scales
        step = max(float((inputs.largest_fitted / scales).max()) / 127, _TINY)
        rounded = round_int8_blocks(smoothed) if target == "cpu" else round_int8(smoothed, step)
        tried.append(_Candidate(_error(rounded, product, wanted), alpha, product, smoothed, step))
    limit = min(each.error for each in tried) * _AS_GOOD
    best: tuple[float, float, float] | None = None
    for each in tried:
        clips = _CLIPS if each.error <= limit else ()
        for clip in clips:
            rounded = round_int8(each.smoothed, each.step * clip)
            error = _error(rounded, each.product, wanted)
            best = min(best or (error, each.alpha, clip), (error, each.alpha, clip))
    assert best is not None
    _, alpha, clip = best
    final = _scales(inputs.largest, weight, alpha, shared)
    return _Choice(final, max(float((inputs.largest / final).max()) / 127 * clip, _TINY))


def _scales(
    largest: torch.Tensor, weight: torch.Tensor, alpha: float, shared: tuple[int, int]
) -> torch.Tensor:
    """What divides the channels [K], of geometric mean one; channels of a `shared` group alike."""
    if alpha == 0:
        return torch.ones_like(largest)
    ranges = [_joined(values, shared) for values in (largest, weight.abs().amax(0))]
    inputs, columns = (values.clamp(min=_TINY) for values in ranges)
    scales = inputs**alpha / columns ** (1 - alpha)
    scales = scales / scales.log().mean().exp()
    return scales.clamp(1 / _WIDEST, _WIDEST)


def _joined(values: torch.Tensor, shared: tuple[int, int]) -> torch.Tensor:
    """The largest of each group of heads, repeated."""
    heads, head_dim = shared
    if heads == 1:
        return values
    groups = values.view(-1, heads, head_dim)
    return groups.amax(1, keepdim=True).expand_as(groups).reshape(-1)


def _value_group(
    inputs: Inputs, found: Mapping[str, torch.Tensor], head_dim: int
) -> tuple[int, int]:
    """Query heads that read the same values, and their width; (1, 0) of other inputs."""
    value = found.get(f"{VALUE}.weight")
    if inputs.names != (OUTPUT,) or value is None or len(inputs.largest) % len(value):
        return 1, 0
    return len(inputs.largest) // len(value), head_dim


def fold(
    found: dict[str, torch.Tensor],
    names: tuple[str, ...],
    scales: torch.Tensor,
    family: Family,
    shared: tuple[int, int],
) -> bool:
    """Divide what makes the input of `names` by `scales` [in]; False: nothing can take them.

    Args:
        found: the layer's tensors, which are changed.
        names: of linear layers that read one tensor.
        scales: of its channels.
        family: knows the norms.
        shared: query heads that read the same values, and their width; (1, 0) of other inputs.
    """
    norm = next((norm for norm, readers in family.readers.items() if {*readers} == {*names}), None)
    if norm is not None and f"{norm}.weight" in found:
        shift = family.norm_shift
        found[f"{norm}.weight"] = (found[f"{norm}.weight"] + shift) / scales - shift
        if f"{norm}.bias" in found:
            found[f"{norm}.bias"] = found[f"{norm}.bias"] / scales
        return True
    is_gated = "mlp.gate_proj.weight" in found and f"{UP}.weight" in found
    if names == (DOWN,) and is_gated:
        return _fold_rows(found, UP, scales)
    if names == (OUTPUT,) and f"{VALUE}.weight" in found:
        heads, head_dim = shared
        rows = scales.view(-1, heads, head_dim)[:, 0].reshape(-1) if heads > 1 else scales
        return _fold_rows(found, VALUE, rows)
    return not bool((scales != 1).any())


def _fold_rows(found: dict[str, torch.Tensor], name: str, scales: torch.Tensor) -> bool:
    if len(found[f"{name}.weight"]) != len(scales):
        return False
    found[f"{name}.weight"] = found[f"{name}.weight"] / scales[:, None]
    if f"{name}.bias" in found:
        found[f"{name}.bias"] = found[f"{name}.bias"] / scales
    return True


def _error(rows: torch.Tensor, weight: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((rows @ weight.T - wanted).double().square().sum())


def _rounded_rows(weight: torch.Tensor) -> torch.Tensor:
    step = weight.abs().amax(1, keepdim=True).clamp(min=_TINY) / 127
    return torch.round(weight / step) * step


def int8_rows(name: str, weight: F32) -> dict[str, Tensor]:
    """A weight [out, in] in INT8 with a scale for each output, and its scales, by their names."""
    step = np.maximum(np.abs(weight).max(1), np.float32(_TINY)) / np.float32(127)
    codes = np.clip(np.rint(weight / step[:, None]), -127, 127).astype(np.int8)
    coded = Tensor(TensorInfo("I8", codes.shape), codes.tobytes())
    return {name: coded, f"{name}_scale": plain_tensor(step)}


def _described(recipe: Recipe) -> dict[str, str | None]:
    return {"quant_algo": recipe.scheme.algorithm, "kv_cache_quant_algo": None}


def own_producer() -> dict[str, str]:
    """Who made what ModelOpt did not."""
    return {"name": "edgellm", "version": version("edgellm")}
