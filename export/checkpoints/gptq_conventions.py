"""Conventions of integer weights that a checkpoint's config states, and tensors do not show.

Sources: GPTQModel 7.7 (`checkpoint_format`), transformers 5.24 (`format`), auto-round 0.16
(`packing_format`), AutoAWQ 0.2.9 (`zero_point`), compressed-tensors 0.20 (`config_groups`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from edgellm.core.errors import BrokenArtifactError, UnsupportedModelError
from edgellm.export.checkpoints.checkpoint import TensorInfo
from edgellm.export.checkpoints.weights import Weights

# GPTQ's `qzeros` are zero points minus one (v1), or zero points (v2).
_LESS_ONE = ("gptq", "auto", "auto_round:auto_gptq", "auto_round:gptq")
_AS_THEY_ARE = ("gptq_v2", "auto_round", "auto_round:gptqmodel")


def stores_less_one(weights: Weights) -> bool:
    """Whether zero points in GPTQ's layout are stored minus one.

    Raises:
        UnsupportedModelError: the config names another packing.
    """
    config, keys = weights.quantization, ("checkpoint_format", "format")
    if _is_auto_round(config):
        keys = ("packing_format",)
    key = next((key for key in keys if config.get(key) is not None), keys[0])
    said = str(config.get(key) or _LESS_ONE[0]).lower()
    if said not in (*_LESS_ONE, *_AS_THEY_ARE):
        raise UnsupportedModelError(
            f"{weights.prefix}qweight: quantization_config says {key} {said!r}, which is unknown",
            hint=f"supported: {', '.join((*_LESS_ONE, *_AS_THEY_ARE))}",
        )
    return said in _LESS_ONE


def remedy(weights: Weights, *, less_one: bool) -> str:
    """A hint how to declare the other convention of zero points."""
    if _is_auto_round(weights.quantization):
        key, other = "packing_format", f"auto_round:{'gptqmodel' if less_one else 'gptq'}"
    else:
        key, other = "checkpoint_format", "gptq_v2" if less_one else "gptq"
    return f'if they are stored by the other convention, set "{key}": "{other}" there'


def check_zero_points(weights: Weights, zeros: np.ndarray, bits: int, hint: str = "") -> None:
    """Check the zero points of a layer against the symmetry that the config states.

    Without such a statement, zero points that are all one off the middle are rejected: they show
    that the file uses another convention than its config states.

    Args:
        weights: of the layer.
        zeros: decoded zero points, unsigned.
        bits: of a weight.
        hint: for zero points that are one off.

    Raises:
        UnsupportedModelError: zero points contradict the config.
    """
    middle, first = 1 << (bits - 1), int(zeros.flat[0])
    said = _stated_symmetry(weights.quantization)
    if said is False or bool((zeros == middle).all()):
        return
    is_shifted = abs(first - middle) == 1 and bool((zeros == first).all())
    if said is None and not is_shifted:
        return
    stated = "says symmetric" if said else "does not say asymmetric"
    found = f"are {first}" if is_shifted else f"go from {zeros.min()} to {zeros.max()}"
    raise UnsupportedModelError(
        f"{weights.prefix.rstrip('.')}: the quantization config {stated}, but zero points {found}, "
        f"not {middle}",
        hint=(is_shifted and hint) or 'if the zero points are right, set "sym": false there',
    )


def num_groups(weights: Weights, width: int, scales: TensorInfo, axis: int) -> int:
    """The groups of a row of `width` inputs, by the shape of its scales.

    A last group that is smaller than the others is rejected, since shapes alone do not show it.

    Raises:
        BrokenArtifactError: the scales are no matrix, or their groups do not divide `width`.
        UnsupportedModelError: the stated group size does not divide `width`.
    """
    groups = scales.shape[axis] if len(scales.shape) == 2 else 0
    if groups < 1:
        raise BrokenArtifactError(
            f"{weights.prefix.rstrip('.')}: scales of shape {list(scales.shape)} are no matrix of "
            "groups and outputs"
        )
    for args in _statements(weights.quantization):
        size = args.get("group_size")
        if not isinstance(size, int) or not 0 < size < width:
            continue
        if width % size and -(-width // size) == groups:
            raise UnsupportedModelError(
                f"{weights.prefix.rstrip('.')}: groups of {size} do not divide {width} inputs",
                hint="quantize with a group size that divides all widths, such as 32",
            )
    if width % groups:
        raise BrokenArtifactError(
            f"{weights.prefix.rstrip('.')}: {groups} groups do not divide {width} inputs"
        )
    return groups


def input_order(weights: Weights, name: str, width: int, groups: int) -> np.ndarray | None:
    """The inputs sorted by group, int64 [in]; None if they are in order.

    Args:
        weights: of the layer.
        name: of the tensor [in] with the group of each input (activation order). Negative numbers
            in it are compressed-tensors' mark of an order that is not stored.
        width: number of inputs.
        groups: of equal size.

    Raises:
        BrokenArtifactError: groups that do not exist, or of different sizes.
    """
    info = weights.info(name)
    if info is None:
        return None
    found = weights.array(name, (width,), info.dtype)().astype(np.int64)
    in_order = np.arange(width) // (width // groups)
    if np.array_equal(found, in_order) or (found == -1).all():
        return None
    is_inside = bool(((found >= 0) & (found < groups)).all())
    if not is_inside or not (np.bincount(found, minlength=groups) == width // groups).all():
        raise BrokenArtifactError(f"{weights.prefix}{name}: the groups are of different sizes")
    return np.argsort(found, kind="stable")


def _is_auto_round(config: Mapping[str, Any]) -> bool:
    return "auto-round" in str(config.get("quant_method"))


def _statements(config: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Statements of the config for all weights, and for some by name."""
    found: list[Any] = [config]
    for key in ("extra_config", "dynamic"):
        found += _values(config.get(key))
    for group in _values(config.get("config_groups")):
        found.append(group.get("weights") if isinstance(group, Mapping) else None)
    return [each for each in found if isinstance(each, Mapping)]


def _values(found: Any) -> list[Any]:
    return list(found.values()) if isinstance(found, Mapping) else []


def _stated_symmetry(config: Mapping[str, Any]) -> bool | None:
    """Stated symmetry; None without a statement, or if layers differ."""
    found = {
        bool(each[key])
        for each in _statements(config)
        for key in ("sym", "symmetric")
        if each.get(key) is not None
    }
    if not found and config.get("zero_point") is not None:
        found = {not config["zero_point"]}
    return found.pop() if len(found) == 1 else None
