"""Quantized linear layers of an exported checkpoint, dequantized and checked.

All figures of a report are measured on these weights. The reader shares no code with ModelOpt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from edgellm.core.errors import BrokenArtifactError
from edgellm.quantize.formats.modelopt import F32, NVFP4_BLOCK, unpack_int4, unpack_nvfp4
from edgellm.quantize.formats.tensors import FLOATS, Tensor

_AGAIN = "this is a bug of the quantizer: report it, and try another --quantization"
PARTS = ("weight", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedLinear:
    """`y = weight @ round(x * pre_quant_scale)`."""

    weight: F32  # [out, in]
    pre_quant_scale: F32 | None  # [in]
    input_type: str  # "", "fp8", "int8", "int8_tokens" or "nvfp4"
    input_scale: float  # of a rounded input
    bits: float  # of a stored weight, scales included


def decode_linear(
    tensors: Mapping[str, Tensor], name: str, shape: tuple[int, int], rounds_input: bool
) -> DecodedLinear:
    """Dequantize and check the layer `name` [out, in].

    Args:
        tensors: of the checkpoint, by name.
        name: of the layer, for example "model.layers.0.mlp.up_proj".
        shape: of the float layer.
        rounds_input: whether the scheme needs a calibrated input scale.

    Raises:
        BrokenArtifactError: the layer is not quantized, or its tensors are invalid.
    """
    parts = {part: tensors[f"{name}.{part}"] for part in PARTS if f"{name}.{part}" in tensors}
    if "weight_scale" not in parts or parts["weight"].info.dtype in FLOATS:
        raise BrokenArtifactError(f"{name} was not quantized", hint=_AGAIN)
    is_int4 = parts["weight"].info.dtype == "U8" and parts["weight_scale"].info.dtype in FLOATS
    for part, tensor in parts.items():
        _check_numbers(f"{name}.{part}", tensor, has_signs=is_int4 and part == "weight_scale")
    if rounds_input and "input_scale" not in parts:
        raise BrokenArtifactError(f"{name}.input_scale is missing: not calibrated", hint=_AGAIN)
    weight, kind = _weight(parts, shape)
    if weight.shape != shape:
        raise BrokenArtifactError(f"{name} has shape {weight.shape} instead of {shape}")
    if not np.isfinite(weight).all():
        raise BrokenArtifactError(f"{name}.weight holds values that are not numbers", hint=_AGAIN)
    scale = parts.get("input_scale")
    smooth = parts.get("pre_quant_scale")
    stored = sum(tensor.info.num_bytes for tensor in parts.values())
    return DecodedLinear(
        weight=weight,
        pre_quant_scale=None if smooth is None else smooth.floats(),
        input_type=kind if scale is not None else "",
        input_scale=1.0 if scale is None else float(scale.floats().reshape(-1)[0]),
        bits=8 * stored / weight.size,
    )


def _weight(parts: Mapping[str, Tensor], shape: tuple[int, int]) -> tuple[F32, str]:
    """Return the dequantized weight, and the type of its inputs."""
    weight, scale = parts["weight"], parts["weight_scale"].floats()
    if weight.info.dtype == "F8_E4M3":
        return weight.floats() * _per_row(scale), "fp8"
    if weight.info.dtype == "I8":
        return weight.floats() * _per_row(scale), "int8"
    if parts["weight_scale"].info.dtype == "F8_E4M3" and shape[1] % NVFP4_BLOCK == 0:
        global_scale = np.float32(parts["weight_scale_2"].floats().reshape(-1)[0])
        return unpack_nvfp4(weight.bits(), scale, global_scale), "nvfp4"
    return unpack_int4(weight.bits(), scale), ""


def _per_row(scale: F32) -> F32:
    return scale.reshape(-1, 1) if scale.size > 1 else scale.reshape(1, 1)


def _check_numbers(name: str, tensor: Tensor, *, has_signs: bool) -> None:
    """Raise `BrokenArtifactError` unless values are finite, and scales positive (signed: not 0)."""
    if tensor.info.dtype in ("U8", "I8"):
        return
    values = tensor.floats()
    if not np.isfinite(values).all():
        raise BrokenArtifactError(f"{name} holds values that are not numbers", hint=_AGAIN)
    if has_signs and (values != 0).all():
        return
    if not name.endswith(".weight") and not (values > 0).all():
        raise BrokenArtifactError(f"{name} is not positive everywhere", hint=_AGAIN)
