"""Checkpoints of random weights in shapes of real models, written tensor by tensor.

They suffice to measure time and memory, which do not depend on the values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float16",
}


def _llama(hidden: int, inner: int, layers: int, vocab: int, **others: object) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return {**_LLAMA, **sizes, "vocab_size": vocab, "tie_word_embeddings": True, **others}


def _qwen3(hidden: int, inner: int, layers: int, **others: object) -> dict[str, Any]:
    family = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128}
    return {**_llama(hidden, inner, layers, 151936), **family, "rms_norm_eps": 1e-6, **others}


SHAPES: dict[str, dict[str, Any]] = {
    "small": _llama(256, 1024, 2, 49152, num_attention_heads=4, num_key_value_heads=2),
    "tiny": _llama(1024, 4096, 4, 32000),
    "1b": _llama(2048, 8192, 16, 128256),
    "8b": _llama(4096, 14336, 32, 128256, tie_word_embeddings=False),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, num_attention_heads=16),
    "qwen3-4b": _qwen3(2560, 9728, 36, num_attention_heads=32),
    "qwen2.5-0.5b": {
        **_llama(896, 4864, 24, 151936, num_attention_heads=14, num_key_value_heads=2),
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "torch_dtype": "float32",
    },
}
# A quarter of the layers, for contexts that would take an hour.
SHAPES["qwen2.5-0.5b-quarter"] = {
    **SHAPES["qwen2.5-0.5b"],
    "num_hidden_layers": 6,
    "max_position_embeddings": 65536,
}
_E2B: dict[str, Any] = {
    "model_type": "gemma4_text",
    "architectures": ["Gemma4ForCausalLM"],
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    "sliding_window": 512,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 131072,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}
# Gemma 4 E2B's text model, and a small one. No peer makes its files from floats.
GEMMA_4: dict[str, dict[str, Any]] = {
    "gemma-4-e2b": _E2B,
    "gemma-4-small": {
        **_E2B,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 10,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 2,
        "num_kv_shared_layers": 5,
        "vocab_size": 49152,
        "vocab_size_per_layer_input": 49152,
    },
}
_DTYPES: dict[str, Any] = {
    "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I32": np.int32,
    "I64": np.int64, "U8": np.uint8,
}  # fmt: skip
_GROUP = 128  # of INT4 weights
_DRAFT_VOCAB = 32000
_NOISE = 1 << 20  # values, which are repeated

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]  # dtype and shape by name


def matrices(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return [out, in] of all linear layers by name."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = attention_widths(config)
    sizes = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    layers = range(config["num_hidden_layers"])
    return {f"model.layers.{at}.{name}": size for at in layers for name, size in sizes.items()}


def attention_widths(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the widths of queries and of keys."""
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return head * config["num_attention_heads"], head * config["num_key_value_heads"]


def write(config: Mapping[str, Any], folder: Path, dtype: str, *, shards: bool = False) -> Path:
    """Write a float checkpoint without a tokenizer, unless the folder exists.

    Args:
        config: of config.json, of any family of transformers.
        folder: the result.
        dtype: of safetensors.
        shards: a file for each layer, and an index.
    """
    if folder.exists():
        return folder
    tensors = {name: (dtype, shape) for name, shape in tensor_shapes(config).items()}
    return _write_folder(config, tensors, folder, shards=shards)


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors by name, without tied ones."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    tied = model.all_tied_weights_keys
    tensors = model.state_dict().items()
    return {name: tuple(tensor.shape) for name, tensor in tensors if name not in tied}


def write_awq(config: Mapping[str, Any], folder: Path) -> Path:
    """Write a checkpoint in AutoAWQ's layout, with a tokenizer of words."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, (out, width) in matrices(config).items():
        tensors[f"{name}.qweight"] = "I32", (width, out // 8)
        tensors[f"{name}.qzeros"] = "I32", (width // _GROUP, out // 8)
        tensors[f"{name}.scales"] = "F16", (width // _GROUP, out)
    tensors |= {name: ("F16", shape) for name, shape in _others(config).items()}
    quantization = {
        "quant_method": "awq", "bits": 4, "group_size": _GROUP, "version": "gemm",
        "zero_point": True,
    }  # fmt: skip
    _write_folder({**config, "quantization_config": quantization}, tensors, folder)
    return _write_tokenizer(config, folder)


def write_int4(config: Mapping[str, Any], folder: Path) -> Path:
    """Write a checkpoint in ModelOpt's layout of INT4, with a tokenizer of words."""
    _write_folder(config, int4_tensors(config), folder)
    quantization = {"quant_algo": "W4A16_AWQ", "group_size": _GROUP, "has_zero_point": False}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    return _write_tokenizer(config, folder)


