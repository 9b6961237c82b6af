"""A checkpoint of random weights as a GGUF file, for llama.cpp to round."""

from __future__ import annotations

import json
from pathlib import Path

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
        checkpoint: a folder that `weights.synthetic_checkpoint` made.
        tokenizer: a GGUF file whose tokens name the first of the vocabulary.
        output: the file.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(output, config["model_type"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    _add_tokens(writer, tokenizer, config["vocab_size"])
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
    missing = range(len(tokens), size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields["tokenizer.ggml.pre"].contents())
    writer.add_token_list([*tokens, *(f"[unused {number}]" for number in missing)])
    writer.add_token_types([*kinds, *(gguf.TokenType.UNUSED for _ in missing)])
    writer.add_token_merges(fields["tokenizer.ggml.merges"].contents())
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
