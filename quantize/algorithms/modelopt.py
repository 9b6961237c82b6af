"""nvidia-modelopt at work on a small model: quantize, export, hand back the tensors.

Everything that depends on ModelOpt's interface is in this file.
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
from edgellm.export.checkpoints.hf import Safetensors
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
    from modelopt.torch.quantization import tensor_quant

_NVFP4_RANGE = LARGEST_E2M1 * LARGEST_E4M3  # what a global scale of one can express
_TINY = 1e-30  # instead of the scale of a tensor of zeros

Loop = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Exported:
    """What `export_hf_checkpoint` wrote."""

    tensors: dict[str, Tensor]
    quantization: dict[str, Any]  # of hf_quant_config.json
    producer: dict[str, Any]


def quantize(
    model: PreTrainedModel, recipe: Recipe, loop: Loop, log: Path, *, keeps_norms: bool = False
) -> Exported:
    """Quantize the model's layers, which it spoils.

    Args:
        model: of one layer, or of none and a head.
        recipe: the scheme; of a model without layers it is the head's.
        loop: feeds the model; AWQ calls it twice.
        log: a file to which ModelOpt's prints are added.
        keeps_norms: smoothing goes into no norm, which more reads than what is quantized.

    Raises:
        EdgeLLMError: activations that are no numbers.
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
    ):
        try:
            quantized = mtq.quantize(model, _config(recipe, is_head), forward_loop=loop)
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
    """What config.json says as `quantization_config`, made from hf_quant_config.json.

    As ModelOpt's export does it; `quant_method` is how transformers and vLLM find a reader.
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
    # Transformers writes Qwen3.5's language model as a part of a whole, Nemotron-H as a backbone.
    named = {
        own_name(name.replace(".language_model.", ".", 1)): value for name, value in found.items()
    }
    return Exported(named, described["quantization"], described["producer"])


def _explained(error: AssertionError) -> Exception:
    """ModelOpt says "detected nan values in amax" and does not say where."""
    if "nan values" in str(error) or "inf values" in str(error):
        return EdgeLLMError(
            "the model computes values that are not numbers over the calibration text",
            hint="check that the float checkpoint answers sensibly; try other calibration text",
        )
    return error


@contextlib.contextmanager
def quiet(stream: Any) -> Iterator[None]:
    """Send what a quantizer prints, and its warnings, elsewhere."""
    with (
        contextlib.redirect_stdout(stream),
        contextlib.redirect_stderr(stream),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _no_experts() -> Iterator[None]:
    """Let the export look for no experts: it does not know those of `quantize.models`."""
    module = cast(Any, unified_export_hf)
    theirs, module.is_moe = module.is_moe, lambda _: False
    try:
        yield
    finally:
        module.is_moe = theirs


@contextlib.contextmanager
def _no_norms(keeps: bool) -> Iterator[None]:
    """Let the export find no norm."""
    module = cast(Any, unified_export_hf)
    theirs = module.is_layernorm
    if keeps:
        module.is_layernorm = lambda _: False
    try:
        yield
    finally:
        module.is_layernorm = theirs


@contextlib.contextmanager
def _nvfp4_everywhere() -> Iterator[None]:
    """Let NVFP4's fake quantization run on CPUs, where ModelOpt has no kernel for it."""
    module = cast(Any, tensor_quant)
    theirs = module.dynamic_block_quantize_op

    def either(inputs: torch.Tensor, block_size: int, amax: torch.Tensor, *rest: Any) -> Any:
        if inputs.is_cuda:
            return theirs(inputs, block_size, amax, *rest)
        assert block_size == NVFP4_BLOCK  # no other block is on offer
        largest = amax.float().amax()
        return round_nvfp4(inputs, torch.clamp(largest / _NVFP4_RANGE, min=_TINY))

    module.dynamic_block_quantize_op = either
    try:
        yield
    finally:
        module.dynamic_block_quantize_op = theirs