def int4_tensors(config: Mapping[str, Any]) -> Tensors:
    """Return dtypes and shapes of the tensors that `write_int4` writes."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, (out, width) in matrices(config).items():
        tensors[f"{name}.weight"] = "U8", (out // 2, width)
        tensors[f"{name}.weight_scale"] = "F32", (out, width // _GROUP)
    return tensors | {name: ("F16", shape) for name, shape in _others(config).items()}


def num_bytes(tensors: Tensors) -> int:
    """Return the size of a checkpoint of these tensors."""
    return sum(
        int(np.prod(shape)) * np.dtype(_DTYPES[dtype]).itemsize for dtype, shape in tensors.values()
    )


def _write_tokenizer(config: Mapping[str, Any], folder: Path) -> Path:
    words = ["<unk>", "<s>", "</s>", *(f"w{at}" for at in range(3, config["vocab_size"]))]
    vocab = {word: at for at, word in enumerate(words)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    tokenizer = {"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return folder


def write_eagle3(config: Mapping[str, Any], folder: Path) -> Path:
    """Write an EAGLE3 draft of a base with this config, unless the folder exists."""
    hidden, inner, layers = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    queries, keys = attention_widths(config)
    vocab, last = min(_DRAFT_VOCAB, config["vocab_size"]), max(layers - 4, 0)
    own = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": vocab,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [min(1, last), layers // 2 - 1, last]},
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "lm_head.weight": (vocab, hidden),
        "norm.weight": (hidden,),
    }
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    shapes |= {f"midlayer.{norm}.weight": (hidden,) for norm in norms}
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        name: ("BF16", shape) for name, shape in shapes.items()
    }
    return _write_folder({**config, **own}, {**tensors, "d2t": ("I64", (vocab,))}, folder)


def _others(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return shapes of embedding, head and norms."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{norm}.weight"] = (hidden,)
    found["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocab, hidden)
    return found


def _write_folder(
    config: Mapping[str, Any], tensors: Tensors, folder: Path, *, shards: bool = False
) -> Path:
    if folder.exists():
        return folder
    partial = folder.with_name(f"{folder.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    parts: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for name, facts in tensors.items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else "others"
        file = f"model-{layer}.safetensors" if shards else "model.safetensors"
        parts.setdefault(file, {})[name] = facts
    for file, part in parts.items():
        _write_file(part, partial / file)
    if shards:
        files = {name: file for file, part in parts.items() for name in part}
        (partial / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (partial / "config.json").write_text(json.dumps(dict(config)))
    partial.rename(folder)
    return folder


def _write_file(tensors: Tensors, path: Path) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + int(np.prod(shape)) * np.dtype(_DTYPES[dtype]).itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for number, (name, (dtype, shape)) in enumerate(tensors.items()):
            for piece in _contents(name, dtype, int(np.prod(shape)), number):
                stream.write(piece)


def _contents(name: str, dtype: str, count: int, number: int) -> Iterator[bytes]:
    """Yield the bytes of a tensor; each begins elsewhere in the noise, so none are equal."""
    random = np.random.default_rng(number)
    if dtype == "I32":
        values = random.integers(-(1 << 31), 1 << 31, min(count, _NOISE), np.int64)
    elif dtype == "U8":
        values = random.integers(0, 256, min(count, _NOISE))
    elif dtype == "I64":
        values = np.zeros(count)
    elif name.endswith(("norm.weight", "layer_scalar")):
        values = np.ones(count)
    elif name.endswith((".scales", ".weight_scale")):
        values = np.full(min(count, _NOISE), 0.004)
    else:
        values = random.standard_normal(min(count, _NOISE), np.float32) * 0.02
    noise = values.astype(_DTYPES[dtype])
    for begin in range(0, count, len(noise)):
        yield noise[: count - begin].tobytes()
