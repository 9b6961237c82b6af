"""GGUF files of tiny vision-language models: the language model's and the encoder's (mmproj).

Source: llama.cpp's `conversion/*.py` (base, qwenvl, qwen3vl, smolvlm, internvl, gemma, llava,
lfm2).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_hybrids import write_hybrid
from gguf_mamba import Facts, Tensors, permuted
from safetensors.numpy import load_file, save_file

from edgellm.multimodal.processors.pixels import CLIP_MEAN, CLIP_STD

Encode = Callable[[str, np.ndarray], tuple[np.ndarray, Any] | None]
_GEMMA4 = {90: "<|image|>", 88: "<|image>", 89: "<image|>"}
_QWEN = {90: "<|image_pad|>", 91: "<|video_pad|>", 92: "<|vision_start|>", 93: "<|vision_end|>"}
# Projector type, architecture of the language model, and names of tokens.
ENCODERS: dict[str, tuple[str, str, dict[int, str]]] = {
    "qwen2_vl": ("qwen2vl_merger", "qwen2vl", _QWEN),
    "qwen2_5_vl": ("qwen2.5vl_merger", "qwen2vl", _QWEN),
    "qwen3_vl": ("qwen3vl_merger", "qwen3vl", _QWEN),
    "qwen3_vl_moe": ("qwen3vl_merger", "qwen3vlmoe", _QWEN),
    "qwen3_5": ("qwen3vl_merger", "qwen35", _QWEN),
    "qwen3_5_moe": ("qwen3vl_merger", "qwen35moe", _QWEN),
    "idefics3": ("idefics3", "llama", {90: "<image>"}),
    "smolvlm": ("idefics3", "llama", {90: "<image>"}),
    "internvl": ("internvl", "qwen2", {90: "<IMG_CONTEXT>"}),
    "gemma3": ("gemma3", "gemma3", {90: "<image_soft_token>"}),
    "gemma4": ("gemma4v", "gemma4", _GEMMA4),
    "gemma4_unified": ("gemma4uv", "gemma4", _GEMMA4),
    "mistral3": ("pixtral", "mistral3", {90: "[IMG]"}),
    "lfm2_vl": ("lfm2", "lfm2", {90: "<image>"}),
}
_WITH_SOUNDS = ("gemma4v", "gemma4uv")  # the converter's class also converts encoders of sounds
_TEXT = ("model.language_model.", "model.text_model.", "language_model.model.")
_PLAIN = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.", "mtp.")


def write_vlm(
    folder: Path, checkpoint: Path, *, text: Facts | None = None, encode: Encode | None = None
) -> Path:
    """Write both files of a model into a folder: `model.gguf`, which is returned, and its mmproj.

    Args:
        folder: of the files.
        checkpoint: of Hugging Face, in one file.
        text: further keys of the language model's file, with their dots as two underscores.
        encode: gives rows and type of an encoder's tensor, None: as it is.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    kind, arch, names = ENCODERS[config["model_type"]]
    own = folder / "text"
    own.mkdir(parents=True)
    inner = dict(config["text_config"])
    inner.setdefault("head_dim", None)
    if arch.startswith("qwen3vl"):
        inner["levels"] = len(config["vision_config"]["deepstack_visual_indexes"])
    (own / "config.json").write_text(json.dumps(inner))
    tensors = load_file(checkpoint / "model.safetensors")
    save_file(dict(_of_text(tensors)), own / "model.safetensors")
    path = folder / "model.gguf"
    title = "SmolVLM2 Tiny" if config["model_type"] == "smolvlm" else ""
    write_hybrid(path, arch, own, names=names, title=title, **(text or {}))
    write_encoder(folder / "mmproj-model-f32.gguf", kind, checkpoint, encode)
    return path


def _of_text(tensors: dict[str, np.ndarray]) -> Tensors:
    for name, array in tensors.items():
        prefix = next((each for each in _TEXT if name.startswith(each)), None)
        if prefix is not None:
            yield f"model.{name.removeprefix(prefix)}", array
        elif name.removeprefix("language_model.").startswith(_PLAIN):
            yield name.removeprefix("language_model."), array


