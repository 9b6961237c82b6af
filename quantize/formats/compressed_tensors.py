"""The compressed-tensors layout, which vLLM and llm-compressor read.

Source: compressed-tensors 0.17 (`QuantizationScheme`, its presets, and `compressors`). Quantized
values equal those of ModelOpt's layout; packing, tensor names and the config differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from edgellm.export.checkpoints.checkpoint import TensorInfo
from edgellm.quantize.formats.modelopt import (
    KEY_SCALE,
    SMOOTHING,
    VALUE_SCALE,
    unpack_int4_codes,
)
from edgellm.quantize.formats.schemes import COMPRESSED_TENSORS, Scheme
from edgellm.quantize.formats.tensors import Tensor

NAME = COMPRESSED_TENSORS
_FORMAT = {"fp8": "float-quantized", "int8_sq": "int-quantized", "nvfp4": "nvfp4-pack-quantized"}
_PACKED = "pack-quantized"
_WEIGHT, _SCALE = ".weight", ".weight_scale"


def run_scheme(scheme: Scheme) -> Scheme:
    """Return the scheme as readers of this format compute it: INT8 inputs have scales by token."""
    if scheme.name != "int8_sq":
        return scheme
    return replace(scheme, rounds_input=False, rounds_tokens=True)


def without_input_scales(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drop the input scales of INT8 layers, whose inputs get scales at run time."""
    int8 = {
        name.removesuffix(_WEIGHT) for name, tensor in tensors.items() if tensor.info.dtype == "I8"
    }
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name.removesuffix(".input_scale") not in int8
    }


def pack(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a layer without smoothing from ModelOpt's layout; other tensors stay."""
    assert not any(name.endswith(SMOOTHING) for name in tensors)
    found = dict(tensors)
    for name in [name.removesuffix(_SCALE) for name in tensors if name.endswith(_SCALE)]:
        parts = {
            part: found.pop(f"{name}.{part}")
            for part in ("weight", "weight_scale", "weight_scale_2", "input_scale")
            if f"{name}.{part}" in found
        }
        found |= {f"{name}.{part}": tensor for part, tensor in _packed(parts).items()}
    for scale in (KEY_SCALE, VALUE_SCALE):
        for name in [name for name in found if name.endswith(f".{scale}")]:
            short = scale.rpartition(".")[2]
            found[name.removesuffix(scale) + short] = _reshaped(found.pop(name), (1,))
    return found


def _packed(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    weight, scale = parts["weight"], parts["weight_scale"]
    if weight.info.dtype in ("I8", "F8_E4M3"):
        shape = (1,) if weight.info.dtype == "F8_E4M3" else (weight.info.shape[0], 1)
        found = {"weight": weight, "weight_scale": _reshaped(scale, shape)}
        if "input_scale" in parts:
            found["input_scale"] = _reshaped(parts["input_scale"], (1,))
        return found
    if scale.info.dtype == "F8_E4M3":
        return {
            "weight_packed": weight,
            "weight_scale": scale,
            "weight_global_scale": _reciprocal(parts["weight_scale_2"]),
            "input_global_scale": _reciprocal(parts["input_scale"]),
        }
    codes = unpack_int4_codes(weight.bits())
    words = (codes + np.int8(8)).astype(np.uint32).reshape(len(codes), -1, 8)
    packed = (words << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    return {
        "weight_packed": Tensor(TensorInfo("I32", packed.shape), packed.tobytes()),
        "weight_scale": scale,
        "weight_shape": Tensor(TensorInfo("I64", (2,)), np.array(codes.shape, np.int64).tobytes()),
    }


def _reshaped(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return Tensor(TensorInfo(tensor.info.dtype, shape), tensor.data)


def _reciprocal(tensor: Tensor) -> Tensor:
    value = 1 / tensor.floats().astype(np.float64).reshape(1)
    return Tensor(TensorInfo("F32", (1,)), value.astype(np.float32).tobytes())


def describe(
    scheme: Scheme, block_size: int, excluded: Iterable[str], cache: str | None
) -> dict[str, Any]:
    """Return the `quantization_config` of config.json.

    Args:
        scheme: of the linear layers.
        block_size: of INT4.
        excluded: float modules; a trailing star matches all names with that prefix.
        cache: "fp8" if KV cache scales are stored.
    """
    kind = _FORMAT.get(scheme.name, _PACKED)
    weights, inputs = _arguments(scheme, block_size)
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": kind,
    }
    tensor = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    return {
        "quant_method": NAME,
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [_pattern(name) for name in excluded],
        "kv_cache_scheme": None if cache is None else {**tensor, "dynamic": False},
    }


def _arguments(scheme: Scheme, block_size: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the arguments of weights and of quantized inputs."""
    stays = {"symmetric": True, "dynamic": False}
    if scheme.name == "fp8":
        tensor = {"num_bits": 8, "type": "float", "strategy": "tensor", **stays}
        return tensor, dict(tensor)
    if scheme.name == "int8_sq":
        integer = {"num_bits": 8, "type": "int", "symmetric": True}
        return (
            {**integer, "strategy": "channel", "dynamic": False},
            {**integer, "strategy": "token", "dynamic": True},
        )
    if scheme.is_nvfp4:
        blocks = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "symmetric": True}
        blocks |= {"group_size": 16, "dynamic": False}
        return blocks, {**blocks, "dynamic": "local"}
    groups = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": block_size}
    return {**groups, **stays}, None


def _pattern(name: str) -> str:
    if not name.endswith("*"):
        return name
    return f"re:{re.escape(name.removesuffix('*'))}.*"
