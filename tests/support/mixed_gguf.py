"""A GGUF file with formats of all kinds, and blocks of any values."""

from __future__ import annotations

import zlib

import gguf
import numpy as np
from conftest import make_checkpoint
from gguf_files import write_gguf
from transformers import AutoModelForCausalLM

from edgellm.export import models
from edgellm.export.checkpoints.quantized.gguf import FORMS

# Formats by the ends of tensor names.
KINDS = {
    "q_proj": "Q4_K", "k_proj": "Q4_0", "v_proj": "Q6_K", "o_proj": "Q5_1", "gate_proj": "Q4_1",
    "up_proj": "Q4_1", "down_proj": "Q3_K", "embed_tokens": "Q5_0", "lm_head": "Q5_K",
}  # fmt: skip
_PLACES = {
    "attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj",
    "ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj",
    "token_embd": "embed_tokens", "output": "lm_head",
}  # fmt: skip
_MIXED = {
    **models.find("llama").TINY,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}


def write_mixed(folder):
    """`mixed.gguf` with `KINDS`; weights are any blocks, as large as weights are."""
    model = AutoModelForCausalLM.from_pretrained(make_checkpoint(folder / "hf", **_MIXED))

    def encode(name, array):
        kind = KINDS[_PLACES[name.split(".")[-2]]]
        blocks = array.size // FORMS[kind].values
        return scaled_blocks(kind, blocks, 0.03, zlib.crc32(name.encode())).reshape(
            len(array), -1
        ), gguf.GGMLQuantizationType[kind]

    write_gguf(folder / "mixed.gguf", "llama", model, encode)
    return folder / "mixed.gguf"


def random_blocks(kind: str, count: int, seed: int = 7) -> np.ndarray:
    """Random bytes, with finite numbers in fields of halves: uint8 [count, bytes]."""
    form, random = FORMS[kind], np.random.default_rng(seed)
    blocks = random.integers(0, 256, (count, form.num_bytes), np.uint8)
    for place in (form.scale, form.minimum):
        if place >= 0:
            _set_halves(blocks, place, random.normal(size=count))
    return blocks


def scaled_blocks(kind: str, count: int, deviation: float, seed: int) -> np.ndarray:
    """As `random_blocks`, with this mean absolute value."""
    form, blocks = FORMS[kind], random_blocks(kind, count, seed)
    factor = deviation / np.abs(dequantized(kind, blocks)).mean()
    for place in (form.scale, form.minimum):
        if place >= 0:
            halves = np.ascontiguousarray(blocks[:, place : place + 2]).view(np.float16)
            _set_halves(blocks, place, halves[:, 0].astype(np.float32) * factor)
    return blocks


# Types that the installed package gguf lacks: number, values and bytes of a block.
NEWER = {"Q1_0": (41, 128, 18), "Q2_0": (42, 64, 18)}


class NewerType(int):
    """Such a type, as the package's writer takes it."""

    def __new__(cls, kind: str) -> NewerType:
        made = super().__new__(cls, NEWER[kind][0])
        made.name = kind
        gguf.constants.GGML_QUANT_SIZES.setdefault(made, NEWER[kind][1:])
        return made


def type_of(kind: str) -> int:
    """llama.cpp's type, for the package's writer."""
    return NewerType(kind) if kind in NEWER else gguf.GGMLQuantizationType[kind]


def dequantized(kind: str, rows: np.ndarray) -> np.ndarray:
    """The float32 values of rows of blocks: by the package, or value by value as ggml does."""
    if kind not in NEWER:
        return gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])
    _, values, size = NEWER[kind]
    bits = 8 * (size - 2) // values
    found = []
    for block in rows.reshape(-1, size):
        scale = block[:2].view(np.float16)[0].astype(np.float32)
        for index in range(values):
            code = block[2 + index * bits // 8] >> (index * bits % 8) & ((1 << bits) - 1)
            weight = int(code) - 1 if bits == 2 else 2 * int(code) - 1
            found.append(np.float32(weight) * scale)
    return np.array(found, np.float32).reshape(*rows.shape[:-1], -1)


def _set_halves(blocks: np.ndarray, place: int, values: np.ndarray) -> None:
    blocks[:, place : place + 2] = values.astype(np.float16)[:, None].view(np.uint8)
