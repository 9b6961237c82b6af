"""GGUF files of models with recurrent layers: config keys, and reverted changes of converters.

Sources: llama.cpp's `conversion/*.py` (qwen, mamba, granite, falcon_h1, nemotron, lfm2,
kimi_linear) and `src/models/*.cpp` (qwen35, qwen3next, granite-hybrid, falcon-h1, nemotron-h,
lfm2moe, kimi-linear).

All have A = -exp(A_log) as `ssm_a`, convolutions without their middle axis, and `dt_bias` as the
bias of `ssm_dt`; Mamba 2 has A and D as columns and its norm as [groups, size].

* Qwen3-Next: queries, keys and values of all heads are one tensor, gates another (older files: one
  tensor `ssm_in`, as Hugging Face); norms but `ssm_norm` plus 1.
* Qwen3.5: the same norms; value heads in another order (`gguf_orders.tiled`); layers after the
  last are those of multi-token prediction.
* Granite 4: pairs of queries and keys adjacent as in Granite 3, gates and ups apart. One
  without Mamba is a file of Granite 3. One with RoPE is Bamba, whose heads turn in part.
* Falcon-H1: all factors are part of the weights. Where the head is the embedding, that of the
  logits is lost.
* Nemotron-H: adjacent pairs too, without RoPE.
* Kimi Linear: `kv_b_proj` as two tensors of all heads, that of keys with swapped axes (older files:
  one tensor, as Hugging Face); sizes of heads are those of latent vectors.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.gguf.dense import LATENT
from edgellm.export.checkpoints.gguf.facts import Config, Facts, Family, experts, three_axes
from edgellm.export.checkpoints.gguf.permutations import interleaved, tiled
from edgellm.export.config.layer_types import CONV, EXPERTS, FULL, LINEAR, NETWORK
from edgellm.export.config.layer_types import LINEAR as MAMBA

_SIGMOID = 2  # llama.cpp's enum of the function that gates experts
_INTERVAL = 4  # of attention layers, if the file has no key
_SSM = ("conv_kernel", "group_count", "inner_size", "state_size", "time_step_rank")


def granite_factors(facts: Facts) -> Config:
    """Factors that Granite 3 and 4 share."""
    heads, hidden = facts.get("attention.head_count"), facts.get("embedding_length")
    head_dim = facts.get("attention.key_length", hidden // heads)
    return {
        "num_key_value_heads": max(_kv_heads(facts)),
        "attention_bias": facts.has("attn_q.bias"),
        "attention_multiplier": facts.number("attention.scale", 0.0) or head_dim**-0.5,
        "embedding_multiplier": facts.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": facts.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": facts.number("logit_scale"),
    }


def skip_states(facts: Facts) -> None:
    """Ignore sizes of Mamba layers, which Granite 4's converter writes for files without them.

    Raises:
        UnsupportedModelError: the file has such layers.
    """
    if any(".ssm_" in name for name in facts.names):
        raise UnsupportedModelError(f"GGUF {facts.architecture} with layers of Mamba")
    facts.skip(*(f"ssm.{key}" for key in _SSM))


def _kv_heads(facts: Facts) -> list[int]:
    """Key/value heads of each layer; 0 without attention."""
    found = facts.get("attention.head_count_kv", facts.get("attention.head_count"))
    return found if isinstance(found, list) else [found] * facts.get("block_count")


def _delta_net(facts: Facts) -> Config:
    """Keys that Qwen3-Next and Qwen3.5 share."""
    heads, hidden = facts.get("attention.head_count"), facts.get("embedding_length")
    head_dim = facts.get("attention.key_length", hidden // heads)
    predicted = facts.get("nextn_predict_layers", 0)
    layers, values = facts.get("block_count") - predicted, facts.get("ssm.time_step_rank")
    interval = facts.get("full_attention_interval", _INTERVAL)
    usual = [bool((at + 1) % interval) for at in range(layers)]
    recurs = facts.get("attention.recurrent_layers", usual)
    rotary_dim = facts.get("rope.dimension_count", head_dim)
    axes = three_axes(facts) if facts.get("rope.dimension_sections", None) else {}
    return {
        "num_hidden_layers": layers,
        "mtp_num_hidden_layers": predicted,
        "layer_types": [LINEAR if each else FULL for each in recurs[:layers]],
        "linear_num_key_heads": facts.get("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": facts.get("ssm.state_size"),
        "linear_value_head_dim": facts.get("ssm.inner_size") // values,
        "linear_conv_kernel_dim": facts.get("ssm.conv_kernel"),
        "rope_parameters": {"partial_rotary_factor": rotary_dim / head_dim, **axes},
    }


def _qwen35(facts: Facts) -> Config:
    return {"model_type": "qwen3_5_text", **_delta_net(facts)}


def _shared_experts(facts: Facts) -> Config:
    shared = "expert_shared_feed_forward_length"
    return {
        "shared_expert_intermediate_size": facts.get(shared, 0) or facts.get("feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp's
        **experts(facts, "num_experts", "moe_intermediate_size"),
    }


def _qwen35moe(facts: Facts) -> Config:
    return {"model_type": "qwen3_5_moe_text", **_delta_net(facts), **_shared_experts(facts)}


def _qwen3next(facts: Facts) -> Config:
    return {"model_type": "qwen3_next", **_delta_net(facts), **_shared_experts(facts)}


def _mamba(facts: Facts) -> Config:
    """Keys of Granite 4 and Falcon-H1."""
    heads, inner = facts.get("ssm.time_step_rank"), facts.get("ssm.inner_size")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": facts.get("ssm.group_count"),
        "mamba_d_state": facts.get("ssm.state_size"),
        "mamba_d_conv": facts.get("ssm.conv_kernel"),
        "mamba_conv_bias": facts.has("ssm_conv1d.bias"),
        "mamba_proj_bias": facts.has("ssm_in.bias"),
    }


def _bamba(facts: Facts) -> Config:
    heads, hidden = facts.get("attention.head_count"), facts.get("embedding_length")
    head_dim = facts.get("attention.key_length", hidden // heads)
    # Half of each head turns, also if the file has the whole.
    facts.expect("rope.dimension_count", head_dim // 2, head_dim)
    counts = _kv_heads(facts)
    return {
        "model_type": "bamba",
        "num_key_value_heads": max(counts),
        "attn_layer_indices": [layer for layer, count in enumerate(counts) if count],
        "attention_bias": facts.has("attn_q.bias"),
        "mlp_bias": facts.has("ffn_up.bias"),
        "mamba_expand": facts.get("ssm.inner_size") // hidden,
        **_mamba(facts),
    }


def _bamba_of(facts: Facts) -> Family | None:
    """Bamba's family, if the file has RoPE."""
    return _BAMBA if facts.get("rope.scaling.finetuned", True) else None


