"""Float weights of a checkpoint for torch, with dequantized layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.checkpoint import Checkpoint, read_whole
from edgellm.quantize.formats.quantized_linear import PARTS, decode_linear
from edgellm.quantize.formats.tensors import read_tensor

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_HEAD, _SCALE = "lm_head.weight", "_scale"


def require_known(checkpoint: Checkpoint) -> None:
    """Raise `UnsupportedModelError` for weights that `float_weights` cannot dequantize."""
    if checkpoint.quant_config and "quant_algo" not in checkpoint.quant_config:
        raise UnsupportedModelError(
            f"{checkpoint.label} is quantized by {checkpoint.quantization}",
            hint="train with its float checkpoint, or one of edgellm-quantize",
        )


def has_own_head(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint has a quantized head, which is not tied to the embedding."""
    return _HEAD + _SCALE in checkpoint.tensors.infos()


def float_weights(
    checkpoint: Checkpoint, shapes: Mapping[str, torch.Size], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return all weights by name.

    Inputs of quantized layers stay floats; smoothing scales are multiplied into the weights.

    Args:
        checkpoint: float, or in ModelOpt's layouts.
        shapes: shapes of the float weights, [out, in].
        dtype: dtype of the result.

    Raises:
        BrokenArtifactError: a quantized layer is damaged, or has another shape.
    """
    infos = checkpoint.tensors.infos()
    layers = [name.removesuffix(_SCALE) for name in infos if name.endswith("weight" + _SCALE)]
    stored = {f"{layer.removesuffix('weight')}{part}" for layer in layers for part in PARTS}
    weights = {
        name: torch.frombuffer(read_whole(checkpoint.tensors, name), dtype=_DTYPES[info.dtype])
        .reshape(info.shape)
        .to(dtype)
        for name, info in infos.items()
        if info.dtype in _DTYPES and name not in stored
    }
    return weights | {
        layer: _dequantize(checkpoint, layer, shapes[layer]).to(dtype)
        for layer in layers if layer in shapes
    }  # fmt: skip


def _dequantize(checkpoint: Checkpoint, layer: str, shape: torch.Size) -> Tensor:
    name = layer.removesuffix(".weight")
    infos = checkpoint.tensors.infos()
    parts = {
        f"{name}.{part}": read_tensor(checkpoint.tensors, f"{name}.{part}")
        for part in PARTS if f"{name}.{part}" in infos
    }  # fmt: skip
    out, width = shape
    found = decode_linear(parts, name, (out, width), rounds_input=False)
    weight = torch.from_numpy(found.weight)
    if found.pre_quant_scale is None:
        return weight
    return weight * torch.from_numpy(found.pre_quant_scale)
