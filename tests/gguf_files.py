"""GGUF files of tiny models: floats, one format for all matrices, or formats of all kinds."""

from __future__ import annotations

import zlib

import gguf
import numpy as np
from conftest import WORDS, make_checkpoint
from transformers import AutoModelForCausalLM

from edgellm.export import models
from edgellm.export.quantized.gguf import FORMS

# Of a file with formats of all kinds, by the ends of names.
KINDS = {
    "q_proj": "Q4_K", "k_proj": "Q4_0", "v_proj": "Q6_K", "o_proj": "Q5_1", "gate_proj": "Q4_1",
    "up_proj": "Q4_1", "down_proj": "Q3_K", "embed_tokens": "Q5_0", "lm_head": "Q5_K",
}  # fmt: skip
_MIXED = {
    **models.find("llama").TINY,
    "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}  # fmt: skip

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[rest]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"


def _interleave(array: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order for Llama's q and k: pairs of one frequency side by side."""
    half = len(array) // heads // 2
    return array.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(array.shape)


def write_gguf(path, arch, model, encode=None):
    """`encode`: rows and type of a matrix, by its name; None keeps floats."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if head_dim := getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    words = WORDS + [f"w{i}" for i in range(len(WORDS), config.vocab_size - 2)]
    writer.add_token_list([*words, "w", "9"])
    writer.add_token_types([3 if i in (1, 2) else 1 for i in range(config.vocab_size)])
    writer.add_token_merges(["w 9"])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            is_query = ".q_proj." in name
            heads = config.num_attention_heads if is_query else config.num_key_value_heads
            array = _interleave(array, heads)
        if array.ndim == 2 and encode is not None:
            rows, kind = encode(name, array)
            writer.add_tensor(gguf_name(name), rows, raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def in_one_format(kind: str):
    """An `encode` of `write_gguf`."""
    found = gguf.GGMLQuantizationType[kind]
    return lambda _name, array: (gguf.quantize(array, found), found)


def write_mixed(folder):
    """`mixed.gguf` with `KINDS`; weights are any blocks, as large as weights are."""
    model = AutoModelForCausalLM.from_pretrained(make_checkpoint(folder / "hf", **_MIXED))

    def encode(name, array):
        kind = KINDS[name.split(".")[-2]]
        blocks = array.size // FORMS[kind].values
        return scaled_blocks(kind, blocks, 0.03, zlib.crc32(name.encode())).reshape(
            len(array), -1
        ), gguf.GGMLQuantizationType[kind]

    write_gguf(folder / "mixed.gguf", "llama", model, encode)
    return folder / "mixed.gguf"


def random_blocks(kind: str, count: int, seed: int = 7) -> np.ndarray:
    """Any bytes, but halves that are numbers where a format has halves: uint8 [count, bytes]."""
    form, random = FORMS[kind], np.random.default_rng(seed)
    blocks = random.integers(0, 256, (count, form.num_bytes), np.uint8)
    for place in (form.scale, form.minimum):
        if place >= 0:
            _set_halves(blocks, place, random.normal(size=count))
    return blocks


def scaled_blocks(kind: str, count: int, deviation: float, seed: int) -> np.ndarray:
    """As `random_blocks`, values that deviate so much from nothing."""
    form, blocks = FORMS[kind], random_blocks(kind, count, seed)
    factor = deviation / np.abs(gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])).mean()
    for place in (form.scale, form.minimum):
        if place >= 0:
            halves = np.ascontiguousarray(blocks[:, place : place + 2]).view(np.float16)
            _set_halves(blocks, place, halves[:, 0].astype(np.float32) * factor)
    return blocks


def _set_halves(blocks: np.ndarray, place: int, values: np.ndarray) -> None:
    blocks[:, place : place + 2] = values.astype(np.float16)[:, None].view(np.uint8)