def _granitehybrid(facts: Facts) -> Config:
    heads, facts_of_experts = _kv_heads(facts), dict[str, object]()
    if facts.get("expert_count", 0):
        facts_of_experts = experts(facts, "num_local_experts", "intermediate_size")
    shared = "expert_shared_feed_forward_length"
    return {
        "model_type": "granitemoehybrid",
        "position_embedding_type": "nope",
        "layer_types": ["attention" if count else "mamba" for count in heads],
        "mamba_expand": facts.get("ssm.inner_size") // facts.get("embedding_length"),
        "num_local_experts": 0,
        "shared_intermediate_size": facts.get(shared, 0) or facts.get("feed_forward_length"),
        **facts_of_experts,
        **_mamba(facts),
        **granite_factors(facts),
    }


def _falcon_h1(facts: Facts) -> Config:
    if "output.weight" not in facts.names:
        raise UnsupportedModelError(
            "GGUF falcon-h1 without output.weight: such a file has lost the factor of the logits"
        )
    return {
        "model_type": "falcon_h1",
        "mamba_d_ssm": facts.get("ssm.inner_size"),
        "mamba_rms_norm": facts.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # llama.cpp's
        **_mamba(facts),
    }


def _nemotron_h(facts: Facts) -> Config:
    heads, inner = facts.get("ssm.time_step_rank"), facts.get("ssm.inner_size")
    predicted, widths = facts.get("nextn_predict_layers", 0), facts.get("feed_forward_length")
    layers = facts.get("block_count") - predicted
    facts.skip("attention.layer_norm_epsilon")  # equal to the key that is read
    found = {
        "model_type": "nemotron_h",
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": predicted,
        "num_key_value_heads": max(_kv_heads(facts)),
        "layers_block_type": [_kind(facts, at) for at in range(layers)],
        "intermediate_size": max(widths) if isinstance(widths, list) else widths,
        "layer_norm_epsilon": facts.epsilon(),
        "rms_norm_eps": None,
        "rope_parameters": None,
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "n_groups": facts.get("ssm.group_count"),
        "ssm_state_size": facts.get("ssm.state_size"),
        "conv_kernel": facts.get("ssm.conv_kernel"),
        "use_conv_bias": facts.has("ssm_conv1d.bias"),
        "use_bias": facts.has("ssm_in.bias"),
        "mlp_bias": facts.has("ffn_up.bias"),
    }
    return found | (_nemotron_experts(facts) if facts.family.has_experts else {})


