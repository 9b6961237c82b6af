"""Calibrated ranges of keys and values from a checkpoint's KV cache scales."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from edgellm.core.errors import BrokenArtifactError
from edgellm.core.model_spec import CacheRanges
from edgellm.export.checkpoints.weights import Weights

# The largest code of each type, for the end of the range.
_LARGEST = {"fp8": 448.0, "int8": 127.0}
_BLOCKS = ("self_attn", "mixer")  # names of attention in layers
# nvidia-modelopt's names, then those of compressed-tensors.
_NAMES = {"key": ("k_proj.k_scale", "k_scale"), "value": ("v_proj.v_scale", "v_scale")}


def read_ranges(weights: Weights, layers: Sequence[int]) -> CacheRanges | None:
    """Ranges from the checkpoint's scales; None without scales.

    Args:
        weights: of the whole checkpoint; the scales count as taken.
        layers: exported attention layers.

    Raises:
        BrokenArtifactError: scales for some layers only, or that are not positive numbers.
    """
    kind = _kind(weights.quantization)
    found: dict[str, list[float]] = {"key": [], "value": []}
    missing = ""
    for layer in layers:
        own = weights / f"model.layers.{layer}"
        for part, names in _NAMES.items():
            places = [f"{block}.{name}" for block in _BLOCKS for name in names]
            name = next((name for name in places if own.info(name) is not None), None)
            if name is None:
                missing = missing or f"{own.prefix}{places[0]}"
            else:
                found[part].append(_scale(own, name) * _LARGEST[kind])
    if not any(found.values()):
        return None
    if missing:
        raise BrokenArtifactError(
            f"{missing} is missing, though other layers have scales of their cache",
            hint="fetch the checkpoint again, or quantize it again",
        )
    return CacheRanges(kind, tuple(found["key"]), tuple(found["value"]))


def _kind(quantization: Mapping[str, Any]) -> str:
    """Type of the cache; FP8 if the config does not state it, as in other readers."""
    scheme = quantization.get("kv_cache_scheme")
    named = str(quantization.get("kv_cache_quant_algo") or "").lower()
    if named == "int8" or (isinstance(scheme, dict) and scheme.get("type") == "int"):
        return "int8"
    return "fp8"


def _scale(layer: Weights, name: str) -> float:
    info = layer.info(name)
    assert info is not None
    values = layer.array(name, info.shape, info.dtype)()
    value = float(values.reshape(-1)[0]) if values.size == 1 else math.nan
    if not 0 < value < math.inf:
        raise BrokenArtifactError(
            f"{layer.prefix}{name} is not a positive number",
            hint="each layer needs one scale of its keys and one of its values",
        )
    return value
