"""Rotation of attention's values (R2 of arXiv 2405.16406): exact, and free at run time.

One orthogonal matrix rotates each head's values in v_proj, and its inverse is folded into o_proj.
The rotation spreads outliers of weights and values over all channels.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.checkpoint import TensorInfo
from edgellm.export.checkpoints.residual_rotation import mixed
from edgellm.quantize.formats.modelopt import F32
from edgellm.quantize.models.families import Family

_OUTPUTS = ("o_proj", "out_proj")
_HINT = "choose --rotate residual, or leave --rotate out"


def check_values(infos: Mapping[str, TensorInfo], layers: tuple[str, ...], family: Family) -> None:
    """Raise `UnsupportedModelError` unless `rotate_values` supports all layers.

    Args:
        infos: of all tensors.
        layers: name prefix of each layer's tensors.
        family: of the model.
    """
    if not family.scales_values:
        raise UnsupportedModelError(
            "--rotate: a norm or a convolution follows the model's v_proj", hint=_HINT
        )
    for layer in layers:
        own = {
            name.removeprefix(layer): info.shape
            for name, info in infos.items()
            if name.startswith(layer)
        }
        _value_pair(own, family)


def rotates_values(
    infos: Mapping[str, TensorInfo], layers: tuple[str, ...], family: Family
) -> bool:
    """Return whether `check_values` passes."""
    try:
        check_values(infos, layers, family)
    except UnsupportedModelError:
        return False
    return True


def _value_pair(shapes: Mapping[str, tuple[int, ...]], family: Family) -> tuple[str, str] | None:
    """Return the names of a layer's v_proj and o_proj; None: the layer has no attention."""
    if not (attention := family.attention_of(shapes)):
        return None
    value = f"{attention}.v_proj"
    output = next(
        (name for each in _OUTPUTS if f"{(name := f'{attention}.{each}')}.weight" in shapes), None
    )
    if output is None or f"{value}.weight" not in shapes:
        raise UnsupportedModelError("--rotate: the model has no separate v_proj", hint=_HINT)
    queries, read = shapes[f"{attention}.q_proj.weight"][0], shapes[f"{output}.weight"][1]
    if queries != read:
        raise UnsupportedModelError(
            "--rotate: the model gates the output of attention before o_proj",
            hint=_HINT,
        )
    return value, output


def rotate_values(source: Mapping[str, F32], head_dim: int, family: Family) -> dict[str, F32]:
    """Rotate the values in a layer's tensors; the layer's output stays the same.

    Args:
        source: names such as "self_attn.v_proj.weight".
        head_dim: of the attention.
        family: of the layer.

    Raises:
        UnsupportedModelError: the layer has no separate v_proj, or gates its values.
    """
    found = dict(source)
    pair = _value_pair({name: values.shape for name, values in source.items()}, family)
    if pair is None:
        return found
    value_name, output_name = pair
    value, output = source[f"{value_name}.weight"], source[f"{output_name}.weight"]
    heads = value.reshape(-1, head_dim, value.shape[1])
    rotated = mixed(heads.swapaxes(-1, -2)).swapaxes(-1, -2)
    found[f"{value_name}.weight"] = np.ascontiguousarray(rotated).reshape(value.shape)
    by_head = output.reshape(len(output), -1, head_dim)
    found[f"{output_name}.weight"] = mixed(by_head).reshape(output.shape)
    if f"{value_name}.bias" in source:
        bias = source[f"{value_name}.bias"].reshape(-1, head_dim)
        found[f"{value_name}.bias"] = mixed(bias).reshape(-1)
    return found
