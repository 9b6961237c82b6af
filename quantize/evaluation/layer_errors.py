"""Errors of a quantized layer, computed from the exported tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from edgellm.core.errors import BrokenArtifactError
from edgellm.quantize.algorithms.kv_cache import rounded_cache
from edgellm.quantize.calibration.hidden_states import States
from edgellm.quantize.formats.activation_rounding import round_input
from edgellm.quantize.formats.modelopt import F32
from edgellm.quantize.formats.quantized_linear import DecodedLinear, decode_linear
from edgellm.quantize.formats.schemes import Recipe
from edgellm.quantize.formats.tensors import Tensor
from edgellm.quantize.models.families import FOLDS, Family
from edgellm.quantize.models.one_layer_model import linears, run_layer

_BROKEN_ERROR = 0.6  # relative; plain rounding to 4 bits stays below 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """One layer; errors are root mean squares relative to the float value's."""

    index: int
    output_error: float  # of the layer's contribution, with the float model's input
    stream_error: float  # of the hidden states after it, with all layers up to it quantized
    weight_errors: dict[str, float]  # by linear layer; empty for a float layer
    bits: dict[str, float]  # of a stored weight, scales included
    seconds: float
    few: dict[str, int] = field(default_factory=dict)  # experts with few tokens: their number
    divergence: float = 0.0  # if it alone is quantized, nats a token; 0: not measured


class QuantizedLayer:
    """An exported layer in float32 whose inputs are quantized as in an engine."""

    def __init__(
        self,
        *,
        name: str,
        source: Mapping[str, F32],
        exported: Mapping[str, Tensor],
        recipe: Recipe,
        make_model: Callable[[Mapping[str, F32]], PreTrainedModel],
        device: torch.device,
        family: Family,
        head_dim: int,
    ) -> None:
        """Dequantize and check all tensors.

        Args:
            name: prefix of the layer's tensors in the checkpoint.
            source: the float layer's tensors.
            exported: the quantized ones; names of both begin with "self_attn.q_proj.weight".
            recipe: how they were quantized.
            make_model: makes the layer with other weights.
            device: where it computes.
            family: of the layer.
            head_dim: of its attention.

        Raises:
            BrokenArtifactError: a linear layer is not quantized, or its tensors are invalid.
        """
        matrices = {
            key.removesuffix(".weight"): (value.shape[0], value.shape[1])
            for key, value in source.items()
            if value.ndim == 2
            and not family.is_float(key)
            and not (recipe.scheme.is_mixed and f"{key}_scale" not in exported)
        }
        named = {name + key: tensor for key, tensor in exported.items()}
        self.decoded = {
            key: decode_linear(named, name + key, shape, recipe.scheme.rounds_input)
            for key, shape in matrices.items()
        }
        if recipe.scheme.rounds_tokens:
            self.decoded = {
                key: replace(linear, input_type="int8_tokens")
                for key, linear in self.decoded.items()
            }
        weights = {f"{key}.weight": linear.weight for key, linear in self.decoded.items()}
        rest = {key: _checked(named, name + key) for key in source if key not in weights}
        self._model = make_model({**rest, **weights})
        for key, module in linears(self._model).items():
            if key in self.decoded:
                _round_inputs(module, self.decoded[key], device, recipe.target)
        scheme = recipe.scheme
        folds = FOLDS if family.scales_values else FOLDS[1:]
        self._rest, self._folds = rest, folds if scheme.is_awq or scheme.is_smoothed else ()
        self._head_dim = head_dim
        self._family = family
        self._exported, self._kv_cache = exported, recipe.kv_cache

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [B, S, H] after the layer."""
        with rounded_cache(self._kv_cache, self._exported):
            return run_layer(self._model, states)

    def weight_errors(self, source: Mapping[str, F32]) -> dict[str, float]:
        """Return the relative error of each linear layer, with folded smoothing undone."""
        found = {name: self._unsmoothed(name, source) for name in self.decoded}
        for into, out_of in self._folds:
            pair = found.get(into), found.get(out_of)
            if pair[0] is None or pair[1] is None or pair[1].shape[1] % len(pair[0]):
                continue
            if self.decoded[out_of].pre_quant_scale is None:
                ratio = _row_ratio(pair[0], source[f"{into}.weight"])
                found[into] = pair[0] / ratio[:, None]
                heads = pair[1].shape[1] // len(pair[0])  # query heads of a KV head
                if heads > 1:
                    ratio = np.repeat(ratio.reshape(-1, 1, self._head_dim), heads, 1).reshape(-1)
                found[out_of] = pair[1] * ratio
        return {name: relative(source[f"{name}.weight"], value) for name, value in found.items()}

    def _unsmoothed(self, name: str, source: Mapping[str, F32]) -> F32:
        linear = self.decoded[name]
        weight = linear.weight
        if linear.pre_quant_scale is not None:
            weight = weight * linear.pre_quant_scale
        shift = np.float32(self._family.norm_shift)
        for norm, readers in self._family.readers.items():
            key = f"{norm}.weight"
            if name in readers and key in self._rest:
                before, after = source[key] + shift, self._rest[key] + shift
                safe = np.where(before == 0, np.float32(1), before)
                weight = weight * np.where(before == 0, np.float32(1), after / safe)
        return weight


def compare(
    quantized: Callable[[torch.Tensor], torch.Tensor],
    before: States,
    after: tuple[States, States],
    device: torch.device,
    width: int,
) -> tuple[float, float]:
    """Return the output error and the stream error of a layer over held-out text.

    Args:
        quantized: the layer, states [B, S, H] in and out.
        before: states of the float model that enter the layer.
        after: states of the float and the quantized model after it.
        device: where to compute.
        width: of the residual stream H; states may carry more.
    """
    local, stream = _Ratio(), _Ratio()
    pairs = zip(*(states.batches(device) for states in (before, *after)), strict=True)
    for entering, *both in pairs:
        residual, (leaving, theirs) = entering[..., :width], (each[..., :width] for each in both)
        local.add(quantized(entering)[..., :width] - leaving, leaving - residual)
        own = (leaving != residual).any(-1)  # a block draft does not change the text's positions
        stream.add((theirs - leaving)[own], leaving[own])
    return local.value, stream.value


def check_weight_errors(layer: str, errors: Mapping[str, float]) -> None:
    """Raise `BrokenArtifactError` if a weight's error is implausible."""
    for name, error in errors.items():
        if not error < _BROKEN_ERROR:
            raise BrokenArtifactError(
                f"{layer}{name}: implausible relative error {error:.2f} of the weights",
                hint="report it, and try another --quantization",
            )