def _kind(facts: Facts, layer: int) -> str:
    """Kind of a layer, by its tensors: lists of heads and widths do not show experts."""
    for name, kind in {"ssm_in": MAMBA, "attn_q": FULL, "ffn_gate_inp": EXPERTS}.items():
        if f"blk.{layer}.{name}.weight" in facts.names:
            return kind
    return NETWORK


def _nemotron_experts(facts: Facts) -> Config:
    for key in ("expert_group_count", "expert_group_used_count", "expert_shared_count"):
        facts.expect(key, 1)
    facts.expect("expert_gating_func", _SIGMOID)
    return {
        **experts(facts, "n_routed_experts", "moe_intermediate_size"),
        "moe_shared_expert_intermediate_size": facts.get("expert_shared_feed_forward_length"),
        "norm_topk_prob": facts.get("expert_weights_norm", False),
        "routed_scaling_factor": facts.number("expert_weights_scale", 0.0) or 1.0,
        "moe_latent_size": facts.get("moe_latent_size", None),
    }


def _lfm2(facts: Facts) -> Config:
    """LFM2: layers without keys are convolutions; the norms' epsilon has another key."""
    counts = _kv_heads(facts)
    return {
        "model_type": "lfm2",
        "num_key_value_heads": max(counts),
        "layer_types": [FULL if count else CONV for count in counts],
        "conv_L_cache": facts.get("shortconv.l_cache"),
        "norm_eps": facts.epsilon(),
        "rms_norm_eps": None,
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2moe(facts: Facts) -> Config:
    facts.expect("expert_gating_func", _SIGMOID)
    found = _lfm2(facts)
    del found["block_auto_adjust_ff_dim"]
    return {
        **found,
        **experts(facts, "num_experts", "moe_intermediate_size"),
        "model_type": "lfm2_moe",
        "num_dense_layers": facts.get("leading_dense_block_count", 0),
        "norm_topk_prob": True,  # llama.cpp's
        "use_expert_bias": facts.has("exp_probs_b.bias"),
    }


def _kimi_linear(facts: Facts) -> Config:
    facts.expect("expert_gating_func", _SIGMOID)
    for key in ("expert_group_count", "expert_group_used_count"):
        facts.expect(key, 1)
    facts.skip("attention.value_length")  # of no tensor
    rotary_dim = facts.get("rope.dimension_count")
    dense = facts.get("leading_dense_block_count", 0)
    layers = range(facts.get("block_count"))
    return {
        "model_type": "kimi_linear",
        "num_key_value_heads": facts.get("attention.head_count"),
        "head_dim": None,
        "rope_parameters": None,
        "layer_types": [FULL if count else LINEAR for count in _kv_heads(facts)],
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in layers],
        "q_lora_rank": facts.get("attention.q_lora_rank", None),
        "kv_lora_rank": facts.get("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary_dim,
        "qk_nope_head_dim": facts.get("attention.key_length_mla") - rotary_dim,
        "v_head_dim": facts.get("attention.value_length_mla"),
        "attention_bias": facts.has("attn_kv_a_mqa.bias"),
        "linear_num_heads": facts.get("attention.head_count"),  # llama.cpp's
        "linear_head_dim": facts.get("kda.head_dim"),
        "linear_conv_kernel_dim": facts.get("ssm.conv_kernel"),
        "n_shared_experts": facts.get("expert_shared_count"),
        "norm_topk_prob": True,  # llama.cpp's
        "routed_scaling_factor": facts.number("expert_weights_scale", 0.0) or 1.0,
        **experts(facts, "num_local_experts", "moe_intermediate_size"),
    }


def _states(prefix: str) -> dict[str, str]:
    """Tensors of a recurrent layer that belong to no module."""
    own = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
    return {name: f"{prefix}.{theirs}" for name, theirs in own.items()}


def _modules(prefix: str) -> dict[str, str]:
    """Modules of a recurrent layer."""
    own = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
    return {name: f"{prefix}.{theirs}" for name, theirs in own.items()}


SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}
_DELTA_NET = {
    **_modules("linear_attn"),
    **SHARED_EXPERT,
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
}
GRANITE_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **{
        f"ffn_{part}_exps": f"block_sparse_moe.experts.{part}_proj"
        for part in ("gate", "up", "down")
    },
    **{
        f"ffn_{part}{kind}": f"shared_mlp.{part}_proj"
        for part in ("gate", "up")
        for kind in ("", "_shexp")
    },
    "ffn_down": "shared_mlp.output_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_GRANITE = {**_modules("mamba"), **GRANITE_EXPERTS}
