"""Quantizes one-layer models with nvidia-modelopt, and reads the exported tensors.

All uses of ModelOpt are in this file.
"""

from __future__ import annotations

import contextlib
import copy
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from edgellm.core.errors import (
    EdgeLLMError,
    LimitError,
)
from edgellm.export.checkpoints.checkpoint import Safetensors
from edgellm.export.checkpoints.vlm import own_name
from edgellm.quantize.formats.activation_rounding import round_nvfp4
from edgellm.quantize.formats.modelopt import LARGEST_E2M1, LARGEST_E4M3, NVFP4_BLOCK
from edgellm.quantize.formats.schemes import KV_SCHEMES, Recipe
from edgellm.quantize.formats.tensors import Tensor, read_below

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # "transformers ... is not tested": our tests do
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint, unified_export_hf
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
    from modelopt.torch.quantization import model_calib, tensor_quant

_NVFP4_RANGE = LARGEST_E2M1 * LARGEST_E4M3  # largest value with a global scale of 1
_TINY = 1e-30  # instead of the scale of a tensor of zeros

Loop = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Exported:
    """Tensors and configs of a quantized layer or head."""

    tensors: dict[str, Tensor]
    quantization: dict[str, Any]  # of hf_quant_config.json
    producer: dict[str, Any]


def quantize(
    model: PreTrainedModel, recipe: Recipe, loop: Loop, log: Path, *, keeps_norms: bool = False
) -> Exported:
    """Quantize the model's layers; the model is unusable afterwards.

    Args:
        model: of one layer, or of a head without layers.
        recipe: the scheme; of the head for a model without layers.
        loop: runs the calibration text through the model; AWQ calls it twice.
        log: a file that receives ModelOpt's output.
        keeps_norms: fold no smoothing into norms, which float layers also follow.

    Raises:
        EdgeLLMError: activations are not finite.
        LimitError: the accelerator's memory does not suffice.
    """
    is_head = len(model.model.layers) == 0
    with (
        log.open("a") as stream,
        quiet(stream),
        torch.no_grad(),
        _nvfp4_everywhere(),
        _no_experts(),
        _no_norms(keeps_norms),
        _unchecked(type(model.config)),
    ):
        try:
            weights = _with_unused_inputs(model) if recipe.scheme.is_awq else {}
            quantized = mtq.quantize(model, _config(recipe, is_head), forward_loop=loop)
            _smooth_used_inputs(quantized, weights)
            with tempfile.TemporaryDirectory(dir=log.parent) as name:
                export_hf_checkpoint(quantized, export_dir=name)
                return _read(Path(name))
        except AssertionError as error:
            raise _explained(error) from None
        except torch.cuda.OutOfMemoryError:
            raise LimitError(
                "the GPU has too little memory", hint="give a smaller --batch_tokens"
            ) from None


def hf_config(described: Mapping[str, Any]) -> dict[str, Any]:
    """Convert hf_quant_config.json to the `quantization_config` of config.json.

    As in ModelOpt's export; transformers and vLLM choose a reader by `quant_method`.
    """
    return {**convert_hf_quant_config_format(dict(described)), "quant_method": "modelopt"}


def _config(recipe: Recipe, is_head: bool) -> dict[str, Any]:
    config = copy.deepcopy(getattr(mtq, recipe.scheme.config))
    entries = config["quant_cfg"]
    weight = next(e for e in entries if e["quantizer_name"] == "*weight_quantizer")
    if recipe.scheme.is_int4:
        weight["cfg"]["block_sizes"][-1] = recipe.block_size
    if recipe.scheme.is_awq:
        config["algorithm"] = {"method": "awq_lite", "alpha_step": recipe.alpha_step}
    if is_head:
        config["quant_cfg"] = [e for e in entries if "lm_head" not in e["quantizer_name"]]
    elif config_name := KV_SCHEMES.get(recipe.kv_cache or ""):
        entries += copy.deepcopy(getattr(mtq, config_name)["quant_cfg"])
    return config


