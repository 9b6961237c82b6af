"""Random weights as GGUF files: float16 ones to quantize with llama.cpp, or 4-bit blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

_LAYERS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}


def write(checkpoint: Path, tokenizer: Path, output: Path) -> None:
    """Write the float16 weights of one of `weights.SHAPES`.

    Args:
        checkpoint: a folder of `weights.synthetic_checkpoint`.
        tokenizer: a GGUF file with the first tokens of the vocabulary.
        output: the file.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    writer = _begun(output, config["model_type"], config, tokenizer)
    with safe_open(checkpoint / "model.safetensors", "np") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - it is no mapping
            array = tensors.get_tensor(name)
            writer.add_tensor(
                _gguf_name(name), array.astype(np.float16) if array.ndim == 2 else array
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_mixture(config: dict[str, Any], tokenizer: Path, output: Path) -> None:
    """Write a mixture of experts of the qwen3_moe family in Q4_0, tensor by tensor.

    Args:
        config: of the checkpoint.
        tokenizer: see `write`.
        output: the file.
    """
    writer = _begun(output, "qwen3moe", {"rope_theta": 1e6, **config}, tokenizer)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    shapes = _mixture_shapes(config)
    for name, shape in shapes.items():
        kind = gguf.GGMLQuantizationType.Q4_0 if _is_rounded(name) else None
        stored, dtype = (_block_shape(shape), np.uint8) if kind else (shape, np.float32)
        writer.add_tensor_info(name, stored, np.dtype(dtype), _size(stored, dtype), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.write_tensor_data(_contents(name, shape, random))
    writer.close()


def _mixture_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return [out, in] of all tensors by name."""
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    head, experts, vocab = config["head_dim"], config["num_experts"], config["vocab_size"]
    queries, values = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"token_embd.weight": (vocab, hidden), "output.weight": (vocab, hidden)}
    shapes["output_norm.weight"] = (hidden,)
    own = {
        "attn_norm": (hidden,), "attn_q": (queries, hidden), "attn_k": (values, hidden),
        "attn_v": (values, hidden), "attn_q_norm": (head,), "attn_k_norm": (head,),
        "attn_output": (hidden, queries), "ffn_norm": (hidden,),
        "ffn_gate_inp": (experts, hidden), "ffn_gate_exps": (experts, inner, hidden),
        "ffn_up_exps": (experts, inner, hidden), "ffn_down_exps": (experts, hidden, inner),
    }  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in own.items()}
    return shapes


def _is_rounded(name: str) -> bool:
    return "norm" not in name and "ffn_gate_inp" not in name


def _block_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in bytes: 32 values are 18 bytes."""
    return (*shape[:-1], shape[-1] // 32 * 18)


def _size(shape: tuple[int, ...], dtype: type) -> int:
    return int(np.prod(shape)) * np.dtype(dtype).itemsize


def _contents(name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    if not _is_rounded(name):
        return (
            np.ones(shape, np.float32) if "norm" in name else random.normal(size=shape).astype("f4")
        )
    some = random.integers(0, 256, (4096, 18), np.uint8)
    some[:, :2] = np.full(1, 2.0**-9, np.float16).view(np.uint8)
    stored = _block_shape(shape)
    return np.resize(some.reshape(-1), int(np.prod(stored))).reshape(stored)


def _begun(
    output: Path, architecture: str, config: dict[str, Any], tokenizer: Path
) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(output, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    _add_tokens(writer, tokenizer, config["vocab_size"])
    return writer


def _gguf_name(name: str) -> str:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, _, layer, inside = name.split(".", 3)
    module, _, kind = inside.rpartition(".")
    return f"blk.{layer}.{_LAYERS[module]}.{kind}"


def _add_tokens(writer: gguf.GGUFWriter, source: Path, size: int) -> None:
    fields = gguf.GGUFReader(source).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    tokens, kinds = tokens[:size], kinds[:size]
    missing = range(len(tokens), size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields["tokenizer.ggml.pre"].contents())
    writer.add_token_list([*tokens, *(f"[unused {number}]" for number in missing)])
    writer.add_token_types([*kinds, *(gguf.TokenType.UNUSED for _ in missing)])
    writer.add_token_merges(fields["tokenizer.ggml.merges"].contents())
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
