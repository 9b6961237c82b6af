"""GGUF files of tiny hybrids, as llama.cpp's converters write them from a checkpoint's own files.

Sources: llama.cpp's `conversion/*.py` (base, qwen, kimi_linear; `gguf_mamba` has others); names by
the package gguf.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf_mamba
import gguf_text
import numpy as np
from gguf_files import Encode, is_matrix, write_words
from gguf_mamba import Facts, Tensors
from safetensors.numpy import load_file

from edgellm.export import models


def _tiny(kind: str, **changes: object) -> Facts:
    return {**models.find(kind).TINY, **changes}


_MIXTURE = ["linear_attention", "full_attention", "moe", "moe", "linear_attention"]
_NETWORKS = ["linear_attention", "mlp", "full_attention", "mlp"]
# llama.cpp's name of the architecture, and a config that a file can express.
HYBRIDS: dict[str, tuple[str, Facts]] = {
    "qwen3next": ("qwen3next", _tiny("qwen3_next", mlp_only_layers=[])),
    "qwen35": ("qwen35", _tiny("qwen3_5_text", linear_num_value_heads=6)),
    "qwen35moe": ("qwen35moe", _tiny("qwen3_5_moe_text", tie_word_embeddings=True)),
    "granitehybrid": ("granitehybrid", _tiny("granitemoehybrid")),
    "granitehybrid_dense": (
        "granitehybrid",
        _tiny("granitemoehybrid", num_local_experts=0, intermediate_size=80),
    ),
    "granite_4": (
        "granite",
        _tiny(
            "granitemoehybrid",
            num_local_experts=0,
            layer_types=["attention"] * 3,
            position_embedding_type="rope",
        ),
    ),
    "bamba": ("granitehybrid", _tiny("bamba", attn_rotary_emb=8)),
    "falcon-h1": ("falcon-h1", _tiny("falcon_h1", tie_word_embeddings=False)),
    "falcon-h1_normed": (
        "falcon-h1",
        _tiny(
            "falcon_h1",
            tie_word_embeddings=False,
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
        ),
    ),
    "nemotron_h": ("nemotron_h", _tiny("nemotron_h", layers_block_type=_NETWORKS)),
    "nemotron_h_moe": (
        "nemotron_h_moe",
        _tiny(
            "nemotron_h", layers_block_type=_MIXTURE, moe_latent_size=32, routed_scaling_factor=2.5
        ),
    ),
    "lfm2moe": ("lfm2moe", _tiny("lfm2_moe")),
    "kimi-linear": ("kimi-linear", _tiny("kimi_linear", linear_num_heads=6)),
}


def write_hybrid(
    path: Path,
    arch: str,
    folder: Path,
    encode: Encode | None = None,
    names: Mapping[int, str] | None = None,
    title: str = "",
    **extra: object,
) -> None:
    """Write a checkpoint of float32.

    Args:
        path: of the file.
        arch: llama.cpp's name of the architecture.
        folder: with config.json and one file of weights.
        encode: gives rows and type of each matrix; None is F32.
        names: of some control tokens.
        title: `general.name`.
        extra: keys of the architecture, dots as two underscores.
    """
    import gguf

    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(title)
    layers = config["num_hidden_layers"] = (
        len(config.get("layers_block_type") or ()) or config["num_hidden_layers"]
    )
    facts = {**_facts(config, layers), **_OWN_FACTS[arch](config)}
    facts |= {key.replace("__", "."): value for key, value in extra.items()}
    for key, value in facts.items():
        if value is None:
            continue
        kind = gguf.GGUFValueType.get_type(value)
        if kind == gguf.GGUFValueType.INT32:
            kind = gguf.GGUFValueType.UINT32  # as llama.cpp requires
        writer.add_key_value(f"{arch}.{key}", value, kind)
    write_words(writer, config["vocab_size"], names)
    gguf_text.write_numbers(writer, folder, layers)
    for name, array in tensors(arch, folder, config):
        if encode is not None and is_matrix(name, array):
            rows, kind = encode(name, array)
            writer.add_tensor(name, rows, raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(arch: str, folder: Path, config: Facts) -> Tensors:
    """All tensors by llama.cpp's names."""
    import gguf

    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[arch], config["num_hidden_layers"] + 1)
    for name, array in _stacked(load_file(folder / "model.safetensors")):
        for own, converted in CONVERT[arch](name, array, config):
            if own.startswith(("blk.", "output.", "altup_")):
                yield own, converted
                continue
            own = own.replace("e_score_correction_bias", "e_score_correction.bias")
            place = names.get_name(own, try_suffixes=(".weight", ".bias"))
            assert place is not None, own
            yield place, converted
    yield from gguf_text.rope_tensors(config)


