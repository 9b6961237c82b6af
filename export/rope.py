"""Rotary position embeddings: the inverse frequencies that a config asks for.

Sources: RoFormer (arXiv 2104.09864), linear interpolation (2306.15595), YaRN (2309.00071), the
frequency rule of Llama 3.1, M-RoPE (2409.12191), whose pairs turn by the time, row or column of a
token, and its interleaved form in Qwen3-VL. Computed in float32 as transformers does, so that
angles agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.contract import UnsupportedModelError
from edgellm.export.config import ConfigReader

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Rope:
    """Angle of pair i at position p is `p * inv_freq[i]`; cos and sin are multiplied by `scale`."""

    inv_freq: F32  # [head_dim / 2]
    scale: float = 1.0
    axes: tuple[int, ...] = ()  # of M-RoPE: which position each pair turns by, 0, 1 or 2

    @classmethod
    def read(cls, reader: ConfigReader, head_dim: int, max_positions: int) -> Rope:
        """The rope of a config, in the layout of transformers 4 or 5.

        Raises:
            UnsupportedModelError: a scaling that is unknown or depends on the prompt's length.
        """
        parameters: dict[str, Any] = dict(
            reader.optional("rope_parameters", dict) or reader.optional("rope_scaling", dict) or {}
        )
        if None not in (
            reader.optional("rope_parameters", dict),
            reader.optional("rope_scaling", dict),
        ):
            raise UnsupportedModelError("config.json has both rope_parameters and rope_scaling")
        theta = float(parameters.pop("rope_theta", None) or reader.read("rope_theta", float, 1e4))
        reader.read("rope_theta", float, theta)
        reader.expect("rope_interleaved", False)
        reader.expect("partial_rotary_factor", 1.0)
        kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
        parameters.pop("type", None)
        if parameters.pop("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModelError("config.json: partial rotary embeddings are not supported")
        if theta <= 0 or parameters.get("factor", 1.0) <= 0:
            raise UnsupportedModelError("config.json: rope_theta and factor must be positive")
        axes = _axes(parameters, head_dim)
        kind = "default" if axes and kind == "mrope" else kind
        plain = _plain(theta, head_dim)
        rule = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
        rule["factors"] = _factors
        if kind not in rule:
            raise UnsupportedModelError(
                f"config.json: rope type {kind!r} is not supported",
                hint=f"supported: {', '.join(rule)}",
            )
        parameters.setdefault("original_max_position_embeddings", max_positions)
        try:
            rope = rule[kind](plain, theta, parameters)
        except KeyError as error:
            raise UnsupportedModelError(f"config.json: rope type {kind} needs {error}") from None
        parameters.pop("original_max_position_embeddings", None)
        parameters.pop("max_position_embeddings", None)
        if left := {key for key, value in parameters.items() if value is not None}:
            raise UnsupportedModelError(
                f"config.json: rope parameters not understood: {', '.join(sorted(left))}"
            )
        return replace(rope, axes=axes)


def _axes(parameters: dict[str, Any], head_dim: int) -> tuple[int, ...]:
    """The axis of each pair, () for plain positions; takes M-RoPE's keys out."""
    sections = parameters.pop("mrope_section", None)
    interleaved = parameters.pop("mrope_interleaved", False)
    if sections is None:
        return ()
    pairs = head_dim // 2
    if not isinstance(sections, list) or len(sections) != 3 or sum(sections) != pairs:
        raise UnsupportedModelError(
            f"config.json: mrope_section {sections!r} is not three numbers with the sum {pairs}"
        )
    if not interleaved:
        return tuple(int(axis) for axis in np.repeat(np.arange(3), sections))
    axes = np.zeros(pairs, np.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return tuple(int(axis) for axis in axes)


def _plain(theta: float, head_dim: int) -> F32:
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (np.float32(1) / np.power(np.float32(theta), exponent)).astype(np.float32)


def _default(plain: F32, theta: float, parameters: dict[str, Any]) -> Rope:
    del theta, parameters
    return Rope(plain)


def _linear(plain: F32, theta: float, parameters: dict[str, Any]) -> Rope:
    del theta
    return Rope((plain / parameters.pop("factor")).astype(np.float32))


def _factors(plain: F32, theta: float, parameters: dict[str, Any]) -> Rope:
    """Explicit divisors per frequency, as GGUF files carry them (`rope_freqs.weight`)."""
    del theta
    factors = np.asarray(parameters.pop("factors"), np.float32)
    return Rope((plain / factors).astype(np.float32))


def _llama3(plain: F32, theta: float, parameters: dict[str, Any]) -> Rope:
    del theta
    factor, original = parameters.pop("factor"), parameters["original_max_position_embeddings"]
    low, high = parameters.pop("low_freq_factor"), parameters.pop("high_freq_factor")
    wavelength = 2 * np.pi / plain
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    scaled = (1 - smooth) * plain / factor + smooth * plain
    return Rope(scaled.astype(np.float32))


def _yarn(plain: F32, theta: float, parameters: dict[str, Any]) -> Rope:
    factor, original = parameters.pop("factor"), parameters["original_max_position_embeddings"]
    fast = parameters.pop("beta_fast", None) or 32
    slow = parameters.pop("beta_slow", None) or 1
    truncate = parameters.pop("truncate", True)
    pairs, dim = len(plain), 2 * len(plain)

    def pair_with(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(fast), pair_with(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(pairs) - low) / ((high - low) or 0.001), 0, 1).astype(np.float32)
    mixed = plain / np.float32(factor) * ramp + plain * (1 - ramp)
    return Rope(mixed.astype(np.float32), _yarn_scale(factor, parameters))


def _yarn_scale(factor: float, parameters: dict[str, Any]) -> float:
    explicit = parameters.pop("attention_factor", None)
    mscale, mscale_all = parameters.pop("mscale", None), parameters.pop("mscale_all_dim", None)

    def attention(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if explicit is not None:
        return float(explicit)
    if mscale and mscale_all:
        return attention(mscale) / attention(mscale_all)
    return attention(1.0)