def relative(wanted: F32, found: F32) -> float:
    """Return |found - wanted| / |wanted| in the Frobenius norm."""
    size = float(np.linalg.norm(wanted))
    return float(np.linalg.norm(found - wanted)) / size if size else 0.0


class _Ratio:
    """A root mean square relative to another."""

    def __init__(self) -> None:
        self._error = self._size = 0.0

    def add(self, error: torch.Tensor, size: torch.Tensor) -> None:
        self._error += float(error.double().square().sum())
        self._size += float(size.double().square().sum())

    @property
    def value(self) -> float:
        return (self._error / self._size) ** 0.5 if self._size else 0.0


def _checked(tensors: Mapping[str, Tensor], name: str) -> F32:
    values = tensors[name].floats()
    if not np.isfinite(values).all():
        raise BrokenArtifactError(f"{name} holds values that are not numbers")
    return values


def _row_ratio(found: F32, wanted: F32) -> F32:
    """Return the least-squares factor of each row of `found`; 1 for empty rows."""
    size = np.einsum("oi,oi->o", wanted, wanted)
    product = np.einsum("oi,oi->o", found, wanted)
    usable = (size > 0) & (product > 0)
    return np.where(usable, product / np.where(size > 0, size, 1), 1).astype(np.float32)


def _round_inputs(
    module: nn.Linear, linear: DecodedLinear, device: torch.device, target: str
) -> None:
    smooth = linear.pre_quant_scale
    scale = None if smooth is None else torch.from_numpy(smooth.copy()).to(device)
    kind = linear.input_type
    kind = "int8 blocks" if (kind, target) == ("int8", "cpu") else kind

    def before(_: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        x = args[0] if scale is None else args[0] * scale
        return (round_input(x, kind, linear.input_scale),)

    module.register_forward_pre_hook(before)
