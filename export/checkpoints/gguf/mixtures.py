"""GGUF files of mixtures of experts without recurrent layers: their config keys.

Sources: llama.cpp's `conversion/*.py` (llama, qwen, olmo, granite, ernie) and `src/models/*.cpp`.
All experts of a layer are one tensor for each projection. Shares of chosen experts are divided by
their sum, or not, as llama.cpp's graph of the architecture does: files do not have this fact.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgellm.core.errors import BrokenArtifactError, UnsupportedModelError
from edgellm.export.checkpoints.gguf.facts import Config, Facts, Family, experts, three_axes
from edgellm.export.checkpoints.gguf.hybrids import (
    GRANITE_EXPERTS,
    SHARED_EXPERT,
    granite_factors,
    skip_states,
)
from edgellm.export.checkpoints.gguf.permutations import interleaved
from edgellm.export.config.layer_types import FULL

_REMEDY = "convert the model again with a current llama.cpp"

_SHARED_WIDTH = "expert_shared_feed_forward_length"


def _llama(facts: Facts) -> Config:
    """Llama, or Mixtral."""
    if facts.get("expert_count", 0):
        return {
            "model_type": "mixtral",
            **experts(facts, "num_local_experts", "intermediate_size"),
        }
    facts.get("feed_forward_length")
    has_bias = "blk.0.attn_q.bias" in facts.names
    return {"model_type": "llama"} | ({"attention_bias": True} if has_bias else {})


def _qwen2moe(facts: Facts) -> Config:
    return {
        "model_type": "qwen2_moe",
        "qkv_bias": facts.has("attn_q.bias"),
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": facts.get(_SHARED_WIDTH, 0)
        or facts.get("feed_forward_length"),
        **experts(facts, "num_experts", "moe_intermediate_size"),
    }


def _qwen3moe(facts: Facts) -> Config:
    own = experts(facts, "num_experts", "moe_intermediate_size")
    return {"model_type": "qwen3_moe", "norm_topk_prob": True, **own}


def _qwen3vlmoe(facts: Facts) -> Config:
    facts.skip("n_deepstack_layers")  # the encoder has them
    return {**_qwen3moe(facts), "rope_parameters": three_axes(facts)}


def _olmoe(facts: Facts) -> Config:
    own = experts(facts, "num_experts", "intermediate_size")
    return {"model_type": "olmoe", "norm_topk_prob": False, **own}


def _granitemoe(facts: Facts) -> Config:
    """Granite 3 with experts, or Granite 4 without Mamba, which has a shared MLP next to them."""
    if facts.get("rope.scaling.finetuned", True) is False:
        raise UnsupportedModelError(
            "GGUF granitemoe.rope.scaling.finetuned = false: without rope", hint=_REMEDY
        )
    skip_states(facts)
    found = {
        **experts(facts, "num_local_experts", "intermediate_size"),
        **granite_factors(facts),
    }
    if not (shared := facts.get(_SHARED_WIDTH, 0)):
        return {"model_type": "granitemoe", **found}
    return {
        "model_type": "granitemoehybrid",
        "position_embedding_type": "rope",
        "layer_types": [FULL] * facts.get("block_count"),
        "shared_intermediate_size": shared,
        **found,
    }


def _ernie4_5_moe(facts: Facts) -> Config:
    """ERNIE 4.5 with experts; the shared ones are as wide as the file has it."""
    size, shared = facts.get("expert_feed_forward_length"), facts.get(_SHARED_WIDTH, 0)
    if shared % size:
        raise BrokenArtifactError(
            f"GGUF ernie4_5-moe.{_SHARED_WIDTH} = {shared} is no multiple of the experts' {size}",
            hint=_REMEDY,
        )
    facts.skip("expert_shared_count")  # follows from the widths
    return {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": facts.get("expert_count"),
        "moe_k": facts.get("expert_used_count"),
        "moe_intermediate_size": size,
        "moe_num_shared_experts": shared // size,
        "moe_layer_start_index": facts.get("leading_dense_block_count", 0),
        "moe_layer_interval": facts.get("interleave_moe_layer_step"),
    }


_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    **{
        f"ffn_{part}_exps": f"block_sparse_moe.experts.{part}_proj"
        for part in ("gate", "up", "down")
    },
}
_ERNIE = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
MIXTURES: Mapping[str, Family] = {
    "llama": Family(read=_llama, names=_MIXTRAL, orders=interleaved, has_experts=True),
    "qwen2moe": Family(read=_qwen2moe, names=SHARED_EXPERT, has_experts=True),
    "qwen3moe": Family(read=_qwen3moe, has_experts=True),
    "qwen3vlmoe": Family(read=_qwen3vlmoe, has_experts=True),
    "olmoe": Family(read=_olmoe, has_experts=True),
    "granitemoe": Family(
        read=_granitemoe, names=GRANITE_EXPERTS, orders=interleaved, has_experts=True
    ),
    "ernie4_5-moe": Family(
        read=_ernie4_5_moe,
        names=_ERNIE,
        tensors={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        has_experts=True,
    ),
}
