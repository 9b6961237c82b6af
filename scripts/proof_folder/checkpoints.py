"""Tiny random checkpoints of the proof: dense, recurrent and mixed models, in ModelOpt's layouts.

Each is written twice: as a board's model is stored, and as the float32 weights that it stands for.
Writers follow the layouts' definitions and use no packing of edgellm.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from edgellm.export import models

Tensors = dict[str, NDArray[np.generic]]
F32 = NDArray[np.float32]
LARGEST_INPUT = 16.0  # of quantized layers; larger activations would be clipped
RANK = 4  # of the LoRA adapter
_LAYERS, _HIDDEN, _INNER, _HEADS, _KV_HEADS, _VOCABULARY = 2, 256, 256, 4, 2, 108
_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_E4M3_MAX, _E2M1_MAX = 448.0, 6.0
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_NVFP4_BLOCK, _MXFP4_BLOCK = 16, 32
_SEED = 0


def _fp8(weight: F32) -> tuple[Tensors, F32]:
    scale = np.float32(np.abs(weight).max() / _E4M3_MAX)
    codes = (weight / scale).astype(ml_dtypes.float8_e4m3fn)
    tensors = {
        "weight": codes,
        "weight_scale": np.array(scale),
        "input_scale": np.array(LARGEST_INPUT / _E4M3_MAX, np.float32),
    }
    return tensors, codes.astype(np.float32) * scale


def _int8(weight: F32) -> tuple[Tensors, F32]:
    scale = (np.abs(weight).max(axis=1) / 127).astype(np.float32)
    codes = np.rint(weight / scale[:, None]).astype(np.int8)
    tensors = {
        "weight": codes,
        "weight_scale": scale,
        "input_scale": np.array(LARGEST_INPUT / 127, np.float32),
    }
    return tensors, codes * scale[:, None]


def _int4(weight: F32, block_size: int) -> tuple[Tensors, F32]:
    blocks = weight.reshape(len(weight), -1, block_size)
    scale = (np.abs(blocks).max(axis=-1) / 7).astype(np.float32)
    codes = np.rint(blocks / scale[..., None]).astype(np.int8)
    nibbles = codes.reshape(weight.shape).view(np.uint8) & 15  # two outputs share a byte
    tensors = {"weight": nibbles[0::2] | nibbles[1::2] << 4, "weight_scale": scale}
    return tensors, (codes * scale[..., None]).reshape(weight.shape)


def _nvfp4(weight: F32) -> tuple[Tensors, F32]:
    blocks = weight.reshape(len(weight), -1, _NVFP4_BLOCK)
    of_all = np.float32(np.abs(weight).max() / (_E2M1_MAX * _E4M3_MAX))
    scale = (np.abs(blocks).max(axis=-1) / _E2M1_MAX / of_all).astype(ml_dtypes.float8_e4m3fn)
    step = (scale.astype(np.float32) * of_all)[..., None]
    codes = _e2m1_codes(blocks / step)
    tensors = {
        "weight": _pack_pairs(codes.reshape(weight.shape)),
        "weight_scale": scale,
        "weight_scale_2": np.array(of_all),
        "input_scale": np.array(LARGEST_INPUT / (_E2M1_MAX * _E4M3_MAX), np.float32),
    }
    return tensors, (_e2m1_values(codes) * step).reshape(weight.shape)


def _mxfp4(weight: F32) -> tuple[Tensors, F32]:
    """Experts [E, in, out] as gpt-oss stores them: blocks along the input, scales 2**n."""
    blocks = weight.swapaxes(1, 2).reshape(len(weight), weight.shape[2], -1, _MXFP4_BLOCK)
    exponents = np.ceil(np.log2(np.abs(blocks).max(axis=-1) / _E2M1_MAX))
    step = np.exp2(exponents)[..., None].astype(np.float32)
    codes = _e2m1_codes(blocks / step)
    tensors = {"blocks": _pack_pairs(codes), "scales": (exponents + 127).astype(np.uint8)}
    values = (_e2m1_values(codes) * step).reshape(*weight.swapaxes(1, 2).shape)
    return tensors, np.ascontiguousarray(values.swapaxes(1, 2))


def _e2m1_codes(ratio: F32) -> NDArray[np.uint8]:
    nearest = np.abs(np.abs(ratio)[..., None] - _E2M1).argmin(axis=-1)
    return (nearest | (ratio < 0) << 3).astype(np.uint8)


def _e2m1_values(codes: NDArray[np.uint8]) -> F32:
    return np.concatenate([_E2M1, -_E2M1])[codes]


def _pack_pairs(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return codes[..., ::2] | codes[..., 1::2] << np.uint8(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How weights are stored."""

    config: Mapping[str, object] = field(default_factory=dict)  # in hf_quant_config.json
    # The tensors of a weight, and the values that they stand for; None: as it is
    write: Callable[[F32], tuple[Tensors, F32]] | None = None
    suffix: str = "_proj.weight"  # of the names of such weights
    own_config: Mapping[str, object] = field(default_factory=dict)  # further keys of config.json

    def names(self, weight: str, last: str) -> str:
        """The name of a stored tensor."""
        if weight.endswith("weight"):
            return weight.removesuffix("weight") + last
        return f"{weight}_{last}"


