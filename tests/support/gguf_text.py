"""Keys and tensors that llama.cpp's converters write for tiny models without recurrent layers.

Sources: llama.cpp's `conversion/*.py` (base, llama, mistral3, glm, exaone, ernie, hunyuan,
command_r, starcoder, olmo, minicpm, qwen, granite, apertus).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from gguf_mamba import Facts, Tensors, granite_facts, permuted
from safetensors.numpy import load_file

from edgellm.export import models

_S, _F = "sliding_attention", "full_attention"
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [1.0 + i for i in range(8)],
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "beta_fast": 16.0,
    "original_max_position_embeddings": 16,
}


_OF_GEMMA4 = {
    _F: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    _S: {"rope_type": "default", "rope_theta": 1e4},
}


def _tiny(kind: str, **changes: object) -> Facts:
    return {**models.find(kind).TINY, **changes}


# llama.cpp's name of the architecture, and a config that a file can express.
TEXTS: dict[str, tuple[str, Facts]] = {
    "mistral3": ("mistral3", _tiny("ministral3")),
    "mistral3_small": ("mistral3", _tiny("mistral", head_dim=32, sliding_window=None)),
    "glm4": ("glm4", _tiny("glm4", attention_bias=True)),
    "exaone4": (
        "exaone4",
        _tiny("exaone4", layer_types=[_S, _S, _F], sliding_window_pattern=None),
    ),
    "exaone4_without_window": (
        "exaone4",
        _tiny("exaone4", sliding_window=None, sliding_window_pattern=None, layer_types=[_F] * 3),
    ),
    "ernie4_5": ("ernie4_5", _tiny("ernie4_5")),
    "ernie4_5-moe": (
        "ernie4_5-moe",
        _tiny("ernie4_5_moe", intermediate_size=192, num_key_value_heads=2),
    ),
    "hunyuan-dense": (
        "hunyuan-dense",
        _tiny("hunyuan_v1_dense", max_position_embeddings=32 * 1024),
    ),
    "cohere2": (
        "cohere2",
        _tiny("cohere2", num_hidden_layers=5, layer_types=[_S, _S, _S, _F, _S]),
    ),
    "starcoder2": ("starcoder2", _tiny("starcoder2", sliding_window=None)),
    "seed_oss": ("seed_oss", _tiny("seed_oss")),
    "arcee": ("arcee", _tiny("arcee", rope_parameters=_YARN)),
    "apertus": ("apertus", _tiny("apertus")),
    "gemma3n": (
        "gemma3n",
        _tiny("gemma3n_text", altup_num_inputs=4, laurel_rank=64, vocab_size_per_layer_input=96),
    ),
    "gemma4": ("gemma4", _tiny("gemma4_text", rope_parameters=_OF_GEMMA4)),
    "gemma4_equal_kv": (
        "gemma4",
        _tiny(
            "gemma4_text",
            rope_parameters=_OF_GEMMA4,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            num_kv_shared_layers=0,
            use_double_wide_mlp=False,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=32,
        ),
    ),
    "minicpm3": (
        "minicpm3",
        _tiny(
            "minicpm3",
            scale_emb=12,
            scale_depth=1.4,
            dim_model_base=256,
            v_head_dim=16,
            rope_parameters=_LONG,
            max_position_embeddings=512,
        ),
    ),
    "qwen2moe": ("qwen2moe", _tiny("qwen2_moe", mlp_only_layers=[])),
    "olmoe": ("olmoe", _tiny("olmoe", num_key_value_heads=6, clip_qkv=None, rms_norm_eps=1e-5)),
    "granitemoe": ("granitemoe", _tiny("granitemoe")),
    "granitemoe_shared": (
        "granitemoe",
        _tiny("granitemoehybrid", layer_types=["attention"] * 3, position_embedding_type="rope"),
    ),
    "mixtral": ("llama", _tiny("mixtral", sliding_window=None)),
}


def _rope(config: Facts) -> Facts:
    rope = config.get("rope_parameters") or {}
    kind, found = rope.get("rope_type"), {}
    if kind in ("linear", "yarn"):
        found = {"rope.scaling.type": kind, "rope.scaling.factor": rope["factor"]}
    if kind == "longrope" and config["model_type"] != "minicpm3":  # whose converter is older
        found = {"rope.scaling.type": kind}
    if kind == "yarn":
        original = "original_max_position_embeddings"
        found["rope.scaling.original_context_length"] = rope[original]
        keys = {
            "attn_factor": "attention_factor",
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
        }
        for key, theirs in keys.items():
            if rope.get(theirs) is not None:
                found[f"rope.scaling.yarn_{key}"] = rope[theirs]
    return found


def _plain(config: Facts) -> Facts:
    return _rope(config)


def _llama(config: Facts) -> Facts:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {**_rope(config), "vocab_size": config["vocab_size"], "rope.dimension_count": head_dim}


def _mistral3(config: Facts) -> Facts:
    if config["model_type"] != "ministral3":
        return _llama(config)
    rope = config["rope_parameters"]
    return {
        **_llama(config),
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def _glm4(config: Facts) -> Facts:
    turning = config["rope_parameters"]["partial_rotary_factor"]
    return {**_rope(config), "rope.dimension_count": int(config["head_dim"] * turning)}


def _exaone4(config: Facts) -> Facts:
    found = {**_rope(config), "vocab_size": config["vocab_size"]}
    if (window := config["sliding_window"]) is not None:
        found["attention.sliding_window"] = window
        found["attention.sliding_window_pattern"] = [kind == _S for kind in config["layer_types"]]
    return found


def _ernie(config: Facts) -> Facts:
    return {
        **_rope(config),
        "expert_count": config["moe_num_experts"],
        "expert_used_count": config["moe_k"],
        "interleave_moe_layer_step": config["moe_layer_interval"],
        "leading_dense_block_count": config["moe_layer_start_index"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["moe_num_shared_experts"],
        "expert_shared_feed_forward_length": config["intermediate_size"]
        // config["num_key_value_heads"],
    }


def _hunyuan(config: Facts) -> Facts:
    rope, dim = config["rope_parameters"], config["head_dim"]
    return {
        "rope.freq_base": rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2)),
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
        "rope.scaling.original_context_length": 256 * 1024,
        "context_length": 256 * 1024,
    }


def _cohere2(config: Facts) -> Facts:
    return {
        "attention.layer_norm_epsilon": config["layer_norm_eps"],
        "attention.layer_norm_rms_epsilon": None,
        "logit_scale": config["logit_scale"],
        "attention.sliding_window": config["sliding_window"],
        "vocab_size": config["vocab_size"],
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "rope.scaling.type": "none",
    }


def _starcoder2(config: Facts) -> Facts:
    return {
        **_rope(config),
        "attention.layer_norm_epsilon": config["norm_epsilon"],
        "attention.layer_norm_rms_epsilon": None,
    }


def _minicpm3(config: Facts) -> Facts:
    rotary_dim = config["qk_rope_head_dim"]
    return {
        "vocab_size": config["vocab_size"],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "attention.key_length": config["qk_nope_head_dim"] + rotary_dim,
        "attention.value_length": None,
        "rope.dimension_count": rotary_dim,
        "rope.freq_base": None,
    }


def _qwen2moe(config: Facts) -> Facts:
    return {
        **_rope(config),
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
    }


def _granitemoe(config: Facts) -> Facts:
    if config["model_type"] == "granitemoehybrid":  # whose converter writes sizes of Mamba, too
        return {**granite_facts(config), "expert_count": config["num_local_experts"]}
    return {
        **_llama(config),
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
    }


def _three_axes(config: Facts) -> Facts:
    sections = [*config["rope_parameters"]["mrope_section"], 0]
    found = {**_rope(config), "rope.dimension_sections": sections}
    if "levels" in config:  # of DeepStack, by the whole model's config
        found["n_deepstack_layers"] = config["levels"]
    return found


def _gemma3(config: Facts) -> Facts:
    return {
        "rope.freq_base": config["rope_parameters"]["full_attention"]["rope_theta"],
        "attention.sliding_window": config["sliding_window"],
    }


def _gemma3n(config: Facts) -> Facts:
    of_normal = NormalDist()
    rope = config["rope_parameters"]
    return {
        "rope.freq_base": rope[_F]["rope_theta"],
        "rope.freq_base_swa": rope[_S]["rope_theta"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == _S for kind in config["layer_types"]],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "final_logit_softcapping": config["final_logit_softcapping"],
        "altup.active_idx": config["altup_active_idx"],
        "altup.num_inputs": config["altup_num_inputs"],
        "activation_sparsity_scale": [
            of_normal.inv_cdf(share) if share else -math.inf
            for share in config["activation_sparsity_pattern"]
        ],
    }


def _gemma4(config: Facts) -> Facts:
    types, rope = config["layer_types"], config["rope_parameters"]
    layers, num_shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    of_global = config["per_layer_config"][str(types.index(_F))]  # as transformers saves it
    size, full, inner = config["head_dim"], of_global["head_dim"], config["intermediate_size"]
    found = {
        "rope.freq_base": rope[_F]["rope_theta"],
        "rope.freq_base_swa": rope[_S]["rope_theta"],
        "rope.dimension_count": full,
        "rope.dimension_count_swa": size,
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == _S for kind in types],
        "attention.shared_kv_layers": num_shared,
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": size,
        "attention.value_length_swa": size,
        "embedding_length_per_layer_input": config.get("hidden_size_per_layer_input") or 0,
        "final_logit_softcapping": config["final_logit_softcapping"],
    }
    if config.get("use_double_wide_mlp"):
        wide = [layer >= layers - num_shared for layer in range(layers)]
        found["feed_forward_length"] = [inner * (1 + each) for each in wide]
    if (heads := of_global.get("num_key_value_heads")) is not None:
        both = config["num_key_value_heads"], heads
        found["attention.head_count_kv"] = [both[kind == _F] for kind in types]
    if config.get("enable_moe_block"):
        found["expert_used_count"] = config["top_k_experts"]
        found["expert_feed_forward_length"] = config["moe_intermediate_size"]
    return found


def _three_axes_with_experts(config: Facts) -> Facts:
    return {**_three_axes(config), "expert_feed_forward_length": config["moe_intermediate_size"]}


FACTS: dict[str, Callable[[Facts], Facts]] = {
    "mistral3": _mistral3,
    "gemma3": _gemma3,
    "glm4": _glm4,
    "exaone4": _exaone4,
    "ernie4_5": _plain,
    "ernie4_5-moe": _ernie,
    "hunyuan-dense": _hunyuan,
    "cohere2": _cohere2,
    "starcoder2": _starcoder2,
    "seed_oss": _plain,
    "arcee": _llama,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "apertus": _llama,
    "minicpm3": _minicpm3,
    "qwen2moe": _qwen2moe,
    "olmoe": _plain,
    "granitemoe": _granitemoe,
    "llama": _llama,
    "qwen2": _plain,
    "qwen2vl": _three_axes,
    "qwen3vl": _three_axes,
    "qwen3vlmoe": _three_axes_with_experts,
}


def _kept(name: str, array: np.ndarray, config: Facts) -> Tensors:
    del config
    yield name, array


def _turned(name: str, array: np.ndarray, config: Facts) -> Tensors:
    yield name, permuted(name, array, config)


def _shifted(name: str, array: np.ndarray, config: Facts) -> Tensors:
    del config
    yield name, array + np.float32(1) if name.endswith("norm.weight") else array


def _renamed(name: str, array: np.ndarray, config: Facts) -> Tensors:
    """Scales of Gemma 4's experts, which have names of their own."""
    del config
    layer = name.removeprefix("model.layers.").partition(".")[0]
    if name.endswith("router.scale"):
        yield f"blk.{layer}.ffn_gate_inp.scale", array
    elif name.endswith("per_expert_scale"):
        yield f"blk.{layer}.ffn_down_exps.scale", array
    else:
        yield f"{name}.weight" if name.endswith(("layer_scalar", "_proj")) else name, array


