"""Converts GGUF metadata to config.json, by family, and reverts changes of llama.cpp's converters.

Sources: the GGUF specification and llama.cpp's converters and loaders. A family is llama.cpp's
name of an architecture; unread keys become keys of the config, which rejects them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from edgellm.core.errors import (
    BrokenArtifactError,
    UnsupportedModelError,
)
from edgellm.export.checkpoints.gguf.dense import DENSE
from edgellm.export.checkpoints.gguf.facts import (
    LOCAL_ROPE,
    Config,
    Facts,
    Family,
    experts,
    long_rope,
    of_type,
    three_axes,
    windows,
)
from edgellm.export.checkpoints.gguf.gemma import GEMMA3N, GEMMA4
from edgellm.export.checkpoints.gguf.hybrids import HYBRIDS, granite_factors, skip_states
from edgellm.export.checkpoints.gguf.mixtures import MIXTURES
from edgellm.export.checkpoints.gguf.permutations import interleaved
from edgellm.export.checkpoints.gguf.text_encoders import ENCODERS
from edgellm.export.config.layer_types import FULL, SLIDING

# Gemma models that scale scores by hidden_size / heads: known by their layers, as in llama.cpp.
_WIDE_GEMMAS = {"gemma2": 46, "gemma3": 62}


def read_config(facts: Facts) -> Config:
    """The equivalent config.json.

    Raises:
        BrokenArtifactError: a required key is missing.
        UnsupportedModelError: values that llama.cpp's models do not have.
    """
    heads, hidden = facts.get("attention.head_count"), facts.get("embedding_length")
    head_dim = facts.get("attention.key_length", hidden // heads)
    if not facts.family.is_latent:
        facts.expect("attention.value_length", head_dim)
    inner = facts.get("feed_forward_length", None)
    if not facts.family.has_experts:
        facts.expect("expert_count", 0)
        inner = facts.get("feed_forward_length")
    tokens = facts.metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        raise BrokenArtifactError("the GGUF file has no tokenizer.ggml.tokens")
    config = {
        "vocab_size": len(tokens),
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": facts.get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": facts.epsilon(),
        "max_position_embeddings": facts.get("context_length"),
        "rope_parameters": _rope(facts, head_dim),
        "tie_word_embeddings": "output.weight" not in facts.names,
        "bos_token_id": facts.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": facts.metadata.get("tokenizer.ggml.eos_token_id"),
    }
    facts.expect("attention.causal", facts.family.is_causal)
    own = facts.family.read(facts)
    if (turns := own.pop("rope_parameters", {})) is None:
        return {**config, **own, "rope_parameters": None, **facts.left()}
    rope = {**config["rope_parameters"], **turns}
    if local := own.pop(LOCAL_ROPE, None):
        rope = {FULL: rope, SLIDING: local}
    return {**config, "rope_parameters": rope, **own, **facts.left()}


def _rope(facts: Facts, head_dim: int) -> Config:
    """RoPE keys that all families share."""
    rotary_dim = facts.get("rope.dimension_count", head_dim)
    if rotary_dim != head_dim and not facts.family.turns_in_part:
        raise UnsupportedModelError(
            f"GGUF {facts.architecture}.rope.dimension_count = {rotary_dim}, heads have {head_dim}"
        )
    rope: Config = {"rope_theta": facts.number("rope.freq_base", 10000.0)}
    scaling, factors = _scaling(facts), facts.vectors.get("rope_freqs")
    if factors:  # divide the frequencies before they are scaled
        kind = scaling.pop("rope_type", "default")
        return rope | scaling | {"rope_type": "factors", "factors": factors, "scaling": kind}
    return rope | scaling


def _scaling(facts: Facts) -> Config:
    """Scaling of frequencies: linear if a file has a factor without a type, as in llama.cpp.

    Raises:
        UnsupportedModelError: an unknown type or combination.
    """
    name = f"GGUF {facts.architecture}.rope.scaling"
    kind = facts.get("rope.scaling.type", "linear")
    older = facts.number("rope.scale_linear", 1.0)  # the key of the first GGUF files
    factor = facts.number("rope.scaling.factor", older) or 1.0
    original = facts.get("rope.scaling.original_context_length", None)
    is_long = any(each.startswith("rope_factors_") for each in facts.vectors)
    if kind not in ("none", "linear", "yarn") and not (kind == "longrope" and is_long):
        raise UnsupportedModelError(f"GGUF rope scaling {kind!r} is not supported")
    if is_long:
        if kind == "yarn" or (kind != "none" and factor != 1):
            raise UnsupportedModelError(f"{name}: {kind} by {factor} with rope_factors")
        return {}
    if kind == "yarn":
        found = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
        return found | _yarn(facts, factor)
    facts.expect("rope.scaling.attn_factor", 1.0)
    return {} if kind == "none" or factor == 1 else {"rope_type": kind, "factor": factor}


def _yarn(facts: Facts, factor: float) -> Config:
    """YaRN parameters of a file; None if absent."""
    scale = facts.number("rope.scaling.attn_factor", None)
    if scale is not None:  # llama.cpp multiplies it by the factor that others store as a product
        scale *= 1 + 0.1 * math.log(factor)
    if facts.number("rope.scaling.yarn_ext_factor", 1.0) != 1:
        raise UnsupportedModelError("GGUF rope.scaling.yarn_ext_factor other than 1")
    betas = {
        key: facts.number(f"rope.scaling.yarn_{key}", None) for key in ("beta_fast", "beta_slow")
    }
    return {"attention_factor": scale, **betas}


def _gemma(facts: Facts) -> Config:
    """Keys that Gemma 2 and 3 share."""
    heads, hidden = facts.get("attention.head_count"), facts.get("embedding_length")
    is_wide = facts.get("block_count") == _WIDE_GEMMAS.get(facts.architecture)
    width = hidden // heads if is_wide else facts.get("attention.key_length", hidden // heads)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width,
        "final_logit_softcapping": facts.number("final_logit_softcapping", None),
    }


def _gemma2(facts: Facts) -> Config:
    window, types = windows(facts, 2, 4096)
    return {
        **_gemma(facts),
        "model_type": "gemma2",
        "sliding_window": window,
        "layer_types": types,
        "attn_logit_softcapping": facts.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.number("final_logit_softcapping", 30.0),
    }


def _gemma3(facts: Facts) -> Config:
    window, types = windows(facts, 6)
    local = {"rope_type": "default", "rope_theta": facts.number("rope.freq_base_swa", 10000.0)}
    found = {"model_type": "gemma3_text", "sliding_window": window, "layer_types": types}
    return found | _gemma(facts) | {LOCAL_ROPE: local}


def _gemma_embedding(facts: Facts) -> Config:
    """EmbeddingGemma; the window is that of config.json, half of it on each side of a token."""
    facts.skip(*(f"dense_{layer}_feat_{side}" for layer in (2, 3) for side in ("in", "out")))
    return {**_gemma3(facts), "use_bidirectional_attention": True}


def _granite(facts: Facts) -> Config:
    """Granite 3, or Granite 4 without Mamba, whose MLP is the shared one."""
    if facts.get("rope.scaling.finetuned", True) is False:
        raise UnsupportedModelError("GGUF granite.rope.scaling.finetuned = false: without rope")
    skip_states(facts)
    shared = facts.get("expert_shared_feed_forward_length", 0)
    return {
        "model_type": "granite",
        "intermediate_size": shared or facts.get("feed_forward_length"),
        "mlp_bias": "blk.0.ffn_up.bias" in facts.names,
        **granite_factors(facts),
    }


def _smollm3(facts: Facts) -> Config:
    return {
        "model_type": "smollm3",
        "no_rope_layer_interval": 4,  # llama.cpp's
        "use_sliding_window": False,
        "attention_bias": "blk.0.attn_q.bias" in facts.names,
        "mlp_bias": "blk.0.ffn_up.bias" in facts.names,
    }


def _olmo2(facts: Facts) -> Config:
    """OLMo 2, or OLMo 3 if there is a window."""
    window, types = windows(facts, 4)
    if window is None:
        return {"model_type": "olmo2"}
    theta = facts.number("rope.freq_base_swa", facts.number("rope.freq_base", 10000.0))
    local = {"rope_type": "default", "rope_theta": theta}
    found = {"model_type": "olmo3", "sliding_window": window, "layer_types": types}
    return found | {LOCAL_ROPE: local}


def _phi3(facts: Facts) -> Config:
    heads, hidden = facts.get("attention.head_count"), facts.get("embedding_length")
    head_dim = facts.get("attention.key_length", hidden // heads)
    original = facts.get("rope.scaling.original_context_length", facts.get("context_length"))
    rope: Config = {
        "partial_rotary_factor": facts.get("rope.dimension_count", head_dim) / head_dim,
        **long_rope(facts),
    }
    return {
        "model_type": "phi3",
        "original_max_position_embeddings": original,
        "sliding_window": facts.get("attention.sliding_window", 0) or None,
        "rope_parameters": rope,
        "pad_token_id": 0,  # transformers' default may exceed the vocabulary
    }


def _gpt_oss(facts: Facts) -> Config:
    window, types = windows(facts, 2)
    return {
        "model_type": "gpt_oss",
        "attention_bias": "blk.0.attn_q.bias" in facts.names,
        "sliding_window": window,
        "layer_types": types,
        "rope_parameters": {"truncate": False},  # as the model was trained; llama.cpp does
        **experts(facts, "num_local_experts", "intermediate_size"),
    }


def _qwen2vl(facts: Facts) -> Config:
    return {"model_type": "qwen2", "rope_parameters": three_axes(facts)}


def _qwen3vl(facts: Facts) -> Config:
    facts.skip("n_deepstack_layers")  # the encoder has them
    return {"model_type": "qwen3", "rope_parameters": three_axes(facts)}


_SANDWICH = {"ffn_norm": "pre_feedforward_layernorm"}
FAMILIES: Mapping[str, Family] = {
    "qwen2": Family(read=of_type("qwen2")),
    "qwen2vl": Family(read=_qwen2vl),
    "qwen3": Family(read=of_type("qwen3")),
    "qwen3vl": Family(read=_qwen3vl),
    "gemma2": Family(read=_gemma2, names=_SANDWICH, norm_shift=1.0),
    "gemma3": Family(read=_gemma3, names=_SANDWICH, norm_shift=1.0),
    "gemma-embedding": Family(
        read=_gemma_embedding,
        names=_SANDWICH,
        norm_shift=1.0,
        is_causal=False,
        dense=("dense_2", "dense_3"),
    ),
    "gemma3n": GEMMA3N,
    "gemma4": GEMMA4,
    "gpt-oss": Family(
        read=_gpt_oss,
        names={"ffn_gate_inp": "mlp.router"},
        tensors={"attn_sinks.weight": "self_attn.sinks"},
        has_experts=True,
    ),
    "granite": Family(read=_granite, orders=interleaved),
    "olmo2": Family(read=_olmo2),
    "phi3": Family(read=_phi3, names={"ffn_up": "mlp.gate_up_proj"}, turns_in_part=True),
    "smollm3": Family(read=_smollm3, orders=interleaved),
    **DENSE,
    **MIXTURES,
    **HYBRIDS,
    **ENCODERS,
}
