"""Rotary position embeddings: inverse frequencies by config.

Sources: RoFormer (arXiv 2104.09864), linear interpolation (2306.15595), YaRN (2309.00071), the
frequency rule of Llama 3.1, M-RoPE (2409.12191), whose pairs use the time, row or column of a
token, and its interleaved form in Qwen3-VL. Computed in float32 as in transformers, for equal
angles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.config.reader import ConfigReader, is_beyond

F32 = NDArray[np.float32]


Parameters = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Rope:
    """Angle of pair i at position p is `p * inv_freq[i]`; cos and sin are multiplied by `scale`."""

    inv_freq: F32  # [R / 2], R rotary dimensions of a head
    scale: float = 1.0
    axes: tuple[int, ...] = ()  # of M-RoPE: which position each pair turns by, 0, 1 or 2
    interleaved: bool = False  # a number turns with its neighbour, not with the one R / 2 after
    # What turns instead when the cache has room for more positions than `original`.
    long_inv_freq: F32 | None = None
    original: int = 0


Rule = Callable[[F32, float, Parameters], Rope]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeTraits:
    """RoPE facts of an architecture, independent of its config."""

    theta: float = 1e4  # default
    partial: float | None = None  # default of partial_rotary_factor, if the config may have it
    interleaved: bool = False
    others: tuple[str, ...] = ()  # parameters that the architecture reads itself
    rules: Mapping[str, Rule] | None = None  # by type; None: `RULES`


PLAIN_ROPE = RopeTraits()


def read_rope(
    reader: ConfigReader, head_dim: int, max_positions: int, traits: RopeTraits = PLAIN_ROPE
) -> Rope:
    """The rope of a config, in the layout of transformers 4 or 5.

    Raises:
        UnsupportedModelError: the scaling is unknown or depends on the prompt's length.
    """
    parameters = read_parameters(reader)
    theta = reader.read("rope_theta", float, traits.theta)
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = theta
    return rope_of(reader, parameters, head_dim, max_positions, traits)


def read_ropes(
    reader: ConfigReader,
    thetas: Mapping[str, float],
    head_dim: int | Mapping[str, int],
    max_positions: int,
    traits: RopeTraits = PLAIN_ROPE,
) -> dict[str, Rope]:
    """A rope for each type of layer, in the layout of transformers 4 or 5.

    In version 4, `rope_scaling` and `rope_theta` are those of the first type.

    Args:
        reader: of config.json.
        thetas: defaults by type.
        head_dim: D, or by type.
        max_positions: of the config.
        traits: of the architecture.
    """
    first = next(iter(thetas))
    nested = reader.optional("rope_parameters", dict)
    theta, scaling = reader.optional("rope_theta", float), reader.optional("rope_scaling", dict)
    if nested is not None and (theta is not None or scaling is not None):
        raise UnsupportedModelError("config.json has rope_parameters and what it was called before")
    if nested is None:
        _reject_old_type(scaling or {})
        nested = {first: {**(scaling or {}), "rope_theta": theta}}
    if unknown := nested.keys() - thetas.keys():
        raise UnsupportedModelError(
            f"config.json: rope_parameters of {', '.join(sorted(unknown))} are not understood",
            hint=f"types of layers: {', '.join(thetas)}",
        )
    found = {}
    for kind, default in thetas.items():
        parameters = dict(ConfigReader(nested).optional(kind, dict) or {})
        if parameters.get("rope_theta") is None:
            parameters["rope_theta"] = default
        if not parameters.get("truncate", True):
            raise UnsupportedModelError(
                f"config.json: the rope of {kind} has truncate = {parameters['truncate']!r}, "
                "which transformers ignores there",
                hint="leave truncate out",
            )
        # Transformers reads the original length of these ropes inside them alone.
        size = head_dim if isinstance(head_dim, int) else head_dim[kind]
        found[kind] = rope_of(reader, parameters, size, max_positions, traits, has_outer=False)
    return found


def _reject_old_type(scaling: Parameters) -> None:
    """Transformers takes a scaling without `rope_type` for the default one in such models."""
    if scaling.get("type") not in (None, "default") and scaling.get("rope_type") is None:
        raise UnsupportedModelError(
            "config.json: rope_scaling has type without rope_type, which transformers ignores here",
            hint='name it "rope_type", or leave rope_scaling out',
        )


def read_parameters(reader: ConfigReader) -> Parameters:
    """`rope_parameters`, or `rope_scaling` as it was called before; {} where there is neither."""
    new, old = (reader.optional(key, dict) for key in ("rope_parameters", "rope_scaling"))
    if None not in (new, old):
        raise UnsupportedModelError("config.json has both rope_parameters and rope_scaling")
    return dict(new or old or {})


def rope_of(
    reader: ConfigReader,
    parameters: Parameters,
    head_dim: int,
    max_positions: int,
    traits: RopeTraits = PLAIN_ROPE,
    *,
    has_outer: bool = True,
) -> Rope:
    """A rope by its parameters, which are used up; see `read_rope`.

    `has_outer`: the config's own `original_max_position_embeddings` comes first.
    """
    reader.expect("rope_interleaved", False)
    theta = _number(parameters, "rope_theta")
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    if kind == "proportional":  # all pairs of a head rotate, some of them by no angle
        parameters["proportion"] = parameters.pop("partial_rotary_factor", None)
    pairs = _num_rotary_pairs(reader, parameters, head_dim, traits)
    axes = _axes(parameters, pairs)
    kind = "default" if axes and kind == "mrope" else kind
    rules = RULES if traits.rules is None else traits.rules
    if not isinstance(kind, str) or kind not in rules:
        raise UnsupportedModelError(
            f"config.json: rope type {kind!r} is not supported",
            hint=f"supported: {', '.join(rules)}",
        )
    outer = reader.optional("original_max_position_embeddings", int) if has_outer else None
    inner = parameters.get("original_max_position_embeddings")
    original = next(each for each in (outer, inner, max_positions) if each is not None)
    parameters["original_max_position_embeddings"] = original
    parameters["max_position_embeddings"] = max_positions
    try:
        rope = rules[kind](_plain(theta, 2 * pairs), theta, parameters)
    except KeyError as error:
        raise UnsupportedModelError(f"config.json: rope type {kind} needs {error}") from None
    except (ArithmeticError, ValueError):
        raise _no_angles() from None
    for read in ("original_max_position_embeddings", "max_position_embeddings", *traits.others):
        parameters.pop(read, None)
    if left := {key for key, value in parameters.items() if value is not None}:
        raise UnsupportedModelError(
            f"config.json: rope parameters not understood: {', '.join(sorted(left))}"
        )
    frequencies = [each for each in (rope.inv_freq, rope.long_inv_freq) if each is not None]
    if not all(np.isfinite(each).all() for each in frequencies) or not 0 < rope.scale < math.inf:
        raise _no_angles()
    return replace(rope, axes=axes, interleaved=traits.interleaved)


def _no_angles() -> UnsupportedModelError:
    return UnsupportedModelError("config.json: these rope parameters give no finite angles")


def _number(parameters: Parameters, key: str, default: float | None = None) -> float:
    """Pop a positive number from the parameters.

    Raises:
        KeyError: missing without a default.
    """
    value = parameters.pop(key) if default is None else parameters.pop(key, None)
    value = default if value is None else value
    if value is None:
        raise KeyError(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise UnsupportedModelError(f"config.json: {key} = {value!r} must be positive")
    if is_beyond(value):
        raise UnsupportedModelError(f"config.json: {key} is no finite number of 64 bits")
    return float(value)


def _num_rotary_pairs(
    reader: ConfigReader, parameters: Parameters, head_dim: int, traits: RopeTraits
) -> int:
    """Number of RoPE pairs, in the first dimensions of a head."""
    outer = reader.optional("partial_rotary_factor", float)
    inner = parameters.pop("partial_rotary_factor", None)
    given = next((part for part in (inner, outer, traits.partial) if part is not None), 1.0)
    if traits.partial is None and given != 1:
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor = {given!r} is not supported here"
        )
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given <= 1:
        raise UnsupportedModelError(f"config.json: partial_rotary_factor = {given!r}")
    rotary_dim = int(head_dim * given)
    if rotary_dim < 2 or rotary_dim % 2:
        raise UnsupportedModelError(
            f"config.json: {rotary_dim} of the {head_dim} numbers of a head would turn",
            hint="an even number of them, at least 2, can",
        )
    return rotary_dim // 2


def _axes(parameters: Parameters, pairs: int) -> tuple[int, ...]:
    """The axis of each pair, () for plain positions; pops M-RoPE's keys."""
    sections = parameters.pop("mrope_section", None)
    interleaved = parameters.pop("mrope_interleaved", False)
    if sections is None:
        return ()
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