def _stacked(name: str, array: np.ndarray, config: Facts) -> Tensors:
    """Scales have an ending, and projections between the states of AltUp are one tensor."""
    del config
    place = {"model.altup_projections": "altup_proj.weight"}
    place["model.altup_unembed_projections"] = "altup_unembd_proj.weight"
    yield place.get(name, f"{name}.weight" if name.endswith("_scale") else name), array


def _without_numbers(name: str, array: np.ndarray, config: Facts) -> Tensors:
    if ".act_fn." not in name:
        yield from _kept(name, array, config)


def write_numbers(writer: Any, folder: Path, layers: int) -> None:
    """Factors of Apertus's activation, of all layers."""
    found = load_file(folder / "model.safetensors")
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        places = [f"model.layers.{layer}.mlp.act_fn.{name}" for layer in range(layers)]
        if places[0] in found:
            getattr(writer, f"add_xielu_{name}")([found[place].item() for place in places])


def _apart(name: str, array: np.ndarray, config: Facts) -> Tensors:
    """Experts in one tensor, as new versions of transformers save them."""
    del config
    if name.endswith("experts.gate_up_proj"):
        for part, half in zip(("gate", "up"), np.split(array, 2, axis=1), strict=True):
            yield name.replace("gate_up_proj", f"{part}_proj.weight"), half
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", array
    else:
        yield name, array


