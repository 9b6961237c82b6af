"""SmolLM2 with equivalent weights off the 4-bit grid of its file.

The only file of SmolLM2 without a model hub is Q4_1. Quantization to a minimum and a scale for each
32 inputs reproduces its weights exactly, which measures nothing. Here the outputs of norms and
linear layers are scaled by channel, and the weights after them by the inverse; values are rotated
slightly within their heads. The model's output stays the same. All quantizers get this file.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

_SPREAD = 0.15  # of the logarithms of factors
_TURN = 0.05


def write(source: Path, output: Path) -> Path:
    """Write a GGUF file of float32 weights made from `source`, of a Llama architecture."""
    import gguf

    reader = gguf.GGUFReader(source)
    tensors = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()
        for tensor in reader.tensors
    }
    facts = {name: field.contents() for name, field in reader.fields.items()}
    _change(tensors, facts["llama.attention.head_count"], facts["llama.attention.head_count_kv"])
    partial = output.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        own = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], own)
    for name, value in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(output)
    return output


def _change(tensors: dict[str, np.ndarray], heads: int, kv_heads: int) -> None:
    chance = np.random.default_rng(1)

    def factors(size: int) -> np.ndarray:
        return np.exp(_SPREAD * chance.standard_normal(size)).astype(np.float32)

    layers = {match[0] for name in tensors if (match := re.match(r"blk\.\d+\.", name))}
    for layer in sorted(layers, key=lambda name: int(name[4:-1])):
        for norm, readers in {
            "attn_norm": ("attn_q", "attn_k", "attn_v"),
            "ffn_norm": ("ffn_gate", "ffn_up"),
        }.items():
            own = factors(len(tensors[f"{layer}{norm}.weight"]))
            tensors[f"{layer}{norm}.weight"] *= own
            for name in readers:
                tensors[f"{layer}{name}.weight"] /= own
        own = factors(len(tensors[f"{layer}ffn_up.weight"]))
        tensors[f"{layer}ffn_up.weight"] *= own[:, None]
        tensors[f"{layer}ffn_down.weight"] /= own
        _turn_values(tensors, layer, heads, kv_heads, chance)


def _turn_values(
    tensors: dict[str, np.ndarray],
    layer: str,
    heads: int,
    kv_heads: int,
    chance: np.random.Generator,
) -> None:
    value, output = tensors[f"{layer}attn_v.weight"], tensors[f"{layer}attn_output.weight"]
    size = len(value) // kv_heads
    values = value.reshape(kv_heads, size, -1)
    outputs = output.reshape(len(output), kv_heads, heads // kv_heads, size)
    for head in range(kv_heads):
        drawn = _TURN * chance.standard_normal((size, size))
        skew, eye = (drawn - drawn.T) / 2, np.eye(size)
        turn = np.linalg.solve(eye - skew, eye + skew).astype(np.float32)
        values[head] = turn @ values[head]
        outputs[:, head] = outputs[:, head] @ turn.T
    tensors[f"{layer}attn_v.weight"] = values.reshape(value.shape)
    tensors[f"{layer}attn_output.weight"] = outputs.reshape(output.shape)
