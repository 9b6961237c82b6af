"""A tiny Llama checkpoint in fp32, written with numpy: it needs neither torch nor transformers."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
from conftest import write_tokenizer

from edgellm.export import models


def write_llama(folder: Path, *, seed: int = 0) -> Path:
    """Write config, weights and tokenizer; return the folder."""
    config = models.find("llama").TINY
    folder.mkdir(parents=True)
    entries = {"architectures": ["LlamaForCausalLM"], "eos_token_id": 2, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps({**config, **entries}))
    _write_safetensors(folder / "model.safetensors", _weights(config, seed))
    write_tokenizer(folder, config["vocab_size"])
    return folder


def _weights(config: dict, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    width, inner = config["hidden_size"], config["intermediate_size"]
    kv = width // config["num_attention_heads"] * config["num_key_value_heads"]
    sizes = {"self_attn.q_proj": (width, width), "self_attn.o_proj": (width, width),
             "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width),
             "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
             "mlp.down_proj": (width, inner),
             "input_layernorm": (width,), "post_attention_layernorm": (width,)}  # fmt: skip
    shapes = {"model.embed_tokens": (config["vocab_size"], width), "model.norm": (width,)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in sizes.items()}
    return {
        f"{name}.weight": random.normal(float(len(shape) == 1), 0.2, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def _write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header, end = {}, 0
    for name, array in tensors.items():
        offsets = [end, end := end + array.nbytes]
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    data = b"".join(array.tobytes() for array in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
