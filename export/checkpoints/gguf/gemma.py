"""GGUF files of Gemma 3n's and 4's language models: per-layer embeddings, shared keys and values.

Source: llama.cpp's `conversion/gemma.py`, `src/models/gemma3n.cpp` and `gemma4.cpp`.

* Gemma 4: sizes of heads without a suffix are those of global layers. `rope_freqs` are of global
  layers, too: they stop the frequencies that do not turn.
* Gemma 3n: sparsities are stored as quantiles of a normal distribution.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

from edgellm.core.errors import BrokenArtifactError
from edgellm.export.checkpoints.gguf.facts import (
    LOCAL_ROPE,
    Config,
    Facts,
    Family,
    experts,
    windows,
)
from edgellm.export.config.layer_types import FULL

_REMEDY = "convert the model again with a current llama.cpp"
# llama.cpp's of Gemma 3n
_STATES, _LAUREL_RANK, _LAYERS_WITH_KV = 4, 64, 20


def _by_layer(facts: Facts, key: str) -> list[int]:
    """A number for each layer; files with one have it for all."""
    found, layers = facts.get(key), facts.get("block_count")
    values: list[int] = found if isinstance(found, list) else [found] * layers
    if len(values) != layers:
        raise BrokenArtifactError(
            f"GGUF gemma4.{key} has {len(values)} numbers for {layers} layers", hint=_REMEDY
        )
    return values


def _gemma4(facts: Facts) -> Config:
    window, types = windows(facts, 6)
    size = facts.get("attention.key_length_swa")
    facts.expect("attention.value_length_swa", size)
    facts.expect("rope.dimension_count_swa", size)
    widths, heads = (
        _by_layer(facts, "feed_forward_length"),
        _by_layer(facts, "attention.head_count_kv"),
    )
    num_shared = facts.get("attention.shared_kv_layers", 0)
    own = range(facts.get("block_count") - num_shared)
    full = [layer for layer in own if types[layer] == FULL]
    sliding = [layer for layer in own if types[layer] != FULL]
    has_equal_kv = any(f"blk.{layer}.attn_v.weight" not in facts.names for layer in full)
    return {
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": size,
        "global_head_dim": facts.get("attention.key_length"),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "num_key_value_heads": heads[sliding[0] if sliding else 0],
        "num_global_key_value_heads": heads[full[0]] if has_equal_kv else None,
        "attention_k_eq_v": has_equal_kv,
        "num_kv_shared_layers": num_shared,
        "sliding_window": window,
        "layer_types": types,
        "hidden_size_per_layer_input": facts.get("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": len(facts.metadata["tokenizer.ggml.tokens"]),
        "final_logit_softcapping": facts.number("final_logit_softcapping", None),
        **_local_rope(facts),
        **_experts(facts),
    }


def _experts(facts: Facts) -> dict[str, Any]:
    if not facts.get("expert_count", 0):
        return {}
    found = experts(facts, "num_experts", "moe_intermediate_size")
    top_k = found.pop("num_experts_per_tok")
    return {**found, "enable_moe_block": True, "top_k_experts": top_k}


def _local_rope(facts: Facts) -> Config:
    theta = facts.number("rope.freq_base_swa", 10000.0)
    return {LOCAL_ROPE: {"rope_type": "default", "rope_theta": theta}}


def _gemma3n(facts: Facts) -> Config:
    window, types = windows(facts, 5)
    facts.expect("altup.num_inputs", _STATES)
    layers = facts.get("block_count")
    found = {
        "model_type": "gemma3n_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": window,
        "layer_types": types,
        "num_kv_shared_layers": facts.get(
            "attention.shared_kv_layers", max(layers - _LAYERS_WITH_KV, 0)
        ),
        "hidden_size_per_layer_input": facts.get("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": len(facts.metadata["tokenizer.ggml.tokens"]),
        "final_logit_softcapping": facts.number("final_logit_softcapping", None),
        "altup_num_inputs": _STATES,
        "altup_active_idx": facts.get("altup.active_idx", 0),
        "laurel_rank": _LAUREL_RANK,
        **_local_rope(facts),
    }
    if (quantiles := facts.get("activation_sparsity_scale", None)) is not None:
        shares = [NormalDist().cdf(each) for each in quantiles]
        found["activation_sparsity_pattern"] = [float(f"{share:.6g}") for share in shares]
    return found


_PER_LAYER = {
    "ffn_norm": "pre_feedforward_layernorm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
GEMMA3N = Family(
    read=_gemma3n,
    names={
        **_PER_LAYER,
        "altup_correct_coef": "altup.correction_coefs",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    },
    tensors={"altup_correct_scale.weight": "altup.correct_output_scale"},
    stacks={
        "altup_proj.weight": "model.altup_projections",
        "altup_unembd_proj.weight": "model.altup_unembed_projections",
    },
)
GEMMA4 = Family(
    read=_gemma4,
    names={
        **_PER_LAYER,
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        **{f"post_ffw_norm_{index}": f"post_feedforward_layernorm_{index}" for index in (1, 2)},
        "ffn_gate_inp": "router.proj",
        **{f"ffn_{part}_exps": f"experts.{part}_proj" for part in ("gate", "up", "down")},
    },
    tensors={
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "layer_output_scale.weight": "layer_scalar",
    },
    has_experts=True,
)
