"""AutoRound (arXiv 2309.05516) for one layer, with the package auto-round.

It learns the rounding direction of each weight and the clipping of each block by signed gradient
descent on the layer's output. All uses of the package are in this file.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from edgellm.export.checkpoints.checkpoint import TensorInfo
from edgellm.quantize.algorithms.modelopt import (
    Exported,
    quiet,
)
from edgellm.quantize.formats.modelopt import F32, pack_int4_codes
from edgellm.quantize.formats.schemes import Recipe
from edgellm.quantize.formats.tensors import Tensor
from edgellm.quantize.models.one_layer_model import LAYER, linears, run_layer

_ITERATIONS = {"cpu": 100, "cuda": 200}
# Samples of an iteration; with SmolLM2, two take 0.4 of the time of eight for equal errors
_BATCH = {"cpu": 2, "cuda": 8}
_POSITIVE_SCALES = "int_sym_gptq"  # the default has negative scales, which some readers reject


def is_installed() -> bool:
    """Return whether the package is installed."""
    return importlib.util.find_spec("auto_round") is not None


def autoround(
    model: PreTrainedModel,
    recipe: Recipe,
    states: Iterable[torch.Tensor],
    rounded: Iterable[torch.Tensor],
    log: Path,
) -> Exported:
    """Quantize the layer of `model` to INT4; the model is unusable afterwards.

    Args:
        model: of one layer.
        recipe: names the group size.
        states: hidden states [B, S, H] of the float model that enter the layer.
        rounded: those after quantized layers.
        log: a file that receives the package's output.
    """
    layer = model.model.layers[0]
    assert isinstance(layer, nn.Module)
    inputs = _inputs(model, layer, states)
    entering = [row[None] for batch in rounded for row in batch]
    device = next(layer.parameters()).device
    python, numpy = random.getstate(), np.random.get_state()
    with log.open("a") as stream, quiet(stream), torch.enable_grad(), _short_collections():
        _orchestrator(model, recipe, entering, device).quantize_block(
            layer, inputs, entering, device=str(device), auto_offload=False
        )
    random.setstate(python)
    np.random.set_state(numpy)
    return Exported(_tensors(model, layer), _described(recipe), _producer())


@contextmanager
def _short_collections() -> Iterator[None]:
    """Exclude existing objects from the package's frequent garbage collections."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _inputs(model: PreTrainedModel, layer: nn.Module, states: Iterable[torch.Tensor]) -> list[Any]:
    """Return the layer's arguments for each sample, in the package's form."""
    calls: list[Any] = []

    def record(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        calls.append(((args, kwargs),))

    hook = layer.register_forward_pre_hook(record, with_kwargs=True)
    for batch in states:
        for row in batch:
            run_layer(model, row[None])
    hook.remove()
    return calls


def _orchestrator(
    model: PreTrainedModel, recipe: Recipe, rows: list[torch.Tensor], device: torch.device
) -> Any:
    from auto_round import AutoRound

    logging.getLogger("autoround").setLevel(logging.ERROR)
    return AutoRound(
        model, tokenizer="", scheme="W4A16", data_type=_POSITIVE_SCALES, sym=True,
        group_size=recipe.block_size, iters=_ITERATIONS[device.type], nsamples=len(rows),
        seqlen=rows[0].shape[1], batch_size=_BATCH[device.type], device_map=str(device), amp=False,
        enable_torch_compile=False,
    )  # fmt: skip


def _tensors(model: PreTrainedModel, layer: nn.Module) -> dict[str, Tensor]:
    """Return the layer in ModelOpt's INT4 layout."""
    prefix = LAYER.format(0)
    found = {f"{prefix}{name}": _tensor(value) for name, value in layer.state_dict().items()}
    for name, module in linears(model).items():
        weight = module.weight.detach().float().cpu().numpy()
        scale = torch.as_tensor(module.scale).detach().float().cpu().numpy()
        scale = scale.reshape(len(weight), -1)
        codes = np.rint(weight / np.repeat(scale, weight.shape[1] // scale.shape[1], 1))
        packed = pack_int4_codes(codes.astype(np.int8))
        found[f"{prefix}{name}.weight"] = Tensor(TensorInfo("U8", packed.shape), packed.tobytes())
        found[f"{prefix}{name}.weight_scale"] = _tensor(torch.from_numpy(scale))
    return found


def _tensor(value: torch.Tensor) -> Tensor:
    array: F32 = value.detach().float().cpu().numpy()
    return Tensor(TensorInfo("F32", array.shape), array.tobytes())


def _described(recipe: Recipe) -> dict[str, Any]:
    """Return ModelOpt's description of INT4 without smoothing."""
    return {
        "quant_algo": recipe.scheme.algorithm,
        "kv_cache_quant_algo": None,
        "group_size": recipe.block_size,
        "has_zero_point": False,
        "pre_quant_scale": False,
    }


def _producer() -> dict[str, Any]:
    return {"name": "auto-round", "version": version("auto-round")}
