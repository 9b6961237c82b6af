"""GGUF files of tiny models, as llama.cpp's converters write them; names by the package gguf."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from conftest import WORDS

from edgellm.export import models

Encode = Callable[[str, np.ndarray], tuple[np.ndarray, Any]]  # by llama.cpp's name
_INTERLEAVED = ("llama", "granite", "smollm3")
_SHIFTED = ("gemma2", "gemma3")
_S, _F = "sliding_attention", "full_attention"
_YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0,
         "original_max_position_embeddings": 32}  # fmt: skip


def _tiny(kind: str, **changes: object) -> dict[str, Any]:
    return {**models.find(kind).TINY, "intermediate_size": 96, **changes}


# Keys that a file has for each family: llama.cpp's loaders assume the rest.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _tiny("llama")),
    "qwen2": ("qwen2", _tiny("qwen2")),
    "qwen3": ("qwen3", _tiny("qwen3")),
    "qwen3moe": ("qwen3moe", _tiny("qwen3_moe", moe_intermediate_size=32)),
    "gpt-oss": ("gpt-oss", _tiny("gpt_oss", swiglu_limit=7.0)),
    "gemma2": ("gemma2", _tiny("gemma2", query_pre_attn_scalar=32)),
    "gemma3": (
        "gemma3",
        _tiny("gemma3_text", num_hidden_layers=7, query_pre_attn_scalar=32,
              layer_types=[_S, _S, _S, _S, _S, _F, _S]),
    ),
    "granite": ("granite", _tiny("granite", attention_bias=True, mlp_bias=True)),
    "lfm2": ("lfm2", _tiny("lfm2")),
    "olmo2": ("olmo2", _tiny("olmo2")),
    "olmo3": (
        "olmo2",
        _tiny("olmo3", rope_parameters={
            _F: _YARN, _S: {"rope_type": "default", "rope_theta": 5e5}
        }),
    ),
    "phi3": ("phi3", _tiny("phi3")),
    "phi3_without_window": (
        "phi3", _tiny("phi3", sliding_window=None, rope_parameters=None, tie_word_embeddings=False),
    ),
    "smollm3": (
        "smollm3",
        _tiny("smollm3", num_hidden_layers=5, no_rope_layer_interval=4, use_sliding_window=False),
    ),
}  # fmt: skip


def write_gguf(
    path: Path,
    arch: str,
    model: Any,
    quantization: str | Encode | None = None,
    words: Callable[[Any, int], None] | None = None,
    max_tensors: int = 0,
    **extra: object,
) -> None:
    """Write a model of transformers.

    Args:
        path: of the file.
        arch: llama.cpp's name of the architecture.
        model: in float32.
        quantization: type of matrices, or a function that gives rows and type of each; None is F32.
        words: writes a tokenizer of that size; None: `write_words`.
        max_tensors: of a file, if the package divides the model among several.
        extra: keys of the architecture, dots as two underscores.
    """
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=max_tensors)
    _write_facts(writer, arch, config)
    for key, value in extra.items():
        name = f"{arch}.{key.replace('__', '.')}"
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    (words or write_words)(writer, config.vocab_size)
    encode = _in_one_format(quantization) if isinstance(quantization, str) else quantization
    for name, array in tensors(arch, model).items():
        if encode is not None and is_matrix(name, array):
            rows, kind = encode(name, array)
            writer.add_tensor(name, rows, raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _in_one_format(quantization: str) -> Encode:
    import gguf

    kind = gguf.GGMLQuantizationType[quantization]
    return lambda _name, array: (gguf.quantize(array, kind), kind)


def write_words(writer: Any, vocab_size: int, names: Mapping[int, str] | None = None) -> None:
    """Write a tokenizer of words, with a single merge; `names`: of some control tokens."""
    named = dict(names or {})
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    words = WORDS + [f"w{i}" for i in range(len(WORDS), vocab_size - 2)]
    tokens = [*words, "w", "9"]
    writer.add_token_list([named.get(i, token) for i, token in enumerate(tokens)])
    writer.add_token_types([3 if i in (1, 2, *named) else 1 for i in range(vocab_size)])
    writer.add_token_merges(["w 9"])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)


def tensors(arch: str, model: Any) -> dict[str, np.ndarray]:
    """All tensors in llama.cpp's order of rows, by its names."""
    import gguf

    config = model.config
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[arch], config.num_hidden_layers)
    found = {}
    for name, tensor in _apart(model):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if name.endswith("conv.conv.weight"):
            array = array.squeeze(1)
        if arch in _INTERLEAVED and (".q_proj." in name or ".k_proj." in name):
            is_query = ".q_proj." in name
            heads = config.num_attention_heads if is_query else config.num_key_value_heads
            array = _interleave(array, heads)
        if arch in _SHIFTED and name.endswith("norm.weight"):
            array = array + np.float32(1)
        place = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert place is not None, name
        found[f"{place}.weight" if name.endswith("sinks") else place] = array
    return found | _rope_tensors(config)


