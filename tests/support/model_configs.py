"""Configs that hypothesis draws for an architecture: values of all its keys, and of older ones.

And Gemma 4 with experts, a variant of its own.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from hypothesis import strategies as st

from edgellm.export import models
from edgellm.export.config.activations import ACTIVATIONS
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader

# Sizes are always given: those that a class assumes are gigabytes.
_SIZES: dict[str, st.SearchStrategy[Any]] = {
    "vocab_size": st.just(64),
    "hidden_size": st.sampled_from([32, 48]),
    "intermediate_size": st.sampled_from([16, 40]),
    "num_hidden_layers": st.sampled_from([2, 3, 4]),
    "num_attention_heads": st.sampled_from([2, 4]),
    "num_key_value_heads": st.sampled_from([1, 2, 4, None]),
    "max_position_embeddings": st.sampled_from([64, 128]),
    "head_dim": st.sampled_from([8, 16, 24, None]),
    "pad_token_id": st.sampled_from([None, 3]),
    "q_lora_rank": st.sampled_from([16, None]),
    "kv_lora_rank": st.sampled_from([8, 16]),
    "qk_nope_head_dim": st.sampled_from([8, 16]),
    "qk_rope_head_dim": st.sampled_from([8, 16]),
    "v_head_dim": st.sampled_from([8, 24, 40, None]),
    "vocab_size_per_layer_input": st.sampled_from([64, 70]),
    "hidden_size_per_layer_input": st.sampled_from([8, 12, 0]),
    "num_kv_shared_layers": st.sampled_from([0, 0, 0, 0, 1, 2]),
    **dict.fromkeys(
        ("num_local_experts", "num_experts", "moe_num_experts"), st.sampled_from([3, 4])
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "moe_k", "top_k_experts"), st.sampled_from([1, 2, 3, 4])
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_expert_intermediate_size",
        ),
        st.sampled_from([16, 40]),
    ),
}
_OF_SOME_KINDS = ("moe", "head_dim", "q_lora", "kv_lora", "qk_", "v_head")
_OF_SOME = frozenset(
    key
    for key in _SIZES
    if "expert" in key
    or key.startswith(_OF_SOME_KINDS)
    or key.endswith(("_per_layer_input", "_shared_layers"))
)
GEMMA4_EXPERTS = {
    **models.find("gemma4_text").TINY,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
}
_FLOATS = st.sampled_from([0.25, 1.0, 3, 0.0, -1.5, None])
_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
_WINDOWS = st.sampled_from([4, 7, 64, 1, 0, None])
_SCALED: dict[str, tuple[str, ...]] = {  # keys that each type of RoPE requires
    "default": (),
    "proportional": ("partial_rotary_factor",),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
_DIVISORS = st.integers(1, 12).map(lambda pairs: [1.0 + index / 4 for index in range(pairs)])
_ROPE: dict[str, st.SearchStrategy[Any]] = {
    "factor": st.sampled_from([4.0, 2, 1.0, 0.5, None, "4"]),
    "original_max_position_embeddings": st.sampled_from([8, 16, 128, None]),
    "low_freq_factor": st.sampled_from([1.0, 2, 4.0]),
    "high_freq_factor": st.sampled_from([4.0, 3, 1.0]),
    "short_factor": _DIVISORS, "long_factor": _DIVISORS,
    "attention_factor": st.sampled_from([None, 1.0, 1.3]),
    "beta_fast": st.sampled_from([32, 16.0, None, 0]), "beta_slow": st.sampled_from([1, 2.0, None]),
    "mscale": st.sampled_from([1.0, 0.7, 0.0]), "mscale_all_dim": st.sampled_from([1.0, 0.3, 0.0]),
    "truncate": st.booleans(), "alpha": st.sampled_from([10.0, 1, None]),
    "partial_rotary_factor": st.sampled_from([0.5, 1.0, 0.75, 0.3]),
    "proportion": st.sampled_from([0.5, None]),
    "llama_4_scaling_beta": st.sampled_from([0.1, 0.0, None]),
    "rope_theta": st.sampled_from([1e4, 500, None]), "type": st.sampled_from(list(_SCALED)),
}  # fmt: skip
_KNOWN: dict[str, st.SearchStrategy[Any]] = {
    "sliding_window": _WINDOWS,
    "use_sliding_window": st.booleans(),
    "max_window_layers": st.sampled_from([1, 28]),
    "num_dense_layers": st.sampled_from([0, 1, 2, -1]),
    "mamba_d_ssm": st.sampled_from([16, 64, None, 0]),
    "mamba_d_head": st.sampled_from(["auto", 8, 16]),
    "mlp_multipliers": st.none() | st.lists(st.sampled_from([0.5, 2]), min_size=1, max_size=2),
    "ssm_multipliers": st.none() | st.lists(st.sampled_from([0.5, 1.0, 2]), min_size=4, max_size=5),
    "hybrid_override_pattern": st.sampled_from(["M*-", "*ME-", "M*X-", None]),
    "time_step_min": st.sampled_from([0.001, 0.0, 0.5]),
    "no_rope_layers": st.none() | st.lists(st.integers(0, 1), min_size=2, max_size=4),
    "full_attn_idxs": st.none() | st.lists(st.integers(0, 3), max_size=2),
    "full_attention_interval": st.sampled_from([1, 2, 3]),
    "no_rope_layer_interval": st.sampled_from([1, 2, 4]),
    "layer_rope_theta": st.none() | st.lists(
        st.sampled_from([0, 1e4, 500]), min_size=2, max_size=4
    ),
    "num_attention_heads_per_layer": st.none() | st.lists(
        st.sampled_from([2, 4]), min_size=2, max_size=4
    ),
    "mlp_layer_types": st.none() | st.lists(
        st.sampled_from(["dense", "sparse"]), min_size=2, max_size=4
    ),
    "activation_sparsity_pattern": st.none() | st.lists(
        st.sampled_from([0.0, 0.5, 0.95, -1.0]), min_size=2, max_size=4
    ),
    "gating": st.sampled_from([True, "per-head", "per-element"]),
    "attn_layer_indices": st.none() | st.lists(st.integers(0, 3), max_size=2),
    "mlp_only_layers": st.none() | st.lists(st.integers(0, 4), max_size=2),
    "decoder_sparse_step": st.sampled_from([1, 2, 3, 0]),
    "moe_num_shared_experts": st.sampled_from([0, 1, 2]),
    "moe_layer_start_index": st.sampled_from([0, 1, 2]),
    "moe_layer_end_index": st.sampled_from([-1, 1, 0]),
    "moe_layer_interval": st.sampled_from([1, 2]),
    "moe_norm_min": st.sampled_from([1e-12, 0.6]),
    "clip_qkv": st.sampled_from([None, 0.5, 8.0, 0.0]),
    "scale_depth": st.sampled_from([1.4, None]), "dim_model_base": st.sampled_from([16, None]),
    "swiglu_limit": st.sampled_from([0.5, 7.0, 0.0]),
    "swiglu_alpha": st.sampled_from([1.0, 1.702]),
    "sliding_window_pattern": st.sampled_from([1, 2, 3, "LLG", None]),
    "original_max_position_embeddings": st.sampled_from([8, 64]),
    "partial_rotary_factor": _ROPE["partial_rotary_factor"],
    "rope_theta": _ROPE["rope_theta"], "rope_local_base_freq": _ROPE["rope_theta"],
    "query_pre_attn_scalar": st.sampled_from([8, 256, 0]),
    "global_head_dim": st.sampled_from([8, 24, 32, None]),
    "num_global_key_value_heads": st.sampled_from([1, 2, 4, 0, None]),
    "use_bidirectional_attention": st.sampled_from(["vision", "all", None]),
    **dict.fromkeys(("hidden_act", "hidden_activation", "mlp_hidden_act"),
                    st.sampled_from([*ACTIVATIONS, "relu", "gelu_new", None])),
    **dict.fromkeys(("rms_norm_eps", "post_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps",
                     "layer_norm_epsilon"), st.sampled_from([1e-6, 1e-2, None])),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"),
                    st.sampled_from([None, 2.0, 30, 0.0])),
}  # fmt: skip
_OF_LAYERS = ("layer_types", "layers_block_type")
_BY_LAYER = (
    *_OF_LAYERS,
    "layer_rope_theta",
    "mlp_layer_types",
    "num_attention_heads_per_layer",
    "activation_sparsity_pattern",
)
# Of all classes: of training, of storage, of other tasks.
_OTHERS = frozenset(
    ["transformers_version", "architectures", "output_hidden_states", "return_dict", "dtype",
     "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "problem_type",
     "bos_token_id", "eos_token_id", "use_cache", "initializer_range", "vocab_size",
     "rope_parameters"]
)  # fmt: skip
_LEGACY = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings",
           "sliding_window", "layer_types", "attention_bias")  # fmt: skip


def attending() -> list[str]:
    """Architectures that engines for GPUs take, too: all layers attend to KV of one shape."""
    return [name for name in models.supported() if has_uniform_layers(name)]


def has_uniform_layers(model_type: str) -> bool:
    """Whether each layer attends, with its own KV cache, all of the same shape."""
    facts = _facts(model_type)
    heads = {facts.heads_of(layer) for layer in facts.attending_layers}
    return (
        not facts.is_recurrent
        and len(heads) == 1
        and facts.attending_layers == tuple(range(facts.num_hidden_layers))
    )


def _facts(model_type: str) -> DecoderConfig:
    architecture = models.find(model_type)
    return architecture.Config.from_hf(ConfigReader(copy.deepcopy(architecture.TINY)))


def configs(model_type: str, config_class: type) -> st.SearchStrategy[dict[str, Any]]:
    """config.json of an architecture, right or wrong."""
    fields = {field.name: str(field.type) for field in dataclasses.fields(config_class)}
    tiny = models.find(model_type).TINY
    sizes = {
        key: value
        for key, value in _SIZES.items()
        if (key in fields or key not in _OF_SOME) and tiny.get(key) != 0
    }
    optional = {
        key: _KNOWN[key] if key in _KNOWN else _by_type(fields.get(key, ""))
        for key in (*fields, *_LEGACY)
        if key not in _OTHERS and key not in sizes
    }
    optional |= {key: _KNOWN[key] for key in tiny if key in _KNOWN}
    kinds = st.lists(st.sampled_from(_layer_types(tiny)), min_size=2, max_size=4)
    for key in _OF_LAYERS:
        if key in optional or key in tiny:
            optional[key] = st.none() | kinds
    if "sliding_window" in fields:
        optional["sliding_window_pattern"] = _KNOWN["sliding_window_pattern"]
        optional["rope_local_base_freq"] = _KNOWN["rope_local_base_freq"]
    own = {key: value for key, value in tiny.items() if key not in _SIZES or value == 0}
    rope = own.get("rope_parameters", {})
    changed = st.builds(lambda change: {**rope, **change}, _one(_ROPE))
    ropes = {"rope_parameters": _ropes(), "rope_scaling": _ropes()}
    return st.builds(
        _merged,
        st.just(own),
        st.fixed_dictionaries(sizes),
        _few(optional),
        st.sampled_from(["", "changed", *ropes]).flatmap(
            lambda key: (
                st.just({})
                if not key
                else st.fixed_dictionaries(
                    {"rope_parameters": changed} if key == "changed" else {key: ropes[key]}
                )
            )
        ),
        st.sampled_from([None, None, *own]),
    )


def _layer_types(tiny: dict[str, Any]) -> list[str]:
    """A family's own values of `layer_types`, then foreign ones."""
    own = {each for key in _OF_LAYERS for each in tiny.get(key, ())} | set(_TYPES[:1])
    others = own - {*_TYPES}
    return [*sorted(own), *(["mamba"] if others else _TYPES[1:])]


