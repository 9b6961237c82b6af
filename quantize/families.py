"""What quantizing must know of each family's layers and of what stands around them.

ModelOpt finds out by itself which layers read the same tensor, and folds their smoothing into the
norm that made it; its result is checked against what is written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from edgellm.contract import UnsupportedModelError
from edgellm.export.decoder_config import DecoderConfig
from edgellm.export.models import cohere2, gemma2, granite

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATED = ("mlp.gate_proj", "mlp.up_proj")
# Of configs, what has an entry for each layer.
_OF_LAYERS = ("layer_types", "no_rope_layers")


@dataclass(frozen=True, slots=True)
class Family:
    """How layers of one `model_type` are put together, by transformers' names."""

    readers: Mapping[str, tuple[str, ...]]  # of each norm's output; smoothing may be folded there
    norm_shift: float = 0.0  # what is added to a norm's stored weight
    attention: str = "sdpa"  # of transformers' implementations, one that computes all of it
    # Values of config.json with which a model of one layer does nothing before that layer.
    neutral: Mapping[str, Any] = field(default_factory=dict)


_BEFORE = Family({"input_layernorm": _QKV, "post_attention_layernorm": _GATED})
_BEHIND = Family({})  # only norms of what a layer adds
_SANDWICH = Family(
    {"input_layernorm": _QKV, "pre_feedforward_layernorm": _GATED}, norm_shift=1.0
)  # fmt: skip
FAMILIES = {
    "arcee": Family({"input_layernorm": _QKV, "post_attention_layernorm": ("mlp.up_proj",)}),
    "cohere2": Family({"input_layernorm": _QKV + _GATED}),
    "ernie4_5": _BEFORE,
    "exaone4": _BEHIND,
    "gemma2": replace(_SANDWICH, attention="eager"),  # sdpa knows no soft-cap
    "gemma3_text": _SANDWICH,
    "glm4": Family({"input_layernorm": _QKV, "post_attention_layernorm": ("mlp.gate_up_proj",)}),
    "granite": replace(_BEFORE, neutral={"embedding_multiplier": 1.0}),
    "granitemoehybrid": Family(
        {"input_layernorm": _QKV, "post_attention_layernorm": ("shared_mlp.input_linear",)},
        # Infinity is written in a way that only transformers' own reader of files understands.
        neutral={"embedding_multiplier": 1.0, "time_step_limit": None},
    ),
    "hunyuan_v1_dense": _BEFORE,
    "llama": _BEFORE,
    "ministral3": _BEFORE,
    "mistral": _BEFORE,
    "olmo2": _BEHIND,
    "olmo3": _BEHIND,
    "phi3": Family({"input_layernorm": ("self_attn.qkv_proj",),
                    "post_attention_layernorm": ("mlp.gate_up_proj",)}),
    "qwen2": _BEFORE,
    "qwen3": _BEFORE,
    "seed_oss": _BEFORE,
    "smollm3": _BEFORE,
    "starcoder2": Family({"input_layernorm": _QKV, "post_attention_layernorm": ("mlp.c_fc",)}),
}  # fmt: skip
# ModelOpt may fold AWQ's smoothing of the second into the rows of the first.
FOLDS = (("self_attn.v_proj", "self_attn.o_proj"), ("mlp.up_proj", "mlp.down_proj"))


def check_family(label: str, model_type: str) -> None:
    """Raise `UnsupportedModelError` for a family of which nothing is written here."""
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"{label}: layers of {model_type!r} cannot be quantized one by one yet",
            hint=f"those of {', '.join(FAMILIES)} can; llm_build --quantize int8 or int4 rounds "
            "the weights of any model without calibration",
        )


def keep_layers(config: Any, layers: range) -> None:
    """Cut transformers' config, complete and of all layers, to some of them."""
    for key in _OF_LAYERS:
        if values := getattr(config, key, None):
            setattr(config, key, [values[index] for index in layers])
    config.num_hidden_layers = len(layers)


def finish_logits(config: DecoderConfig, logits: torch.Tensor) -> torch.Tensor:
    """What the family does with the head's products."""
    if isinstance(config, gemma2.Config) and config.logits_softcap is not None:
        return torch.tanh(logits / config.logits_softcap) * config.logits_softcap
    if isinstance(config, granite.Config):
        return logits / config.logits_scaling
    if isinstance(config, cohere2.Config):
        return logits * config.logit_scale
    return logits