def _apart(model: Any) -> Iterator[tuple[str, Any]]:
    """Its tensors; of experts gates, ups and downs [E, out, in] as converters write them."""
    for name, tensor in model.state_dict().items():
        place, _, own = name.rpartition(".experts.")
        is_gpt_oss = model.config.model_type == "gpt_oss"
        if not place:
            yield name, tensor
            continue
        ending = "bias" if own.endswith("bias") else "weight"
        if is_gpt_oss and ending == "weight":
            tensor = tensor.transpose(1, 2)
        if not own.startswith("gate_up"):
            yield f"{place}.experts.down_proj.{ending}", tensor
            continue
        halves = (tensor[:, 0::2], tensor[:, 1::2]) if is_gpt_oss else tensor.chunk(2, dim=1)
        for part, half in zip(("gate", "up"), halves, strict=True):
            yield f"{place}.experts.{part}_proj.{ending}", half


def is_matrix(name: str, array: np.ndarray) -> bool:
    """Whether converters may round it: no bias, no router, no convolution."""
    others = ("ffn_gate_inp", "shortconv.conv", "ssm_conv1d", "ssm_norm")
    return array.ndim > 1 and name.endswith(".weight") and not any(each in name for each in others)


def _rope_tensors(config: Any) -> dict[str, np.ndarray]:
    rope = config.rope_parameters or {}
    return {
        f"rope_factors_{kind}.weight": np.asarray(rope[f"{kind}_factor"], np.float32)
        for kind in ("short", "long")
        if f"{kind}_factor" in rope
    }


def _interleave(array: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of rows: pairs of one frequency are adjacent."""
    half = len(array) // heads // 2
    return array.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(array.shape)


def _write_facts(writer: Any, arch: str, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    heads = config.num_key_value_heads
    if arch == "lfm2":
        heads = [heads if kind == _F else 0 for kind in config.layer_types]
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(config.norm_eps if arch == "lfm2" else config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None)
    if head_dim and arch != "granite":  # whose converter ignores it
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = config.rope_parameters or {}
    _write_rope(writer, rope.get("full_attention", rope))
    _OWN.get(arch, lambda *_: None)(writer, config)


def _write_rope(writer: Any, rope: Mapping[str, Any]) -> None:
    import gguf

    writer.add_rope_freq_base(rope.get("rope_theta", 1e4))
    if (kind := rope.get("rope_type")) in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _gemma2(writer: Any, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _granite(writer: Any, config: Any) -> None:
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _olmo2(writer: Any, config: Any) -> None:
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)
        writer.add_sliding_window_pattern([kind == _S for kind in config.layer_types])


def _phi3(writer: Any, config: Any) -> None:
    rope = config.rope_parameters
    head_dim = config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * head_dim))
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    writer.add_sliding_window(config.sliding_window or 0)
    if "short_factor" in rope:
        original = config.original_max_position_embeddings
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(float((1 + np.log(scale) / np.log(original)) ** 0.5))


def _with_experts(writer: Any, config: Any) -> None:
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    width = getattr(config, "moe_intermediate_size", config.intermediate_size)
    writer.add_expert_feed_forward_length(width)
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)


_OWN: dict[str, Callable[[Any, Any], None]] = {
    "gemma2": _gemma2,
    "gemma3": lambda writer, config: writer.add_sliding_window(config.sliding_window),
    "gpt-oss": _with_experts,
    "lfm2": lambda writer, config: writer.add_shortconv_l_cache(config.conv_L_cache),
    "granite": _granite,
    "qwen3moe": _with_experts,
    "olmo2": _olmo2,
    "phi3": _phi3,
}


# Patterns cut differently: contractions, digits, spaces and lines, capitals, other letters.
TEXTS = ("it's I'LL 12345 x2", "  two\n\n\nnew\tone  ", "camelCase //a/b=1", "naïve É 日本!?")


def piece_vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges by which every part of `TEXTS` becomes a single token."""
    from tokenizers import pre_tokenizers

    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens = dict.fromkeys(["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    merges: dict[str, None] = {}
    for text in TEXTS:
        ((symbols, _),) = level.pre_tokenize_str(text)
        for begin in range(len(symbols)):
            for end in range(begin + 2, len(symbols) + 1):
                tokens[symbols[begin:end]] = None
                merges[f"{symbols[begin : end - 1]} {symbols[end - 1]}"] = None
    return list(tokens), list(merges)


def write_pieces(writer: Any, pre: str) -> None:
    """A byte-level tokenizer, whose tokens show where a pre-tokenizer cuts `TEXTS`."""
    tokens, merges = piece_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index < 3 else 1 for index in range(len(tokens))])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


_BYTES = [f"<0x{code:02X}>" for code in range(256)]
_SYMBOLS = ["▁", "a", "b", "ab", "▁a", "ba", "aba", "▁ab", "▁▁"]
SCORED = ["<unk>", "<s>", "</s>", *_BYTES, *_SYMBOLS, "\n\n", "  ", "<turn>"]


def write_scored(writer: Any, has_prefix: bool) -> None:
    """A SentencePiece tokenizer as Gemma's: pieces that are matched as they are, and bytes."""
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(SCORED)
    own = [-9.0, -8.0, -7.0, -3.0, -2.0, -1.5, -4.0, -5.0, -6.0, -1e3, -1e3, -1e3]
    writer.add_token_scores([0.0] * (len(SCORED) - len(own)) + own)
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(_SYMBOLS), 4, 4, 3])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(has_prefix)
