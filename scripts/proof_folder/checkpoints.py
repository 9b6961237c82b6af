"""Tiny random checkpoints: of Llama's classes in ModelOpt's layouts, and of a recurrent model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from edgellm.core.commands.extras import install
from edgellm.core.errors import EdgeLLMError
from edgellm.export.models import qwen3_5_text
from edgellm.quantize.formats.modelopt import NVFP4_BLOCK, pack_int4

Tensors = dict[str, NDArray[np.generic]]
F32 = NDArray[np.float32]
_LAYERS, _HIDDEN, _INNER, _HEADS, _KV_HEADS, _VOCABULARY = 2, 256, 256, 4, 2, 108
RANK = 4  # of the LoRA adapter
_LARGEST_INPUT = 16.0  # of quantized layers; larger activations would be clipped
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_E4M3_MAX, _E2M1_MAX = 448.0, 6.0
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def _fp8(weight: F32) -> Tensors:
    scale = np.abs(weight).max() / _E4M3_MAX
    return {
        "weight": (weight / scale).astype(ml_dtypes.float8_e4m3fn),
        "weight_scale": np.array(scale, np.float32),
        "input_scale": np.array(_LARGEST_INPUT / _E4M3_MAX, np.float32),
    }


def _int8(weight: F32) -> Tensors:
    scale = (np.abs(weight).max(axis=1) / 127).astype(np.float32)
    return {
        "weight": np.rint(weight / scale[:, None]).astype(np.int8),
        "weight_scale": scale,
        "input_scale": np.array(_LARGEST_INPUT / 127, np.float32),
    }


def _int4(weight: F32, block_size: int) -> Tensors:
    packed, scale = pack_int4(weight, block_size)
    return {"weight": packed, "weight_scale": scale}


def _nvfp4(weight: F32) -> Tensors:
    blocks = weight.reshape(len(weight), -1, NVFP4_BLOCK)
    of_all = np.float32(np.abs(weight).max() / (_E2M1_MAX * _E4M3_MAX))
    scale = (np.abs(blocks).max(axis=-1) / _E2M1_MAX / of_all).astype(ml_dtypes.float8_e4m3fn)
    ratio = blocks / (scale.astype(np.float32) * of_all)[..., None]
    codes = np.abs(np.abs(ratio)[..., None] - _E2M1).argmin(axis=-1) | (ratio < 0) << 3
    codes = codes.reshape(weight.shape).astype(np.uint8)
    return {
        "weight": codes[:, ::2] | codes[:, 1::2] << 4,
        "weight_scale": scale,
        "weight_scale_2": np.array(of_all),
        "input_scale": np.array(_LARGEST_INPUT / (_E2M1_MAX * _E4M3_MAX), np.float32),
    }


_INT4 = "W4A16_AWQ"
# Name -> (hf_quant_config.json, writer of a linear layer)
PRECISIONS: dict[str, tuple[dict[str, object], Callable[[F32], Tensors] | None]] = {
    "fp16": ({}, None),
    "int4-32": ({"quant_algo": _INT4, "group_size": 32}, partial(_int4, block_size=32)),
    "int4-128": ({"quant_algo": _INT4, "group_size": 128}, partial(_int4, block_size=128)),
    "int8": ({"quant_algo": "W8A8_SQ_PER_CHANNEL"}, _int8),
    "fp8": ({"quant_algo": "FP8"}, _fp8),
    "nvfp4": ({"quant_algo": "NVFP4", "group_size": NVFP4_BLOCK}, _nvfp4),
}


def write_checkpoint(folder: Path, precision: str, tokenizer: Path) -> None:
    """Write the tiny checkpoint in a precision of `PRECISIONS`.

    Args:
        folder: a new folder.
        precision: of its linear layers; all precisions round the same weights.
        tokenizer: folder with tokenizer.json of at most 108 tokens.
    """
    quantization, writer = PRECISIONS[precision]
    tensors: Tensors = {}
    for name, weight in _weights().items():
        if writer is None or not name.endswith("_proj.weight"):
            tensors[name] = weight.astype(np.float16)
            continue
        stored = writer(weight.astype(np.float16).astype(np.float32))
        tensors |= {name.removesuffix("weight") + last: each for last, each in stored.items()}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config()))
    if quantization:
        config = {"quantization": quantization}
        (folder / "hf_quant_config.json").write_text(json.dumps(config))
    _copy_tokenizer(folder, tokenizer)


def write_recurrent(folder: Path, tokenizer: Path) -> None:
    """Write a tiny Qwen3.5 in float16, with gated delta rules and attention; see above.

    Raises:
        EdgeLLMError: torch or transformers is missing.
    """
    for module in ("torch", "transformers"):
        if find_spec(module) is None:
            raise EdgeLLMError(f"a recurrent checkpoint needs {module}", hint=install("host"))
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {**qwen3_5_text.TINY, "vocab_size": _VOCABULARY}
    torch.manual_seed(0)
    config = AutoConfig.for_model(**sizes, initializer_range=0.1, eos_token_id=2)
    model = AutoModelForCausalLM.from_config(config)
    model.to(torch.float16).save_pretrained(folder)
    _copy_tokenizer(folder, tokenizer)


def write_adapter(folder: Path) -> None:
    """Write a random LoRA adapter of all linear layers of the checkpoint in fp16."""
    random = np.random.default_rng(2)
    tensors: dict[str, F32] = {}
    for name, weight in _weights().items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if module.endswith("_proj"):
            for part, shape in (("A", (RANK, weight.shape[1])), ("B", (len(weight), RANK))):
                values = random.normal(0, 0.1, shape).astype(np.float32)
                tensors[f"{module}.lora_{part}.weight"] = values
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _copy_tokenizer(folder: Path, tokenizer: Path) -> None:
    for name in _TOKENIZER:
        shutil.copyfile(tokenizer / name, folder / name)


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "eos_token_id": 2,
    }


def _weights() -> dict[str, F32]:
    """Random weights [out, in]; norms are about 1."""
    random = np.random.default_rng(0)
    kv = _HIDDEN // _HEADS * _KV_HEADS
    shapes = {
        "self_attn.q": (_HIDDEN, _HIDDEN),
        "self_attn.k": (kv, _HIDDEN),
        "self_attn.v": (kv, _HIDDEN),
        "self_attn.o": (_HIDDEN, _HIDDEN),
        "mlp.gate": (_INNER, _HIDDEN),
        "mlp.up": (_INNER, _HIDDEN),
        "mlp.down": (_HIDDEN, _INNER),
    }

    def matrix(rows: int, columns: int) -> F32:
        return (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def norm() -> F32:
        return random.uniform(0.5, 1.5, _HIDDEN).astype(np.float32)

    found = {
        "model.embed_tokens.weight": 16 * matrix(_VOCABULARY, _HIDDEN),
        "lm_head.weight": 4 * matrix(_VOCABULARY, _HIDDEN),
        "model.norm.weight": norm(),
    }
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        found[f"{prefix}.input_layernorm.weight"] = norm()
        found[f"{prefix}.post_attention_layernorm.weight"] = norm()
        for name, shape in shapes.items():
            found[f"{prefix}.{name}_proj.weight"] = matrix(*shape)
    return found