def _merged(
    own: dict[str, Any],
    sizes: dict[str, Any],
    changes: dict[str, Any],
    rope: dict[str, Any],
    absent: str | None,
) -> dict[str, Any]:
    rope = copy.deepcopy(rope)
    kept = {key: value for key, value in own.items() if not rope or key != "rope_parameters"}
    merged = {**copy.deepcopy(kept), **sizes, **changes, **rope}
    if absent not in (None, "model_type"):
        merged.pop(absent, None)
    for key in _BY_LAYER:
        if isinstance(kinds := merged.get(key), list):
            merged[key] = (kinds * 2)[: merged["num_hidden_layers"]]
    for rope in (merged.get("rope_parameters"), merged.get("rope_scaling")):
        if rope and "short_factor" in rope:
            _fit_factors(rope, merged)
    return merged


def _fit_factors(rope: dict[str, Any], config: dict[str, Any]) -> None:
    """A factor for each pair that RoPE rotates."""
    width = config["hidden_size"] // config["num_attention_heads"]
    turning = int((config.get("head_dim") or width) * rope.get("partial_rotary_factor", 1.0))
    for key in rope.keys() & {"short_factor", "long_factor"}:
        rope[key] = [1.0 + len(key) * index / 20 for index in range(turning // 2)]


def _one(choices: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """None or one of these keys."""
    return st.lists(st.sampled_from(sorted(choices)), max_size=1).flatmap(
        lambda keys: st.fixed_dictionaries({key: choices[key] for key in keys})
    )


def _few(optional: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Some of these keys: one change too many and the rest is never computed."""
    return st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True).flatmap(
        lambda keys: st.fixed_dictionaries({key: optional[key] for key in keys})
    )


def _ropes() -> st.SearchStrategy[Any]:
    flat = st.sampled_from([*_SCALED, "default"]).flatmap(_flat_rope)
    kinds = {"full_attention": flat, "sliding_attention": flat | st.none()}
    return st.one_of(flat, flat, st.fixed_dictionaries(kinds), st.none())


def _flat_rope(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    wanted = {key: _ROPE[key] for key in _SCALED[kind]}
    others = {key: value for key, value in _ROPE.items() if key not in wanted}
    named = st.just({"rope_type": kind, "rope_theta": 1e4})
    return st.builds(
        lambda a, b, c: {**a, **b, **c}, named, st.fixed_dictionaries(wanted), _one(others)
    )


def _by_type(annotation: str) -> st.SearchStrategy[Any]:
    if "bool" in annotation or not annotation:
        return st.sampled_from([True, False, None])
    if "float" in annotation:
        return _FLOATS
    return st.sampled_from([1, 2, 8, None])
