"""Quantized KV caches: calibration of scales, and attention over quantized keys and values."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from edgellm.export.checkpoints.checkpoint import TensorInfo
from edgellm.quantize.formats.activation_rounding import round_fp8, round_int8
from edgellm.quantize.formats.modelopt import KEY_SCALE, LARGEST_E4M3, VALUE_SCALE
from edgellm.quantize.formats.tensors import Tensor
from edgellm.quantize.models.one_layer_model import run_layer

_IMPLEMENTATIONS = ("sdpa", "eager")
_ROUND = {"fp8": round_fp8, "int8": round_int8}
_LARGEST = {"fp8": LARGEST_E4M3, "int8": 127}

Change = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def cache_scales(
    model: PreTrainedModel, batches: Iterable[torch.Tensor], kind: str
) -> dict[str, Tensor]:
    """Calibrate KV cache scales of the model's layer; return them by name.

    Args:
        model: a float model of one layer.
        batches: hidden states [B, S, H] that enter it.
        kind: "int8" or "fp8".
    """
    largest = [0.0, 0.0]

    def record(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for index, states in enumerate((key, value)):
            largest[index] = max(largest[index], float(states.abs().max()))
        return key, value

    with _changed_states(record):
        for batch in batches:
            run_layer(model, batch)
    found = {}
    for name, size in zip((KEY_SCALE, VALUE_SCALE), largest, strict=True):
        scale = np.array(max(size, 1e-6) / _LARGEST[kind], np.float32)
        found[name] = Tensor(TensorInfo("F32", ()), scale.tobytes())
    return found


@contextlib.contextmanager
def rounded_cache(kind: str | None, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Make attention use keys and values quantized as `kind`; None: float."""
    names = [
        next((name for name in tensors if name.endswith(f".{scale}")), None)
        for scale in (KEY_SCALE, VALUE_SCALE)
    ]
    if kind is None or None in names:
        yield
        return
    scales = [float(tensors[name].floats().reshape(())) for name in names if name is not None]
    rounding = _ROUND[kind]
    with _changed_states(lambda key, value: (rounding(key, scales[0]), rounding(value, scales[1]))):
        yield


@contextlib.contextmanager
def _changed_states(change: Change) -> Iterator[None]:
    """Change the inputs of transformers' attention, keys [B, heads, S, D] after RoPE."""
    before = {kind: ALL_ATTENTION_FUNCTIONS.get(kind) for kind in _IMPLEMENTATIONS}

    def changing(kind: str) -> Callable[..., Any]:
        def changed(
            module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
            *args: Any, **kwargs: Any,
        ) -> Any:  # fmt: skip
            # "eager" is in no table: each family's module has its own function.
            plain = before[kind] or sys.modules[type(module).__module__].eager_attention_forward
            return plain(module, query, *change(key, value), *args, **kwargs)

        return changed

    for kind in before:
        ALL_ATTENTION_FUNCTIONS[kind] = changing(kind)
    try:
        yield
    finally:
        for kind, plain in before.items():
            if plain is None:
                del ALL_ATTENTION_FUNCTIONS[kind]
            else:
                ALL_ATTENTION_FUNCTIONS[kind] = plain