def _default(plain: F32, theta: float, parameters: Parameters) -> Rope:
    del theta, parameters
    return Rope(inv_freq=plain)


def proportional(plain: F32, theta: float, parameters: Parameters) -> Rope:
    """Frequencies of the first pairs of a head, 0 for the rest: Gemma 4's global layers."""
    del theta
    factor = _number(parameters, "factor", 1.0)
    share = _number(parameters, "proportion", 1.0)
    rotating = int(share * 2 * len(plain) // 2)
    if not 0 < rotating <= len(plain):
        raise UnsupportedModelError(f"config.json: partial_rotary_factor = {share!r}")
    inv_freq = np.where(np.arange(len(plain)) < rotating, plain, 0) / np.float32(factor)
    return Rope(inv_freq=inv_freq.astype(np.float32))


def _linear(plain: F32, theta: float, parameters: Parameters) -> Rope:
    del theta
    return Rope(inv_freq=(plain / np.float32(_number(parameters, "factor"))).astype(np.float32))


def _factors(plain: F32, theta: float, parameters: Parameters) -> Rope:
    """Explicit divisors per frequency, as in GGUF files (`rope_freqs.weight`).

    `scaling` names the rule for the divided frequencies, with its parameters.
    """
    divided = (plain / _divisors(parameters, "factors", len(plain))).astype(np.float32)
    return RULES[parameters.pop("scaling", "default")](divided, theta, parameters)


def _divisors(parameters: Parameters, key: str, pairs: int) -> F32:
    """A list with a positive number for each pair."""
    found = parameters.pop(key)
    is_list = isinstance(found, list) and len(found) == pairs
    if not is_list or not all(isinstance(each, (int, float)) and each > 0 for each in found):
        raise UnsupportedModelError(
            f"config.json: {key} of the rope is no list of {pairs} positive numbers"
        )
    return np.asarray(found, np.float32)


def _dynamic(plain: F32, theta: float, parameters: Parameters) -> Rope:
    """Plain frequencies: they change beyond max_position_embeddings, where engines end."""
    del theta
    _number(parameters, "factor")
    return Rope(inv_freq=plain)


def _longrope(plain: F32, theta: float, parameters: Parameters) -> Rope:
    """Short factors if the cache's capacity is the original length at most, else long ones.

    Transformers switches all positions when a text becomes longer, cached ones included; llama.cpp
    and vLLM decide by capacity.
    """
    del theta
    original = int(_number(parameters, "original_max_position_embeddings"))
    longest = parameters["max_position_embeddings"]
    long, short = (
        (plain / _divisors(parameters, key, len(plain))).astype(np.float32)
        for key in ("long_factor", "short_factor")
    )
    factor = _number(parameters, "factor", longest / original)
    stretched = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    scale = _number(parameters, "attention_factor", stretched)
    return Rope(inv_freq=short, scale=scale, long_inv_freq=long, original=original)


def ntk_alpha(plain: F32, theta: float, parameters: Parameters) -> Rope:
    """A base scaled by `alpha`: Hunyuan's "dynamic" type, which is constant."""
    for unread in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        parameters.pop(unread, None)
    dim = 2 * len(plain)
    stretched = theta * _number(parameters, "alpha") ** (dim / (dim - 2))
    return Rope(inv_freq=_plain(stretched, dim))


def _llama3(plain: F32, theta: float, parameters: Parameters) -> Rope:
    del theta
    factor, original = (
        _number(parameters, key) for key in ("factor", "original_max_position_embeddings")
    )
    low, high = (_number(parameters, key) for key in ("low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise UnsupportedModelError("config.json: high_freq_factor must be above low_freq_factor")
    wavelength = 2 * np.pi / plain
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    scaled = (1 - smooth) * plain / factor + smooth * plain
    return Rope(inv_freq=scaled.astype(np.float32))


def _yarn(plain: F32, theta: float, parameters: Parameters) -> Rope:
    factor, original = (
        _number(parameters, key) for key in ("factor", "original_max_position_embeddings")
    )
    fast, slow = _number(parameters, "beta_fast", 32), _number(parameters, "beta_slow", 1)
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
    return Rope(inv_freq=mixed.astype(np.float32), scale=_yarn_scale(factor, parameters))


def _yarn_scale(factor: float, parameters: Parameters) -> float:
    weights = [
        _number(parameters, key) if parameters.get(key) else parameters.pop(key, None)
        for key in ("mscale", "mscale_all_dim")
    ]

    def attention(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    plain = attention(1.0)
    if weights[0] and weights[1]:
        plain = attention(weights[0]) / attention(weights[1])
    return _number(parameters, "attention_factor", plain)


RULES: Mapping[str, Rule] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "factors": _factors,
}
# Gemma 4 and LFM3
PROPORTIONAL_ROPE = RopeTraits(rules={**RULES, "proportional": proportional})