def _read(folder: Path) -> Exported:
    source = Safetensors([folder / "model.safetensors"])
    described = json.loads((folder / "hf_quant_config.json").read_text("utf-8"))
    found = read_below(source, "")
    # transformers prefixes tensors: Qwen3.5 "language_model", Nemotron-H "backbone".
    named = {
        own_name(name.replace(".language_model.", ".", 1)): value for name, value in found.items()
    }
    return Exported(named, described["quantization"], described["producer"])


def _explained(error: AssertionError) -> Exception:
    """Return an explained error for ModelOpt's "detected nan values in amax"."""
    if "nan values" in str(error) or "inf values" in str(error):
        return EdgeLLMError(
            "the model's activations are not finite over the calibration text",
            hint="check the output of the float checkpoint; try other calibration text",
        )
    return error


def _with_unused_inputs(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of weights [out, in] that have columns of zeros and others, by module."""
    return {
        name: module.weight.detach().clone()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and 0 < int(module.weight.ne(0).any(0).sum()) < module.in_features
    }


def _smooth_used_inputs(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Choose AWQ's scales again where a weight has columns of zeros.

    ModelOpt gives such a column its largest scale, by which it normalizes the others. The export
    averages the scales of layers with a common input, such as gate and up, so that the column
    would take all the range of a layer that uses it.
    """
    modules = dict(model.named_modules())
    for name, weight in weights.items():
        module = cast(Any, modules[name])
        found = getattr(getattr(module, "input_quantizer", None), "_pre_quant_scale", None)
        if found is None:
            continue
        is_used = weight.ne(0).any(0)
        used = found.float().reshape(-1)[is_used]
        scales = torch.ones_like(is_used, dtype=torch.float32)
        scales[is_used] = used / (used.max() * used.min()).sqrt()
        module.weight.data.copy_(weight)
        del module.input_quantizer._pre_quant_scale
        model_calib.apply_pre_quant_scale_and_smooth(module, scales)


@contextlib.contextmanager
def quiet(stream: Any) -> Iterator[None]:
    """Redirect a quantizer's output to `stream`, and ignore its warnings."""
    with (
        contextlib.redirect_stdout(stream),
        contextlib.redirect_stderr(stream),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _no_experts() -> Iterator[None]:
    """Disable the export's search for experts: it rejects those of `quantize.models`."""
    module = cast(Any, unified_export_hf)
    theirs, module.is_moe = module.is_moe, lambda _: False
    try:
        yield
    finally:
        module.is_moe = theirs


@contextlib.contextmanager
def _no_norms(keeps: bool) -> Iterator[None]:
    """Disable the export's search for norms if `keeps`."""
    module = cast(Any, unified_export_hf)
    theirs = module.is_layernorm
    if keeps:
        module.is_layernorm = lambda _: False
    try:
        yield
    finally:
        module.is_layernorm = theirs


@contextlib.contextmanager
def _unchecked(config: Any) -> Iterator[None]:
    """Save configs of one layer, which a class of configs may reject."""
    theirs = config.validate
    config.validate = lambda _: None
    try:
        yield
    finally:
        config.validate = theirs


@contextlib.contextmanager
def _nvfp4_everywhere() -> Iterator[None]:
    """Enable NVFP4's fake quantization on CPUs, for which ModelOpt has no kernel."""
    module = cast(Any, tensor_quant)
    theirs = module.dynamic_block_quantize_op

    def either(inputs: torch.Tensor, block_size: int, amax: torch.Tensor, *rest: Any) -> Any:
        if inputs.is_cuda:
            return theirs(inputs, block_size, amax, *rest)
        assert block_size == NVFP4_BLOCK
        largest = amax.float().amax()
        return round_nvfp4(inputs, torch.clamp(largest / _NVFP4_RANGE, min=_TINY))

    module.dynamic_block_quantize_op = either
    try:
        yield
    finally:
        module.dynamic_block_quantize_op = theirs
