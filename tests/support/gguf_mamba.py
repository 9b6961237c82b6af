"""Keys and tensors that llama.cpp's converters write for tiny models with Mamba 2 or convolutions.

Sources: llama.cpp's `conversion/*.py` (llama, mamba, granite, falcon_h1, nemotron, lfm2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

Tensors = Iterator[tuple[str, np.ndarray]]
Facts = dict[str, Any]
_FULL = "full_attention"


def _mamba(name: str, array: np.ndarray, groups: int) -> tuple[str, np.ndarray]:
    if name.endswith(".dt_bias"):
        return name.replace(".dt_bias", ".dt_proj.bias"), array
    if "conv1d" in name:
        return name, array.squeeze()
    if name.endswith((".A_log", ".D")):
        return name, (-np.exp(array) if name.endswith(".A_log") else array)[:, None]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return name, array.reshape(groups, -1)
    return name, array


def _mamba_facts(config: Facts) -> Facts:
    return {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.time_step_rank": config["mamba_n_heads"],
    }


def permuted(name: str, array: np.ndarray, config: Facts) -> np.ndarray:
    """Queries and keys with adjacent pairs, as llama.cpp's `LlamaModel.permute`."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for part, key in heads.items():
        if name.endswith((f"{part}.weight", f"{part}.bias")):
            apart = array.reshape(config[key], 2, len(array) // config[key] // 2, *array.shape[1:])
            return apart.swapaxes(1, 2).reshape(array.shape)
    return array


def _bamba_facts(config: Facts) -> Facts:
    heads, indices = config["num_key_value_heads"], config["attn_layer_indices"]
    size = config["hidden_size"] // config["num_attention_heads"]
    return {
        **_mamba_facts(config),
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "rope.scaling.finetuned": True,
        "rope.dimension_count": config.get("attn_rotary_emb", size),
        "attention.head_count_kv": [
            heads * (layer in indices) for layer in range(config["num_hidden_layers"])
        ],
        "vocab_size": config["vocab_size"],
    }


def granite_facts(config: Facts) -> Facts:
    if config["model_type"] == "bamba":
        return _bamba_facts(config)
    attends = [kind in ("attention", "full_attention") for kind in config["layer_types"]]
    found = {
        **_mamba_facts(config),
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
        "rope.scaling.finetuned": all(attends),
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "attention.head_count_kv": [config["num_key_value_heads"] * each for each in attends],
        "vocab_size": config["vocab_size"],
    }
    return found if all(attends) else found | {"context_length": 2**20}


def granite(name: str, array: np.ndarray, config: Facts) -> Tensors:
    layer = name.removeprefix("model.layers.").partition(".")[0]
    has_experts = bool(config.get("num_local_experts"))
    kind = "_shexp" if has_experts else ""
    if name.endswith("input_linear.weight"):
        ending = "_exps" if "block_sparse_moe" in name else kind
        for part, half in zip(("gate", "up"), np.split(array, 2, axis=-2), strict=True):
            yield f"blk.{layer}.ffn_{part}{ending}.weight", half
    elif name.endswith("shared_mlp.output_linear.weight"):
        yield f"blk.{layer}.ffn_down{kind}.weight", array
    else:
        yield _mamba(name, permuted(name, array, config), config["mamba_n_groups"])


def falcon_facts(config: Facts) -> Facts:
    inner, heads = config["mamba_d_ssm"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    found = {"attention.key_length": head_dim, "attention.value_length": head_dim}
    return {**_mamba_facts(config), "ssm.inner_size": inner, **found}


def falcon(name: str, array: np.ndarray, config: Facts) -> Tensors:
    name, array = _mamba(name, array, config["mamba_n_groups"])
    gate, down = config["mlp_multipliers"]
    factors = {
        "down_proj": down,
        "gate_proj": gate,
        "q_proj": config["attention_in_multiplier"],
        "k_proj": config["key_multiplier"] * config["attention_in_multiplier"],
        "v_proj": config["attention_in_multiplier"],
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    module = name.split(".")[-2]
    array = array * np.float32(factors.get(module, 1))
    if module == "in_proj":
        inner, shared = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        widths = inner, inner, shared, shared, config["mamba_n_heads"]
        each = np.repeat(np.float32(config["ssm_multipliers"]), widths)
        array = array * np.float32(config["ssm_in_multiplier"]) * each[:, None]
    yield name, array


def nemotron_facts(config: Facts) -> Facts:
    types = config["layers_block_type"]
    has_experts = "moe" in types
    width = config["moe_intermediate_size"] if has_experts else config["intermediate_size"]
    kind, heads = "moe" if has_experts else "mlp", config["num_key_value_heads"]
    found = {
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.time_step_rank": config["mamba_num_heads"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "attention.head_count_kv": [heads * (each == _FULL) for each in types],
        "feed_forward_length": [width * (each == kind) for each in types],
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "rope.scaling.finetuned": False,
        "context_length": 2**20,
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
    }
    keys = {
        "expert_count": "n_routed_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "expert_shared_count": "n_shared_experts",
        "expert_weights_norm": "norm_topk_prob",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_group_count": "n_group",
        "moe_latent_size": "moe_latent_size",
    }
    own = {key: config[theirs] for key, theirs in keys.items() if has_experts}
    return {**found, **own} if has_experts else {**found, "expert_count": 0}


def nemotron(name: str, array: np.ndarray, config: Facts) -> Tensors:
    array = permuted(name, array, config)
    if name.endswith("e_score_correction_bias"):
        name = name.replace("correction_bias", "correction.bias")
    elif ".mixer.experts." in name:
        name = name.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
    yield _mamba(name, array, config["n_groups"])


def lfm2_facts(config: Facts) -> Facts:
    heads = config["num_key_value_heads"]
    found = {
        "attention.head_count_kv": [heads * (each == _FULL) for each in config["layer_types"]],
        "vocab_size": config["vocab_size"],
        "shortconv.l_cache": config["conv_L_cache"],
    }
    if "moe_intermediate_size" not in config:
        return found
    return {
        **found,
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "leading_dense_block_count": config["num_dense_layers"],
        "expert_gating_func": 2,
    }


def lfm2(name: str, array: np.ndarray, config: Facts) -> Tensors:
    del config
    if name.endswith("expert_bias"):
        name = f"{name}.bias"
    if ".feed_forward.experts." in name:
        name = name.removeprefix("model.")
    yield name, array.squeeze(1) if "conv.conv" in name else array