def _stacked(found: dict[str, np.ndarray]) -> Tensors:
    """Separate experts, and projections of AltUp, as one tensor [n, out, in]."""
    experts: dict[str, list[tuple[int, np.ndarray]]] = {}
    for name, array in found.items():
        if match := re.fullmatch(r"(.+\.altup_(?:unembed_)?projections)\.(\d+)\.weight", name):
            experts.setdefault(match[1], []).append((int(match[2]), array))
        elif (match := re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", name)) is None:
            yield name, array
        else:
            title = f"{match[1]}.{match[3]}.weight"
            experts.setdefault(title, []).append((int(match[2]), array))
    for name, parts in experts.items():
        yield name, np.stack([array for _, array in sorted(parts, key=lambda part: part[0])])


def _facts(config: Facts, layers: int) -> Facts:
    """Keys that the base class of all converters writes."""
    keys = {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.value_length": "head_dim",
        "expert_used_count": "num_experts_per_tok",
    }
    found = {key: config[theirs] for key, theirs in keys.items() if config.get(theirs) is not None}
    epsilons = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")
    epsilon = next((config[key] for key in epsilons if key in config), None)
    count = config.get("num_local_experts", config.get("num_experts"))
    rope = config.get("rope_parameters") or {}
    return {
        "block_count": layers,
        **found,
        "attention.layer_norm_rms_epsilon": epsilon,
        **({} if count is None else {"expert_count": count}),
        **({"rope.freq_base": rope["rope_theta"]} if "rope_theta" in rope else {}),
    }


# Qwen3-Next and Qwen3.5.


def _delta_facts(config: Facts) -> Facts:
    turning = (config.get("rope_parameters") or {}).get("partial_rotary_factor", 0.25)
    values = config["linear_num_value_heads"]
    found = {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": values,
        "ssm.inner_size": config["linear_value_head_dim"] * values,
        "full_attention_interval": config.get("full_attention_interval", 2),
        "rope.dimension_count": int(config["head_dim"] * turning),
    }
    for key, theirs in (
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ):
        found |= {key: config[theirs]} if theirs in config else {}
    return found


def _qwen35_facts(config: Facts) -> Facts:
    sections = (config.get("rope_parameters") or {}).get("mrope_section", [11, 11, 10])
    found = {**_delta_facts(config), "rope.dimension_sections": [*sections, 0]}
    if (predicted := config.get("mtp_num_hidden_layers", 0)) > 0:
        found |= {"nextn_predict_layers": predicted}
        found |= {"block_count": config["num_hidden_layers"] + predicted}
    return found


def _qwen3next(name: str, array: np.ndarray, config: Facts) -> Tensors:
    if name.endswith("in_proj_qkvz.weight"):
        layer = name.split(".")[2]
        keys, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
        shared = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
        apart = array.reshape(keys, -1, array.shape[1])
        parts = np.split(apart, np.cumsum([size, size, shared]), axis=1)
        *qkv, z = (part.reshape(-1, array.shape[1]) for part in parts)
        yield f"blk.{layer}.attn_qkv.weight", np.concatenate(qkv)
        yield f"blk.{layer}.attn_gate.weight", z
        return
    yield from delta(name, array)


def delta(name: str, array: np.ndarray) -> Tensors:
    if name.endswith(".A_log"):
        array = -np.exp(array)
    elif name.endswith(".dt_bias"):
        name = name.replace(".dt_bias", ".dt_proj.bias")
    elif "conv1d" in name:
        array = array.squeeze()
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        array = array + np.float32(1)
    if name.endswith("experts.gate_up_proj"):
        for part, half in zip(("gate", "up"), np.split(array, 2, axis=1), strict=True):
            yield name.replace("gate_up_proj", f"{part}_proj.weight"), half
    else:
        yield name, array.squeeze() if "shared_expert_gate" in name else array


def _qwen35(name: str, array: np.ndarray, config: Facts) -> Tensors:
    if name.startswith("mtp."):
        last = config["num_hidden_layers"]
        own = name.removeprefix("mtp.").removesuffix(".weight")
        renamed = {
            "fc": "eh_proj",
            "pre_fc_norm_embedding": "enorm",
            "pre_fc_norm_hidden": "hnorm",
            "norm": "shared_head_norm",
        }
        if own in renamed:
            shift = np.float32(own != "fc")
            yield f"blk.{last}.nextn.{renamed[own]}.weight", array + shift
            return
        name = name.replace("mtp.layers.0.", f"model.layers.{last}.")
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size = config["linear_value_head_dim"]
    before = 2 * keys * config["linear_key_head_dim"]

    def turned(rows: np.ndarray, width: int) -> np.ndarray:
        """[keys, values of a key, width, ...] -> [values of a key, keys, width, ...]."""
        apart = rows.reshape(keys, values // keys, width, *rows.shape[1:])
        return apart.swapaxes(0, 1).reshape(rows.shape)

    if "in_proj_qkv." in name or "conv1d" in name:
        array = np.concatenate([array[:before], turned(array[before:], size)])
    elif "in_proj_z." in name:
        array = turned(array, size)
    elif any(part in name for part in ("in_proj_a.", "in_proj_b.", ".A_log", ".dt_bias")):
        array = turned(array, 1)
    elif "linear_attn.out_proj." in name:
        array = turned(array.T, size).T
    yield from delta(name, array)


# Kimi Linear.


def _kimi_facts(config: Facts) -> Facts:
    rotary_dim, types = config["qk_rope_head_dim"], config["layer_types"]
    return {
        "context_length": config["model_max_length"],
        "vocab_size": config["vocab_size"],
        "rope.freq_base": 10000.0,  # as published, though no layer has RoPE
        "rope.dimension_count": rotary_dim,
        "attention.head_count_kv": [int(kind == "full_attention") for kind in types],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "attention.key_length": config["kv_lora_rank"] + rotary_dim,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotary_dim,
        "attention.value_length_mla": config["v_head_dim"],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "kda.head_dim": config["linear_head_dim"],
        "expert_used_count": config["num_experts_per_token"],
        "expert_gating_func": 2,
        "expert_group_used_count": config["topk_group"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["num_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
    }


def _kimi(name: str, array: np.ndarray, config: Facts) -> Tensors:
    kind = name.rpartition(".")[0].rpartition(".")[2]
    if kind.endswith("_conv1d"):
        array = array.reshape(1, len(array), 1, -1)
    elif name.endswith(".A_log"):
        array = -np.exp(array)
    elif name.endswith(".dt_bias"):
        name = name.replace(".dt_bias", ".dt_proj.bias")
    elif kind == "kv_b_proj":
        heads, fixed = config["num_key_value_heads"], config["qk_nope_head_dim"]
        apart = array.reshape(heads, -1, array.shape[-1])
        yield name.replace("kv_b", "k_b"), apart[:, :fixed].swapaxes(1, 2)
        yield name.replace("kv_b", "v_b"), apart[:, fixed:]
        return
    # Published checkpoints have such names of dense layers, but transformers saves others.
    yield re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", name), array


_OWN_FACTS: dict[str, Callable[[Facts], Facts]] = {
    **gguf_text.FACTS,
    "qwen3next": _delta_facts,
    "qwen35": _qwen35_facts,
    "qwen35moe": _qwen35_facts,
    "granitehybrid": gguf_mamba.granite_facts,
    "granite": gguf_mamba.granite_facts,
    "falcon-h1": gguf_mamba.falcon_facts,
    "nemotron_h": gguf_mamba.nemotron_facts,
    "nemotron_h_moe": gguf_mamba.nemotron_facts,
    "lfm2": gguf_mamba.lfm2_facts,
    "lfm2moe": gguf_mamba.lfm2_facts,
    "kimi-linear": _kimi_facts,
}
CONVERT: dict[str, Callable[[str, np.ndarray, Facts], Tensors]] = {
    **gguf_text.CONVERT,
    "qwen3next": _qwen3next,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "granitehybrid": gguf_mamba.granite,
    "granite": gguf_mamba.granite,
    "falcon-h1": gguf_mamba.falcon,
    "nemotron_h": gguf_mamba.nemotron,
    "nemotron_h_moe": gguf_mamba.nemotron,
    "lfm2": gguf_mamba.lfm2,
    "lfm2moe": gguf_mamba.lfm2,
    "kimi-linear": _kimi,
}
