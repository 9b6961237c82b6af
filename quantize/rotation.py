"""A rotation of attention's values (R2 of arXiv 2405.16406): exact, and free at run time.

What every head reads of v_proj is turned by one orthogonal matrix, which o_proj turns back. Weights
and values with outliers in few channels become alike in all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from edgellm.contract import UnsupportedModelError
from edgellm.export.rotation import mixed
from edgellm.quantize.formats import F32

_V, _O = "self_attn.v_proj", "self_attn.o_proj"


def has_values(names: Collection[str], layer: str) -> bool:
    """Whether `rotate_values` takes a layer whose tensors' names begin so."""
    return all(f"{layer}{name}.weight" in names for name in (_V, _O))


def rotate_values(source: Mapping[str, F32], head_dim: int) -> dict[str, F32]:
    """A layer's tensors that compute the same with rotated values.

    Args:
        source: named from "self_attn.v_proj.weight" on.
        head_dim: of the attention.

    Raises:
        UnsupportedModelError: the layer has no projection of values of its own.
    """
    if not has_values(source, ""):
        raise UnsupportedModelError(
            "--rotate: the model has no v_proj of its own",
            hint="choose --rotate residual, or leave --rotate out",
        )
    found = dict(source)
    value, output = source[f"{_V}.weight"], source[f"{_O}.weight"]
    heads = value.reshape(-1, head_dim, value.shape[1])
    turned = mixed(heads.swapaxes(-1, -2)).swapaxes(-1, -2)
    found[f"{_V}.weight"] = np.ascontiguousarray(turned).reshape(value.shape)
    by_head = output.reshape(len(output), -1, head_dim)
    found[f"{_O}.weight"] = mixed(by_head).reshape(output.shape)
    if f"{_V}.bias" in source:
        bias = source[f"{_V}.bias"].reshape(-1, head_dim)
        found[f"{_V}.bias"] = mixed(bias).reshape(-1)
    return found