def write_encoder(
    path: Path,
    kind: str,
    checkpoint: Path,
    encode: Encode | None = None,
    more: Facts | None = None,
) -> None:
    """Write the encoder's file of a checkpoint.

    Args:
        path: of the file.
        kind: projector type.
        checkpoint: see `write_vlm`.
        encode: see `write_vlm`.
        more: further keys.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    image = json.loads((checkpoint / "preprocessor_config.json").read_text())
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    place = "vision." if kind in _WITH_SOUNDS else ""
    writer.add_string(f"clip.{place}projector_type", kind)
    facts = {**_facts(config, image), **_OWN[kind](config, image), **(more or {})}
    for key, value in facts.items():
        named = gguf.GGUFValueType.get_type(value)
        if named == gguf.GGUFValueType.INT32:
            named = gguf.GGUFValueType.UINT32
        writer.add_key_value(f"clip.{key}", value, named)
    for name, array in load_file(checkpoint / "model.safetensors").items():
        for own, converted in _CONVERT[kind](name.removeprefix("model."), array, config):
            array = np.ascontiguousarray(converted, np.float32)
            found = None if encode is None else encode(own, array)
            if found is None:
                writer.add_tensor(own, array)
            else:
                writer.add_tensor(own, found[0], raw_dtype=found[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _facts(config: Facts, image: Facts) -> Facts:
    """Keys that the base class of all encoders writes."""
    vision = config["vision_config"]
    return {
        "has_vision_encoder": True,
        "vision.projection_dim": config["text_config"]["hidden_size"],
        "vision.image_size": np.max(vision.get("image_size", 560)).item(),
        "vision.patch_size": np.max(vision["patch_size"]).item(),
        "vision.embedding_length": vision.get("embed_dim", vision.get("hidden_size", 0)),
        "vision.feed_forward_length": vision.get("intermediate_size", vision.get("hidden_size", 0)),
        "vision.block_count": vision.get("depth", vision.get("num_hidden_layers")),
        "vision.attention.head_count": vision.get("num_heads", vision.get("num_attention_heads")),
        "vision.image_mean": image.get("image_mean", list(CLIP_MEAN)),
        "vision.image_std": image.get("image_std", list(CLIP_STD)),
    }


def _qwen2(config: Facts, image: Facts) -> Facts:
    del config, image
    return {"vision.attention.layer_norm_epsilon": 1e-6}


def _qwen2_5(config: Facts, image: Facts) -> Facts:
    period = config["vision_config"]["fullatt_block_indexes"][0] + 1
    return {**_qwen2(config, image), "use_silu": True, "vision.n_wa_pattern": period}


def _qwen3(config: Facts, image: Facts) -> Facts:
    del image
    vision = config["vision_config"]
    levels = vision.get("deepstack_visual_indexes", [])
    side = round(vision["num_position_embeddings"] ** 0.5)
    return {
        "use_gelu": True,
        "vision.image_size": side * vision["patch_size"],
        "vision.spatial_merge_size": vision["spatial_merge_size"],
        "vision.attention.layer_norm_epsilon": config["text_config"].get("rms_norm_eps", 1e-6),
        "vision.is_deepstack_layers": [index in levels for index in range(vision["depth"])],
    }


def _idefics3(config: Facts, image: Facts) -> Facts:
    return {
        "use_gelu": True,
        "vision.attention.layer_norm_epsilon": config["vision_config"].get("layer_norm_eps", 1e-5),
        "vision.projector.scale_factor": config["scale_factor"],
        "vision.preproc_image_size": image["size"]["longest_edge"],
    }


def _internvl(config: Facts, image: Facts) -> Facts:
    del image
    return {
        "use_gelu": True,
        "vision.attention.layer_norm_epsilon": config["vision_config"]["layer_norm_eps"],
        "vision.projector.scale_factor": int(1 / config["downsample_ratio"]),
    }


def _gemma3(config: Facts, image: Facts) -> Facts:
    vision = config["vision_config"]
    side = vision["image_size"] // vision["patch_size"]
    shuffle = side // round(image["image_seq_length"] ** 0.5)
    return {
        "use_gelu": True,
        "vision.attention.layer_norm_epsilon": vision["layer_norm_eps"],
        **({} if shuffle == 4 else {"vision.projector.scale_factor": shuffle}),
    }


def _pixtral(config: Facts, image: Facts) -> Facts:
    del image
    return {
        "use_silu" if config["vision_config"]["hidden_act"] == "silu" else "use_gelu": True,
        "vision.attention.layer_norm_epsilon": 1e-5,
        "vision.spatial_merge_size": config["spatial_merge_size"],
    }


def _lfm2(config: Facts, image: Facts) -> Facts:
    del image
    return {
        "use_gelu": True,
        "vision.attention.layer_norm_epsilon": config["vision_config"]["layer_norm_eps"],
        "vision.projector.scale_factor": config["downsample_factor"],
    }


def _gemma4(config: Facts, image: Facts) -> Facts:
    """Also of the encoder of sounds that E2B and E4B have in the same file."""
    del image
    vision = config["vision_config"]
    found = {
        "vision.image_size": 224,
        "vision.attention.layer_norm_epsilon": 1e-6,
        "has_audio_encoder": True,
        "audio.projector_type": "gemma4a",
        "audio.num_mel_bins": 128,
    }
    if vision["pooling_kernel_size"] != 3:  # which no published model has
        found["vision.projector.scale_factor"] = vision["pooling_kernel_size"]
    return found


def _gemma4_unified(config: Facts, image: Facts) -> Facts:
    none = ("feed_forward_length", "block_count", "attention.head_count")
    return {
        **_gemma4(config, image),
        **{f"vision.{key}": 0 for key in none},
        "vision.embedding_length": config["vision_config"]["mm_embed_dim"],
        "audio.projector_type": "gemma4ua",
    }


_OWN: dict[str, Callable[[Facts, Facts], Facts]] = {
    "gemma4v": _gemma4,
    "gemma4uv": _gemma4_unified,
    "qwen2vl_merger": _qwen2,
    "qwen2.5vl_merger": _qwen2_5,
    "qwen3vl_merger": _qwen3,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "gemma3": _gemma3,
    "pixtral": _pixtral,
    "lfm2": _lfm2,
}


def _qwen_tensors(name: str, array: np.ndarray, config: Facts) -> Tensors:
    if not name.startswith("visual."):
        return
    own = name.removeprefix("visual.")
    stem, _, kind = own.rpartition(".")
    if own == "patch_embed.proj.weight":
        yield "v.patch_embd.weight", array[:, :, 0]
        yield "v.patch_embd.weight.1", array[:, :, 1]
    elif stem.endswith("attn.qkv") and config["model_type"].startswith("qwen2"):
        for part, rows in zip("qkv", np.split(array, 3), strict=True):
            yield f"v.blk.{own.split('.')[1]}.attn_{part}.{kind}", rows
    elif own.startswith("blocks."):
        _, index, module = stem.split(".", 2)
        yield f"v.blk.{index}.{_BLOCK[module]}.{kind}", array
    elif own.startswith("deepstack_merger_list."):
        _, level, module = stem.split(".")
        block = config["vision_config"]["deepstack_visual_indexes"][int(level)]
        yield f"v.deepstack.{block}.{module.replace('linear_', '')}.{kind}", array
    else:
        yield f"{_QWEN_MODULES[stem]}.{kind}", array


_BLOCK = {
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "norm1": "ln1",
    "norm2": "ln2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}
_QWEN_MODULES = {
    "patch_embed.proj": "v.patch_embd",
    "pos_embed": "v.position_embd",
    "merger.ln_q": "v.post_ln",
    "merger.norm": "v.post_ln",
    "merger.mlp.0": "mm.0",
    "merger.mlp.2": "mm.2",
    "merger.linear_fc1": "mm.0",
    "merger.linear_fc2": "mm.2",
}
_SIGLIP = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
_SIGLIP_MODULES = {
    "vision_model.embeddings.patch_embedding": "v.patch_embd",
    "vision_model.embeddings.position_embedding": "v.position_embd",
    "vision_model.post_layernorm": "v.post_ln",
    "connector.modality_projection.proj": "mm.model.fc",
}
_INTERN = {
    "attention.q_proj": "attn_q",
    "attention.k_proj": "attn_k",
    "attention.v_proj": "attn_v",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention.projection_layer": "attn_out",
    "layernorm_before": "ln1",
    "layernorm_after": "ln2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
_INTERN_MODULES = {
    "vision_tower.embeddings.patch_embeddings.projection": "v.patch_embd",
    "vision_tower.layernorm": "v.post_ln",
    "multi_modal_projector.layer_norm": "mm.model.mlp.0",
    "multi_modal_projector.linear_1": "mm.model.mlp.1",
    "multi_modal_projector.linear_2": "mm.model.mlp.3",
}


def _siglip_tensors(name: str, array: np.ndarray, config: Facts) -> Tensors:
    del config
    stem, _, kind = name.rpartition(".")
    if name.startswith("vision_model.encoder.layers."):
        index, module = stem.split(".", 4)[3:]
        yield f"v.blk.{index}.{_SIGLIP[module]}.{kind}", array
    elif stem in _SIGLIP_MODULES:
        yield f"{_SIGLIP_MODULES[stem]}.{kind}", array


def _intern_tensors(name: str, array: np.ndarray, config: Facts) -> Tensors:
    del config
    stem, _, kind = name.rpartition(".")
    if name.startswith("vision_tower.encoder.layer."):
        index, module = name.split(".", 4)[3:]
        if module.startswith("lambda_"):
            yield f"v.blk.{index}.ls{module[-1]}.weight", array
        else:
            module, _, kind = module.rpartition(".")
            yield f"v.blk.{index}.{_INTERN[module]}.{kind}", array
    elif name == "vision_tower.embeddings.cls_token":
        yield "v.class_embd", array
    elif name == "vision_tower.embeddings.position_embeddings":
        yield "v.position_embd.weight", array
    elif stem in _INTERN_MODULES:
        yield f"{_INTERN_MODULES[stem]}.{kind}", array


def _tower_tensors(name: str, array: np.ndarray, config: Facts) -> Tensors:
    own = name.removeprefix("vision_tower.").removeprefix("vision_model.")
    if own != name:
        yield from _siglip_tensors(f"vision_model.{own}", array, config)


def _gemma3_tensors(name: str, array: np.ndarray, config: Facts) -> Tensors:
    if name == "multi_modal_projector.mm_input_projection_weight":
        yield "mm.input_projection.weight", array
    elif name == "multi_modal_projector.mm_soft_emb_norm.weight":
        yield "mm.soft_emb_norm.weight", array + np.float32(1)
    else:
        yield from _tower_tensors(name, array, config)


def _pixtral_tensors(name: str, array: np.ndarray, config: Facts) -> Tensors:
    stem, _, kind = name.rpartition(".")
    if name.startswith("vision_tower.transformer.layers."):
        index, module = stem.split(".", 4)[3:]
        heads = config["vision_config"]["num_attention_heads"]
        counts = {"num_attention_heads": heads, "num_key_value_heads": heads}
        yield f"v.blk.{index}.{_PIXTRAL[module]}.{kind}", permuted(name, array, counts)
    elif stem in _PIXTRAL_MODULES:
        yield f"{_PIXTRAL_MODULES[stem]}.{kind}", array
    elif stem.endswith("embed_tokens"):
        yield "v.token_embd.img_break", array[91]


def _lfm2_tensors(name: str, array: np.ndarray, config: Facts) -> Tensors:
    stem, _, kind = name.rpartition(".")
    if stem in _LFM2_MODULES:
        yield f"{_LFM2_MODULES[stem]}.{kind}", array
        return
    for own, converted in _tower_tensors(name, array, config):
        if own == "v.patch_embd.weight":
            side = config["vision_config"]["patch_size"]
            converted = converted.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
        yield own, converted


def _gemma4_tensors(name: str, array: np.ndarray, config: Facts) -> Tensors:
    """Of the whole tower; bounds of clipped layers are vectors of one number."""
    own = name.removeprefix("vision_tower.")
    if own.startswith("encoder.layers."):
        index, module = own.split(".", 3)[2:]
        module, _, kind = module.rpartition(".")
        place = _GEMMA4_BLOCK[module.removesuffix(".linear")]
        yield f"v.blk.{index}.{place}.{kind}", array.reshape(array.shape or 1)
    elif own == "patch_embedder.input_proj.weight":
        side = config["vision_config"]["patch_size"]
        yield "v.patch_embd.weight", array.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
    elif name in _GEMMA4_WHOLE:
        yield _GEMMA4_WHOLE[name], array
    if name == "embed_vision.embedding_projection.weight":  # tensors of sounds are in the file, too
        yield "a.blk.0.ffn_up.weight", array
        yield "mm.a.input_projection.weight", array


def _gemma4_unified_tensors(name: str, array: np.ndarray, config: Facts) -> Tensors:
    vision = config["vision_config"]
    side = vision["patch_size"] * vision["pooling_kernel_size"]
    own, _, kind = name.removeprefix("vision_embedder.").partition(".")
    if name == "embed_vision.embedding_projection.weight":
        yield "mm.input_projection.weight", array
    elif name == "vision_embedder.pos_embedding":
        yield "v.position_embd.weight", array.transpose(1, 0, 2)
    elif own in ("patch_ln1", "patch_dense") and array.shape[-1] == 3 * side**2:
        place = "v.patch_norm.1" if own == "patch_ln1" else "v.patch_embd"
        channel, row, column = np.unravel_index(np.arange(3 * side**2), (3, side, side))
        yield f"{place}.{kind}", array[..., (row * side + column) * 3 + channel]
    elif name.startswith("vision_embedder."):
        places = {"patch_dense": "v.patch_embd", "patch_ln2": "v.patch_norm.2"}
        yield f"{places.get(own, 'v.patch_norm.3')}.{kind}", array


_GEMMA4_BLOCK = {
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    "self_attn.o_proj": "attn_out",
    "input_layernorm": "ln1",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
_GEMMA4_WHOLE = {
    "vision_tower.patch_embedder.position_embedding_table": "v.position_embd.weight",
    "vision_tower.std_bias": "v.std_bias",
    "vision_tower.std_scale": "v.std_scale",
    "embed_vision.embedding_projection.weight": "mm.input_projection.weight",
}
_PIXTRAL = {
    "attention.q_proj": "attn_q",
    "attention.k_proj": "attn_k",
    "attention.v_proj": "attn_v",
    "attention.o_proj": "attn_out",
    "attention_norm": "ln1",
    "ffn_norm": "ln2",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
}
_PIXTRAL_MODULES = {
    "vision_tower.patch_conv": "v.patch_embd",
    "vision_tower.ln_pre": "v.pre_ln",
    "multi_modal_projector.norm": "mm.input_norm",
    "multi_modal_projector.patch_merger.merging_layer": "mm.patch_merger",
    "multi_modal_projector.linear_1": "mm.1",
    "multi_modal_projector.linear_2": "mm.2",
}
_LFM2_MODULES = {
    "multi_modal_projector.layer_norm": "mm.input_norm",
    "multi_modal_projector.linear_1": "mm.1",
    "multi_modal_projector.linear_2": "mm.2",
}
_CONVERT: dict[str, Callable[[str, np.ndarray, Facts], Tensors]] = {
    "qwen2vl_merger": _qwen_tensors,
    "qwen2.5vl_merger": _qwen_tensors,
    "qwen3vl_merger": _qwen_tensors,
    "idefics3": _siglip_tensors,
    "internvl": _intern_tensors,
    "gemma3": _gemma3_tensors,
    "gemma4v": _gemma4_tensors,
    "gemma4uv": _gemma4_unified_tensors,
    "pixtral": _pixtral_tensors,
    "lfm2": _lfm2_tensors,
}
