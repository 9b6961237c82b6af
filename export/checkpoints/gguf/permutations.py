"""Permutations of rows and columns of weights by llama.cpp's converters.

Source: llama.cpp's `conversion/llama.py` (`permute`) and `conversion/qwen.py`
(`_reorder_v_heads`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

Order = Callable[[], NDArray[np.int64]]  # index of each row or column in the file


@dataclass(frozen=True, slots=True)
class Orders:
    """Permutations by llama.cpp's names of modules."""

    rows: Mapping[str, Order] = field(default_factory=dict)
    columns: Mapping[str, Order] = field(default_factory=dict)


def as_stored(config: Mapping[str, Any]) -> Orders:
    """Orders of a family without permutations."""
    del config
    return Orders()


def interleaved(config: Mapping[str, Any]) -> Orders:
    """Queries and keys with interleaved RoPE pairs in each head."""
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    half = config["head_dim"] // 2
    return Orders({name: partial(_swapped, config[key], half, 2) for name, key in heads.items()})


def tiled(config: Mapping[str, Any]) -> Orders:
    """Value heads of a gated delta net: the first of every key head, then the second ones."""
    sizes = (f"linear_{name}" for name in ("num_key_heads", "num_value_heads", "value_head_dim"))
    keys, values, size = (config[name] for name in sizes)
    heads = partial(_value_heads, keys, values)
    numbers = partial(_value_heads, keys, values, size)
    convolved = partial(_value_heads, keys, values, size, 2 * keys * config["linear_key_head_dim"])
    return Orders(
        {
            **dict.fromkeys(("attn_qkv", "ssm_conv1d"), convolved),
            **dict.fromkeys(("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"), heads),
            "attn_gate": numbers,
        },
        {"ssm_out": numbers},
    )


def _value_heads(keys: int, values: int, size: int = 1, before: int = 0) -> NDArray[np.int64]:
    """Of `size` numbers each, after what comes `before` them."""
    heads = _swapped(1, values // keys, keys)
    numbers = (heads[:, None] * size + np.arange(size)).reshape(-1)
    return np.concatenate([np.arange(before), before + numbers])


def _swapped(groups: int, outer: int, inner: int) -> NDArray[np.int64]:
    """Indices of items [groups, inner, outer] that a file stores as [groups, outer, inner]."""
    return (
        np.arange(groups * outer * inner).reshape(groups, outer, inner).swapaxes(1, 2).reshape(-1)
    )