_FALCON_H1 = {
    **_modules("mamba"),
    "output_norm": "model.final_layernorm",
    "ffn_norm": "pre_ff_layernorm",
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
}
_NEMOTRON_H = {
    **_modules("mixer"),
    "token_embd": "model.embeddings",
    "output_norm": "model.norm_f",
    "attn_norm": "norm",
    **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
    "attn_output": "mixer.o_proj",
    "ffn_gate_inp": "mixer.gate",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    **{
        f"ffn_{part}{kind}": f"mixer.{module}{part}_proj"
        for part in ("up", "down")
        for kind, module in (("", ""), ("_exps", "experts."), ("_shexp", "shared_experts."))
    },
}
_LFM2 = {
    **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
    **{f"attn_{part}_norm": f"self_attn.{part}_layernorm" for part in "qk"},
    "token_embd_norm": "model.embedding_norm",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    **{f"ffn_{part}_exps": f"feed_forward.experts.{part}_proj" for part in ("gate", "up", "down")},
}
_KIMI_LINEAR = {
    **LATENT,
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
    **{f"ssm_{kind}_{part}": f"self_attn.{kind}_{part}_proj" for kind in "fg" for part in "ab"},
    "ssm_beta": "self_attn.b_proj",
    "ssm_norm": "self_attn.o_norm",
    "ffn_gate_inp": "block_sparse_moe.gate",
    **{
        f"ffn_{part}_{kind}": f"block_sparse_moe.{module}.{part}_proj"
        for part in ("gate", "up", "down")
        for kind, module in (("exps", "experts"), ("shexp", "shared_experts"))
    },
}
_BAMBA = Family(
    read=_bamba,
    names=_FALCON_H1,
    tensors=_states("mamba"),
    orders=interleaved,
    turns_in_part=True,
)
HYBRIDS: Mapping[str, Family] = {
    "qwen3next": Family(
        read=_qwen3next,
        names=_DELTA_NET,
        tensors=_states("linear_attn"),
        norm_shift=1.0,
        turns_in_part=True,
        has_experts=True,
    ),
    "qwen35": Family(
        read=_qwen35,
        names=_DELTA_NET,
        tensors=_states("linear_attn"),
        orders=tiled,
        norm_shift=1.0,
        turns_in_part=True,
    ),
    "qwen35moe": Family(
        read=_qwen35moe,
        names=_DELTA_NET,
        tensors=_states("linear_attn"),
        orders=tiled,
        norm_shift=1.0,
        turns_in_part=True,
        has_experts=True,
    ),
    "granitehybrid": Family(
        read=_granitehybrid,
        names=_GRANITE,
        tensors=_states("mamba"),
        orders=interleaved,
        turns_in_part=True,
        has_experts=True,
        variant=_bamba_of,
    ),
    "falcon-h1": Family(
        read=_falcon_h1,
        names=_FALCON_H1,
        tensors=_states("mamba") | {"ffn_norm": "pre_ff_layernorm.weight"},
    ),
    "nemotron_h": Family(
        read=_nemotron_h,
        names=_NEMOTRON_H,
        tensors=_states("mixer"),
        orders=interleaved,
        turns_in_part=True,
    ),
    "nemotron_h_moe": Family(
        read=_nemotron_h,
        names=_NEMOTRON_H,
        tensors=_states("mixer") | {"exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
        orders=interleaved,
        turns_in_part=True,
        has_experts=True,
    ),
    "kimi-linear": Family(
        read=_kimi_linear,
        names=_KIMI_LINEAR,
        tensors=_states("self_attn")
        | {"exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias"},
        swapped=frozenset({"attn_k_b"}),
        turns_in_part=True,
        is_latent=True,
        has_experts=True,
    ),
    "lfm2": Family(read=_lfm2, names=_LFM2),
    "lfm2moe": Family(
        read=_lfm2moe,
        names=_LFM2,
        tensors={"exp_probs_b.bias": "feed_forward.expert_bias"},
        has_experts=True,
    ),
}
