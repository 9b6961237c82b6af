"""GGUF files of dense models: config keys of the families that share little with others.

Sources: llama.cpp's `conversion/*.py` (mistral3, glm, exaone, ernie, hunyuan, command_r, starcoder,
olmo, llama, minicpm, apertus) and the loaders in its `src/models/*.cpp`.

* Hunyuan: the base of the RoPE is scaled already. StarCoder 2: a window is not stored.
* Layers of Command R7B and EXAONE 4 with full attention have no RoPE, if others have a window.
* MiniCPM 3: its factors are those of the only public model, as in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.gguf.facts import (
    LAYER_NORM,
    Config,
    Facts,
    Family,
    long_rope,
    windows,
)
from edgellm.export.checkpoints.gguf.permutations import interleaved

_REMEDY = "convert the model again with a current llama.cpp"

# Layers of EXAONE 4 with a window; llama.cpp decides by them where the key is missing.
_LAYERS_OF_WIDE_EXAONE, _WINDOW_OF_EXAONE = 64, 4096


def _mistral3(facts: Facts) -> Config:
    """Ministral 3, or Mistral Small 3, which does not scale queries."""
    beta = facts.number("attention.temperature_scale", 0.0)
    weight = facts.number("rope.scaling.yarn_log_multiplier", 0.0)
    rope: Config = {"mscale": 1.0, "mscale_all_dim": weight} if weight else {}
    if not beta:
        return {"model_type": "mistral", "rope_parameters": rope}
    if facts.get("rope.scaling.original_context_length", None) is None:
        raise UnsupportedModelError(
            "GGUF mistral3.attention.temperature_scale without "
            "rope.scaling.original_context_length",
            hint=_REMEDY,
        )
    return {"model_type": "ministral3", "rope_parameters": {**rope, "llama_4_scaling_beta": beta}}


def _glm4(facts: Facts) -> Config:
    heads, hidden = facts.get("attention.head_count"), facts.get("embedding_length")
    head_dim = facts.get("attention.key_length", hidden // heads)
    rotary_dim = facts.get("rope.dimension_count", head_dim)
    return {
        "model_type": "glm4",
        "attention_bias": facts.has("attn_q.bias"),
        "rope_parameters": {"partial_rotary_factor": rotary_dim / head_dim},
    }


def _exaone4(facts: Facts) -> Config:
    is_wide = facts.get("block_count") == _LAYERS_OF_WIDE_EXAONE
    window, types = windows(facts, 4, _WINDOW_OF_EXAONE if is_wide else 0)
    found = {"model_type": "exaone4", "sliding_window": window, "layer_types": types}
    return found | (_local_theta(facts) if window else {})


def _local_theta(facts: Facts) -> Config:
    """The base of layers with a window, where others have no RoPE."""
    theta = facts.number("rope.freq_base_swa", facts.number("rope.freq_base", 10000.0))
    return {"rope_parameters": {"rope_theta": theta}}


def _cohere2(facts: Facts) -> Config:
    facts.get("attention.sliding_window")
    window, types = windows(facts, 4)
    return {
        "model_type": "cohere2",
        "sliding_window": window,
        "layer_types": types,
        "logit_scale": facts.number("logit_scale"),
        "layer_norm_eps": facts.epsilon(),
        "rms_norm_eps": None,
        **_local_theta(facts),
    }


def _ernie4_5(facts: Facts) -> Config:
    return {"model_type": "ernie4_5", "use_bias": facts.has("attn_q.bias")}


def _hunyuan(facts: Facts) -> Config:
    return {"model_type": "hunyuan_v1_dense", "attention_bias": facts.has("attn_q.bias")}


def _starcoder2(facts: Facts) -> Config:
    return {
        "model_type": "starcoder2",
        "use_bias": facts.has("attn_q.bias"),
        "norm_epsilon": facts.epsilon(),
        "rms_norm_eps": None,
    }


def _seed_oss(facts: Facts) -> Config:
    return {
        "model_type": "seed_oss",
        "attention_bias": facts.has("attn_q.bias"),
        "attention_out_bias": facts.has("attn_output.bias"),
        "mlp_bias": facts.has("ffn_up.bias"),
    }


def _arcee(facts: Facts) -> Config:
    return {
        "model_type": "arcee",
        "attention_bias": facts.has("attn_q.bias"),
        "mlp_bias": facts.has("ffn_up.bias"),
    }


def _minicpm3(facts: Facts) -> Config:
    heads, hidden = facts.get("attention.head_count"), facts.get("embedding_length")
    head_dim = facts.get("attention.key_length")
    rotary_dim = facts.get("rope.dimension_count")
    return {
        "model_type": "minicpm3",
        "q_lora_rank": facts.get("attention.q_lora_rank"),
        "kv_lora_rank": facts.get("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary_dim,
        "qk_nope_head_dim": head_dim - rotary_dim,
        "v_head_dim": facts.get("attention.value_length", hidden // heads),
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "rope_parameters": long_rope(facts),
    }


def _apertus(facts: Facts) -> Config:
    return {
        "model_type": "apertus",
        "hidden_act": "xielu",
        "attention_bias": facts.has("attn_q.bias"),
    }


_BEFORE_AND_AFTER = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
LATENT = {
    **{f"attn_q_{part}": f"self_attn.q_{part}_proj" for part in "ab"},
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_NORMED = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
_XIELU = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
DENSE: Mapping[str, Family] = {
    "mistral3": Family(read=_mistral3, orders=interleaved),
    "glm4": Family(read=_glm4, names=_BEFORE_AND_AFTER, turns_in_part=True),
    "exaone4": Family(read=_exaone4),
    "ernie4_5": Family(read=_ernie4_5),
    "hunyuan-dense": Family(read=_hunyuan, names=_NORMED),
    "cohere2": Family(read=_cohere2, epsilon=LAYER_NORM),
    "starcoder2": Family(
        read=_starcoder2,
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        epsilon=LAYER_NORM,
    ),
    "seed_oss": Family(read=_seed_oss),
    "arcee": Family(read=_arcee, orders=interleaved),
    "apertus": Family(
        read=_apertus,
        names={"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        tensors={f"xielu.{name}": f"mlp.act_fn.{name}" for name in _XIELU},
        numbers={f"xielu.{name}": shape for name, shape in _XIELU.items()},
    ),
    "minicpm3": Family(read=_minicpm3, names=LATENT, turns_in_part=True),
}
