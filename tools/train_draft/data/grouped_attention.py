"""Attention of single new tokens that reads each head of the KV cache once.

With padding, SDPA of transformers before 5.24 copies the KV cache for each query head of a group,
in every step. Here the queries of a group attend together, as queries of one head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "edgellm_grouped_sdpa"
_DEVICES = ("cuda",)


@contextmanager
def grouped_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model on a GPU use `attend` instead of "sdpa"; on a CPU, nothing changes."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    if model.device.type not in _DEVICES or before != "sdpa":
        yield
        return
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' "sdpa".

    Args:
        module: the attention layer.
        query: [B, heads, S, D].
        key: [B, KV heads, tokens, D].
        value: as key.
        attention_mask: bool or additive, [B, 1, S, tokens]; None: causal.
        options: see `sdpa_attention_forward`.

    Returns:
        Attended values, [B, S, heads, D], and None for attention weights.
    """
    heads, groups = query.shape[1], query.shape[1] // key.shape[1]
    is_shared = attention_mask is not None and attention_mask.shape[1] == 1
    if (
        query.shape[2] > 1
        or groups == 1
        or not is_shared
        or options.get("position_bias") is not None
    ):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    mixed = nn.functional.scaled_dot_product_attention(
        query.reshape(len(query), key.shape[1], groups, -1),  # as `groups` queries of a KV head
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=options.get("dropout", 0.0),
        scale=options.get("scaling"),
    )
    return mixed.reshape(len(query), 1, heads, -1), None
