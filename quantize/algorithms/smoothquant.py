"""SmoothQuant for INT8 weights and inputs, with a search for alpha.

SmoothQuant (arXiv 2211.10438) divides input channels by s = a^alpha / w^(1 - alpha), a and w the
largest magnitudes of channel and weight, and multiplies the weight's columns. A large alpha moves
all outliers into the weights, which have one scale for each output. Each input takes the alpha with
the least error over samples outside the fit; 0: no smoothing. Factors are folded into the norm,
v_proj or up_proj before the input where possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import torch
from transformers import PreTrainedModel

from edgellm.export.checkpoints.checkpoint import TensorInfo
from edgellm.quantize.activations.layer_inputs import Inputs, read_inputs
from edgellm.quantize.algorithms.modelopt import Exported
from edgellm.quantize.formats.activation_rounding import round_int8, round_int8_blocks
from edgellm.quantize.formats.modelopt import F32
from edgellm.quantize.formats.schemes import Recipe
from edgellm.quantize.formats.tensors import Tensor, plain_tensor
from edgellm.quantize.models.families import Family
from edgellm.quantize.models.one_layer_model import LAYER

_ALPHAS = (0.0, 0.3, 0.5, 0.65, 0.8, 0.9, 1.0)
_CLIPS = (1.0, 0.8, 0.6)  # factors of a calibrated scale
_TOKENS = 256  # that evaluate a candidate
_WIDEST = 64.0  # maximum factor over the geometric mean; its inverse is the minimum
_TOLERANCE = 1.03  # errors up to this factor count as equal
_TINY = 1e-8
VALUE, OUTPUT = "self_attn.v_proj", "self_attn.o_proj"
UP, DOWN = "mlp.up_proj", "mlp.down_proj"


@dataclass(frozen=True, slots=True)
class _Choice:
    """Smoothing and scale of a group's input."""

    scales: torch.Tensor  # divisors of its channels [K]
    step: float  # calibrated scale


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A candidate of the search."""

    error: float  # with inputs quantized as on the target
    alpha: float
    weight: torch.Tensor  # quantized [out, K]
    smoothed: torch.Tensor  # inputs [T, K]
    step: float  # calibrated scale of the inputs


def smooth(
    model: PreTrainedModel,
    recipe: Recipe,
    batches: Iterable[torch.Tensor],
    family: Family,
    head_dim: int,
) -> Exported:
    """Quantize the layer of `model` to INT8.

    Args:
        model: a float model of one layer.
        recipe: names the target (dynamic or calibrated input scales) and the KV cache (if
            quantized, v_proj is not scaled).
        batches: states that enter the layer [B, S, H].
        family: of the layer; names its norms.
        head_dim: of the attention.
    """
    layer = model.model.layers[0]
    assert isinstance(layer, torch.nn.Module)
    found = {name: value.detach().clone() for name, value in layer.state_dict().items()}
    outputs: dict[str, Tensor] = {}
    for inputs in read_inputs(model, batches, _TOKENS, family):
        weights = [found[f"{name}.weight"] for name in inputs.names]
        shared = _value_group(inputs, found, head_dim) if family.scales_values else (1, 0)
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
    """Return whether the linear layer before an input may be scaled.

    Scales of a quantized KV cache are those of unscaled values. A layer with its own smoothing may
    be quantized again by a format that folds it.
    """
    if names not in ((OUTPUT,), (DOWN,)):
        return True
    producer = VALUE if names == (OUTPUT,) else UP
    if producer == VALUE and recipe.kv_cache is not None:
        return False
    return f"{producer}.pre_quant_scale" not in outputs


def _choose(inputs: Inputs, weight: torch.Tensor, target: str, shared: tuple[int, int]) -> _Choice:
    """Return the smoothing with the least output error over the evaluation tokens.

    With dynamic scales, the best for calibrated scales among those of equal error.
    """
    x = inputs.judged
    wanted = x @ weight.T
    tried: list[_Candidate] = []
    for alpha in _ALPHAS:
        scales = _scales(inputs.largest_fitted, weight, alpha, shared)
        product, smoothed = _rounded_rows(weight * scales), x / scales
        step = max(float((inputs.largest_fitted / scales).max()) / 127, _TINY)
        rounded = round_int8_blocks(smoothed) if target == "cpu" else round_int8(smoothed, step)
        tried.append(
            _Candidate(
                error=_error(rounded, product, wanted),
                alpha=alpha,
                weight=product,
                smoothed=smoothed,
                step=step,
            )
        )
    limit = min(each.error for each in tried) * _TOLERANCE
    best: tuple[float, float, float] | None = None
    for each in tried:
        clips = _CLIPS if each.error <= limit else ()
        for clip in clips:
            rounded = round_int8(each.smoothed, each.step * clip)
            error = _error(rounded, each.weight, wanted)
            best = min(best or (error, each.alpha, clip), (error, each.alpha, clip))
    assert best is not None
    _, alpha, clip = best
    final = _scales(inputs.largest, weight, alpha, shared)
    return _Choice(final, max(float((inputs.largest / final).max()) / 127 * clip, _TINY))


def _scales(
    largest: torch.Tensor, weight: torch.Tensor, alpha: float, shared: tuple[int, int]
) -> torch.Tensor:
    """Return divisors of the channels [K], geometric mean 1; equal in a `shared` group."""
    if alpha == 0:
        return torch.ones_like(largest)
    ranges = [_joined(values, shared) for values in (largest, weight.abs().amax(0))]
    inputs, columns = (values.clamp(min=_TINY) for values in ranges)
    scales = inputs**alpha / columns ** (1 - alpha)
    scales = scales / scales.log().mean().exp()
    return scales.clamp(1 / _WIDEST, _WIDEST)


def _joined(values: torch.Tensor, shared: tuple[int, int]) -> torch.Tensor:
    """Return the maximum over each group of heads, repeated."""
    heads, head_dim = shared
    if heads == 1:
        return values
    groups = values.view(-1, heads, head_dim)
    return groups.amax(1, keepdim=True).expand_as(groups).reshape(-1)


def _value_group(
    inputs: Inputs, found: Mapping[str, torch.Tensor], head_dim: int
) -> tuple[int, int]:
    """Return the number of query heads that share values, and their width; else (1, 0)."""
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
    """Divide the producer of an input by `scales` [in]; return False if there is none.

    Args:
        found: the layer's tensors, which are changed.
        names: linear layers that share the input.
        scales: of its channels.
        family: of the layer; names its norms.
        shared: number of query heads that share values, and their width; else (1, 0).
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
    if names == (OUTPUT,) and f"{VALUE}.weight" in found and family.scales_values:
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


def _error(x: torch.Tensor, weight: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((x @ weight.T - wanted).double().square().sum())


def _rounded_rows(weight: torch.Tensor) -> torch.Tensor:
    step = weight.abs().amax(1, keepdim=True).clamp(min=_TINY) / 127
    return torch.round(weight / step) * step


def int8_rows(name: str, weight: F32) -> dict[str, Tensor]:
    """Quantize a weight [out, in] to INT8 by output; return it and its scales by name."""
    step = np.maximum(np.abs(weight).max(1), np.float32(_TINY)) / np.float32(127)
    codes = np.clip(np.rint(weight / step[:, None]), -127, 127).astype(np.int8)
    coded = Tensor(TensorInfo("I8", codes.shape), codes.tobytes())
    return {name: coded, f"{name}_scale": plain_tensor(step)}


def _described(recipe: Recipe) -> dict[str, str | None]:
    return {"quant_algo": recipe.scheme.algorithm, "kv_cache_quant_algo": None}


def own_producer() -> dict[str, str]:
    """Return the producer of layers that edgellm quantizes itself."""
    return {"name": "edgellm", "version": version("edgellm")}