def _granite(name: str, array: np.ndarray, config: Facts) -> Tensors:
    if not name.endswith("input_linear.weight"):
        yield name, permuted(name, array, config)
        return
    kind = "shexp" if "shared_mlp" in name else "exps"
    for part, half in zip(("gate", "up"), np.split(array, 2, axis=-2), strict=True):
        yield f"blk.{name.split('.')[2]}.ffn_{part}_{kind}.weight", half


def _mixtral(name: str, array: np.ndarray, config: Facts) -> Tensors:
    if ".experts." in name:
        name = name.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")
    yield name, permuted(name, array, config)


def llama3_factors(config: Facts) -> np.ndarray:
    """`rope_freqs`: what divides each frequency, by the rule of Llama 3.1."""
    rope = config["rope_parameters"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    found = []
    for index in range(0, dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / dim)
        smooth = (original / wavelength - low) / (high - low)
        found.append(1 / ((1 - smooth) / factor + smooth) if 0 <= smooth <= 1 else 0.0)
        if smooth > 1:
            found[-1] = 1.0
        elif smooth < 0:
            found[-1] = factor
    return np.array(found, np.float32)


def rope_tensors(config: Facts) -> Tensors:
    """Tensors of the RoPE that no checkpoint has."""
    rope = config.get("rope_parameters") or {}
    if _F in rope and rope[_F]["rope_type"] == "proportional":
        full = config["layer_types"].index(_F)
        half = config["per_layer_config"][str(full)]["head_dim"] // 2
        turning = int(half * rope[_F]["partial_rotary_factor"])
        factors = [1.0] * turning + [1e30] * (half - turning)
        yield "rope_freqs.weight", np.array(factors, np.float32)
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", llama3_factors(config)
    for kind in ("short", "long"):
        if f"{kind}_factor" in rope:
            yield f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32)


CONVERT: dict[str, Callable[[str, np.ndarray, Facts], Tensors]] = {
    **dict.fromkeys(FACTS, _kept),
    "mistral3": _turned,
    "qwen3vlmoe": _apart,
    "gemma3": _shifted,
    "arcee": _turned,
    "gemma3n": _stacked,
    "gemma4": _renamed,
    "apertus": _without_numbers,
    "granitemoe": _granite,
    "llama": _mixtral,
}
