"""GGUF files of random weights: float16 ones to quantize with llama.cpp, or blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

from harness.models.random_weights import matrices, tensor_shapes

_LAYERS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
# Offsets of a block's float16 scale and minimum (-1: none), and a scale of values near 0.02.
_SCALES = {
    "Q4_0": (0, -1, 5e-3), "Q4_1": (0, 2, 5e-3), "Q5_0": (0, -1, 2e-3), "Q5_1": (0, 2, 2e-3),
    "Q8_0": (0, -1, 3e-4), "Q2_K": (80, 82, 1e-3), "Q3_K": (108, -1, 6e-4), "Q4_K": (0, 2, 1e-4),
    "Q5_K": (0, 2, 5e-5), "Q6_K": (208, -1, 2e-5), "IQ4_NL": (0, -1, 3e-4), "IQ4_XS": (0, -1, 2e-5),
}  # fmt: skip
KINDS = tuple(_SCALES)
_TERNARY = {"TQ1_0": (52, -1, 2e-2), "TQ2_0": (64, -1, 2e-2), "Q1_0": (0, -1, 2e-2)}
MIXED = "Q4_K_M"  # llama.cpp's mixture of Q4_K and Q6_K
_LARGEST = {"Q4_1": 15, "Q5_1": 31, "Q2_K": 3, "Q4_K": 15, "Q5_K": 31}  # codes of those with minima
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}


def write(checkpoint: Path, tokenizer: Path, output: Path) -> None:
    """Write a checkpoint's weights in float16.

    Args:
        checkpoint: a folder of `random_weights.write`.
        tokenizer: a GGUF file with the first tokens of the vocabulary.
        output: the file.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    writer = _begun(output, config["model_type"], config)
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