_INT4 = "W4A16_AWQ"
PRECISIONS = {
    "fp16": Precision(),
    "int4-32": Precision(
        config={"quant_algo": _INT4, "group_size": 32}, write=partial(_int4, block_size=32)
    ),
    "int4-128": Precision(
        config={"quant_algo": _INT4, "group_size": 128}, write=partial(_int4, block_size=128)
    ),
    "int8": Precision(config={"quant_algo": "W8A8_SQ_PER_CHANNEL"}, write=_int8),
    "fp8": Precision(config={"quant_algo": "FP8"}, write=_fp8),
    "nvfp4": Precision(config={"quant_algo": "NVFP4", "group_size": _NVFP4_BLOCK}, write=_nvfp4),
    "mxfp4": Precision(
        write=_mxfp4,
        suffix="_proj",
        own_config={"quantization_config": {"quant_method": "mxfp4"}},
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """A tiny model."""

    precision: str = "fp16"  # of `PRECISIONS`
    sizes: Mapping[str, Any] = field(default_factory=dict)  # transformers' config; {}: a Llama
    has_adapter: bool = False
    is_recurrent: bool = False
    has_experts: bool = False


def _sizes(model_type: str, **others: object) -> dict[str, Any]:
    return {**models.find(model_type).TINY, "vocab_size": _VOCABULARY, **others}


ADAPTED = "lora"  # its outputs are with an adapter
MODELS = {
    **{
        name: Tiny(precision=name)
        for name in ("fp16", "int4-32", "int4-128", "int8", "fp8", "nvfp4")
    },
    ADAPTED: Tiny(has_adapter=True),
    "delta-rule": Tiny(sizes=_sizes("qwen3_5_text"), is_recurrent=True),
    "short-convolution": Tiny(sizes=_sizes("lfm2"), is_recurrent=True),
    "mamba2": Tiny(sizes=_sizes("bamba"), is_recurrent=True),
    # ONNX Runtime on CUDA takes integer experts with multiples of 64
    "experts-int4": Tiny(
        precision="int4-32",
        sizes=_sizes("qwen3_moe", hidden_size=128, head_dim=32, moe_intermediate_size=64),
        has_experts=True,
    ),
    "experts-mxfp4": Tiny(
        precision="mxfp4",
        sizes=_sizes("gpt_oss", hidden_size=128, intermediate_size=64),
        has_experts=True,
    ),
    "convolution-experts": Tiny(sizes=_sizes("lfm2_moe"), is_recurrent=True, has_experts=True),
}


def write_checkpoints(
    name: str, stored: Path, exact: Path, tokenizer: Path, adapter: Path | None = None
) -> None:
    """Write a model of `MODELS` as it is stored, and its weights in float32.

    Args:
        name: of the model.
        stored: a new folder.
        exact: a new folder of the float32 weights that `stored` stands for, adapter included.
        tokenizer: folder with tokenizer.json of at most 108 tokens.
        adapter: a new folder of the LoRA adapter, if the model has one.
    """
    tiny = MODELS[name]
    weights, config = _random_model(tiny.sizes) if tiny.sizes else (_weights(), _config())
    precision = PRECISIONS[tiny.precision]
    tensors: Tensors = {}
    values: dict[str, F32] = {}
    for key, weight in weights.items():
        rounded = weight.astype(np.float16)
        tensors[key], values[key] = rounded, rounded.astype(np.float32)
        if precision.write is not None and key.endswith(precision.suffix):
            del tensors[key]
            parts, values[key] = precision.write(rounded.astype(np.float32))
            tensors |= {precision.names(key, last): each for last, each in parts.items()}
    if adapter is not None:
        for key, change in _write_adapter(adapter).items():
            values[key] = values[key] + change
    extra = {"hf_quant_config.json": {"quantization": precision.config}} if precision.config else {}
    _write(stored, tensors, {**config, **precision.own_config, "dtype": "float16"}, extra)
    _write(exact, values, {**config, "dtype": "float32"}, {})
    for file in _TOKENIZER:
        shutil.copyfile(tokenizer / file, stored / file)


def _write(
    folder: Path,
    tensors: Mapping[str, NDArray[Any]],
    config: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> None:
    folder.mkdir(parents=True)
    whole = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(whole, folder / _WEIGHTS, metadata={"format": "pt"})
    for name, content in {_CONFIG: config, **extra}.items():
        (folder / name).write_text(json.dumps(content))


def _random_model(sizes: Mapping[str, Any]) -> tuple[dict[str, F32], dict[str, Any]]:
    """Weights and config of a random model of transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(_SEED)
    config = AutoConfig.for_model(**sizes, initializer_range=0.1, eos_token_id=2)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(0, 0.1)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        written = json.loads(Path(folder, _CONFIG).read_text())
        return load_file(Path(folder, _WEIGHTS)), written


def _write_adapter(folder: Path) -> dict[str, F32]:
    """Write a random LoRA adapter of all projections; return the change of each weight."""
    random = np.random.default_rng(2)
    tensors: dict[str, F32] = {}
    changes: dict[str, F32] = {}
    for name, weight in _weights().items():
        if name.endswith("_proj.weight"):
            shapes = (RANK, weight.shape[1]), (len(weight), RANK)
            down, up = (random.normal(0, 0.1, shape).astype(np.float32) for shape in shapes)
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
            changes[name] = up @ down  # alpha is the rank
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return changes


def _config() -> dict[str, Any]:
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
        "eos_token_id": 2,
    }


def _weights() -> dict[str, F32]:
    """Random weights [out, in] of a Llama; norms are about 1."""
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