def write_mixture(config: dict[str, Any], tokenizer: Path, output: Path) -> None:
    """Write a mixture of experts of the qwen3_moe family in Q4_0, tensor by tensor.

    Args:
        config: of the checkpoint.
        tokenizer: see `write`.
        output: the file.
    """
    writer = _begun(output, "qwen3moe", {"rope_theta": 1e6, **config})
    _add_tokens(writer, tokenizer, config["vocab_size"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    shapes = _mixture_shapes(config)
    _write_tensors(writer, shapes, dict.fromkeys(shapes, "Q4_0"))


def write_qwen3_5(config: dict[str, Any], tokenizer: Path, output: Path) -> None:
    """Write a dense Qwen3.5 in Q4_0 with a Q6_K embedding, as llama.cpp quantizes it.

    Args:
        config: of the text model.
        tokenizer: see `write`.
        output: the file.
    """
    arch, rope = "qwen35", config["rope_parameters"]
    writer = _begun(output, arch, {**config, **rope})
    _add_tokens(writer, tokenizer, config["vocab_size"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    values = config["linear_num_value_heads"]
    for key, number in (
        ("ssm.conv_kernel", config["linear_conv_kernel_dim"]),
        ("ssm.state_size", config["linear_key_head_dim"]),
        ("ssm.group_count", config["linear_num_key_heads"]),
        ("ssm.time_step_rank", values),
        ("ssm.inner_size", values * config["linear_value_head_dim"]),
        ("full_attention_interval", config["full_attention_interval"]),
        ("rope.dimension_count", int(config["head_dim"] * rope["partial_rotary_factor"])),
    ):
        writer.add_uint32(f"{arch}.{key}", number)
    writer.add_array(f"{arch}.rope.dimension_sections", [*rope["mrope_section"], 0])
    shapes = _qwen3_5_shapes(config)
    _write_tensors(writer, shapes, {**dict.fromkeys(shapes, "Q4_0"), "token_embd.weight": "Q6_K"})


def write_gemma4(config: dict[str, Any], tokenizer: Path, kind: str, output: Path) -> None:
    """Write a dense Gemma 4 with per-layer embeddings.

    Args:
        config: of the checkpoint.
        tokenizer: see `write`.
        kind: of matrices; the tables of embeddings have Q4_K.
        output: the file.
    """
    arch, layers, types = "gemma4", config["num_hidden_layers"], config["layer_types"]
    shared, full = config["num_kv_shared_layers"], config["global_head_dim"]
    widths = [config["intermediate_size"] * (1 + (at >= layers - shared)) for at in range(layers)]
    facts = {"rope_theta": 1e6, **config, "intermediate_size": widths}
    writer = _begun(output, arch, facts)
    _add_tokens(writer, tokenizer, config["vocab_size"])
    for key, number in (
        ("attention.key_length", full),
        ("attention.value_length", full),
        ("attention.key_length_swa", config["head_dim"]),
        ("attention.value_length_swa", config["head_dim"]),
        ("rope.dimension_count", full),
        ("rope.dimension_count_swa", config["head_dim"]),
        ("attention.sliding_window", config["sliding_window"]),
        ("attention.shared_kv_layers", shared),
        ("embedding_length_per_layer_input", config["hidden_size_per_layer_input"]),
    ):
        writer.add_uint32(f"{arch}.{key}", number)
    writer.add_float32(f"{arch}.rope.freq_base_swa", 1e4)
    writer.add_float32(f"{arch}.final_logit_softcapping", config["final_logit_softcapping"])
    sliding = [each == "sliding_attention" for each in types]
    writer.add_array(f"{arch}.attention.sliding_window_pattern", sliding)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, layers)
    shapes = {}
    for name, shape in tensor_shapes(config).items():
        module, _, part = name.rpartition(".")
        is_scalar = part == "layer_scalar"
        found = names.get_name(name if is_scalar else module)
        shapes[f"{found}.{'weight' if is_scalar else part}"] = shape
    shapes["rope_freqs.weight"] = (full // 2,)
    tables = dict.fromkeys(("token_embd.weight", "per_layer_token_embd.weight"), "Q4_K")
    _write_tensors(writer, shapes, {**dict.fromkeys(shapes, kind), **tables})


def write_dense(
    config: dict[str, Any], kind: str, path: Path, tokenizer: Path | None = None
) -> None:
    """Write a config of `random_weights.SHAPES` of llama or qwen3.

    Args:
        config: of the checkpoint.
        kind: a format, or `MIXED`.
        path: the file.
        tokenizer: see `write`; without one, tokens are words.
    """
    writer = _begun(path, config["model_type"], config)
    if tokenizer is None:
        _add_words(writer, config["vocab_size"])
    else:
        _add_tokens(writer, tokenizer, config["vocab_size"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    shapes = dict(_dense_shapes(config))
    kinds = {name: _mixed(name, config) if kind == MIXED else kind for name in shapes}
    _write_tensors(writer, shapes, kinds)


def _mixed(name: str, config: dict[str, Any]) -> str:
    """Return the format of a tensor in `MIXED`, as llama.cpp chooses it."""
    if not name.startswith("blk."):
        is_head = name == "output.weight" or config["tie_word_embeddings"]
        return "Q6_K" if is_head else "Q4_K"
    at, count = int(name.split(".")[1]), config["num_hidden_layers"]
    first = count // 8
    is_finer = at < first or at >= 7 * count // 8 or (at - first) % 3 == 2
    return "Q6_K" if is_finer and ("attn_v" in name or "ffn_down" in name) else "Q4_K"


def _write_tensors(
    writer: gguf.GGUFWriter, shapes: dict[str, tuple[int, ...]], kinds: dict[str, str]
) -> None:
    """Write all matrices except routers in blocks of their kinds, tensor by tensor."""
    for name, shape in shapes.items():
        values, size = _block_sizes(kinds[name])
        in_blocks = gguf.GGMLQuantizationType[kinds[name]]
        if _is_float(name):
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * int(np.prod(shape)), None)
        else:
            stored = (*shape[:-1], shape[-1] // values * size)
            num_bytes = int(np.prod(stored))
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), num_bytes, in_blocks)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    blocks = {kind: _blocks(kind) for kind in {*kinds.values()}}
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        if not _is_float(name):
            values, size = _block_sizes(kinds[name])
            stored = (*shape[:-1], shape[-1] // values * size)
            some = np.resize(blocks[kinds[name]], int(np.prod(stored)))
            writer.write_tensor_data(some.reshape(stored))
        elif name.endswith(".ssm_a"):  # negative decays keep states bounded
            writer.write_tensor_data(np.full(shape, -1, np.float32))
        elif any(part in name for part in ("norm", "rope_freqs", "output_scale")):
            writer.write_tensor_data(np.ones(shape, np.float32))
        else:
            writer.write_tensor_data(random.standard_normal(shape, np.float32))
    writer.close()


def _is_float(name: str) -> bool:
    floats = "norm", "ffn_gate_inp", ".ssm_a", "ssm_conv1d", "ssm_dt", "rope_freqs", "output_scale"
    return any(part in name for part in floats)


def _dense_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "token_embd.weight", (vocab, hidden)
    yield "output_norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "output.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        yield f"blk.{layer}.attn_norm.weight", (hidden,)
        yield f"blk.{layer}.ffn_norm.weight", (hidden,)
        if config["model_type"] == "qwen3":
            yield f"blk.{layer}.attn_q_norm.weight", (config["head_dim"],)
            yield f"blk.{layer}.attn_k_norm.weight", (config["head_dim"],)
    for name, shape in matrices(config).items():
        _, _, layer, module = name.split(".", 3)
        yield f"blk.{layer}.{_LAYERS[module]}.weight", shape


def _block_sizes(kind: str) -> tuple[int, int]:
    """Return values and bytes of a block."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


def _blocks(kind: str) -> np.ndarray:
    """Return random blocks with values of about 0.02."""
    _, size = _block_sizes(kind)
    some = np.random.default_rng(0).integers(0, 256, (16384, size), np.uint8)
    place, minimum, scale = {**_SCALES, **_TERNARY}[kind]
    some[:, place : place + 2] = _half(scale)
    if minimum >= 0:
        sign = 1 if kind.endswith("_K") else -1  # which subtract their minimum
        some[:, minimum : minimum + 2] = _half(sign * _LARGEST[kind] / 2 * scale)
    return some.reshape(-1)


def _half(number: float) -> np.ndarray:
    return np.full(1, number, np.float16).view(np.uint8)


def _add_words(writer: gguf.GGUFWriter, count: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    words = ["<unk>", "<s>", "</s>", *(f"w{at}" for at in range(3, count - 2)), "w", "9"]
    writer.add_token_list(words)
    writer.add_token_types([3 if at in (1, 2) else 1 for at in range(count)])
    writer.add_token_merges(["w 9"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _qwen3_5_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return [out, in] of all tensors by name."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = (head * config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    heads = config["linear_num_value_heads"]
    values = heads * config["linear_value_head_dim"]
    mixed = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    shared = {
        "attn_norm.weight": (hidden,),
        "post_attention_norm.weight": (hidden,),
        "ffn_gate.weight": (inner, hidden),
        "ffn_up.weight": (inner, hidden),
        "ffn_down.weight": (hidden, inner),
    }
    attention = {
        "attn_q.weight": (2 * queries, hidden),
        "attn_k.weight": (keys, hidden),
        "attn_v.weight": (keys, hidden),
        "attn_q_norm.weight": (head,),
        "attn_k_norm.weight": (head,),
        "attn_output.weight": (hidden, queries),
    }
    recurrent = {
        "attn_qkv.weight": (mixed, hidden),
        "attn_gate.weight": (values, hidden),
        "ssm_alpha.weight": (heads, hidden),
        "ssm_beta.weight": (heads, hidden),
        "ssm_conv1d.weight": (mixed, config["linear_conv_kernel_dim"]),
        "ssm_a": (heads,),
        "ssm_dt.bias": (heads,),
        "ssm_norm.weight": (config["linear_value_head_dim"],),
        "ssm_out.weight": (hidden, values),
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (config["vocab_size"], hidden)}
    shapes["output_norm.weight"] = (hidden,)
    for layer in range(config["num_hidden_layers"]):
        is_full = (layer + 1) % config["full_attention_interval"] == 0
        own = shared | (attention if is_full else recurrent)
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    return shapes


def _mixture_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return [out, in] of all tensors by name."""
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    head, experts, vocab = config["head_dim"], config["num_experts"], config["vocab_size"]
    queries, values = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab, hidden),
        "output.weight": (vocab, hidden),
    }
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


def _begun(output: Path, architecture: str, config: dict[str, Any]) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(output, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
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
    writer.add_chat_template(fields["tokenizer.chat_template"].contents())
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
