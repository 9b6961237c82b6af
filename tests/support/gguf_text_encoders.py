"""GGUF files of encoders of texts, with their tokenizers.

Source: llama.cpp's `conversion/bert.py` and `gemma.py`; names of tensors and ids of special tokens
by the package gguf.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_files import write_words
from safetensors.numpy import load_file

Words = Callable[[Any], None]  # writes a tokenizer
MEAN, CLS, LAST, RANK = 1, 2, 3, 4
_DROPPED = ("pooler.dense.", "embeddings.position_ids", "cls.predictions", "lm_head.")


def write_text_encoder(
    path: Path, arch: str, folder: Path, words: Words | None = None, **extra: object
) -> Path:
    """Write a checkpoint of float32.

    Args:
        path: of the file, which is returned.
        arch: llama.cpp's name of the architecture.
        folder: with config.json and one file of weights.
        words: writes the tokenizer; None: `write_words`.
        extra: keys of the architecture, dots as two underscores; None: without the key.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch)
    facts = {**_facts(config), **_OWN[arch](config)}
    facts |= {key.replace("__", "."): value for key, value in extra.items()}
    for key, value in facts.items():
        if value is None:
            continue
        kind = gguf.GGUFValueType.get_type(value)
        kind = gguf.GGUFValueType.UINT32 if kind == gguf.GGUFValueType.INT32 else kind
        writer.add_key_value(f"{arch}.{key}", value, kind)
    writer.add_token_type_count(config.get("type_vocab_size", 1))
    if words is None:
        write_words(writer, config["vocab_size"])
    else:
        words(writer)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[arch], config["num_hidden_layers"])
    for name, array in load_file(folder / "model.safetensors").items():
        own = name.removeprefix("bert.").removeprefix("roberta.")
        own = own.removeprefix("model.")
        if own.startswith(_DROPPED):
            continue
        if own == "embeddings.position_embeddings.weight" and config["model_type"] == "xlm-roberta":
            array = array[config["pad_token_id"] + 1 :]
        if arch == "gemma-embedding" and own.endswith("norm.weight"):
            array = array + np.float32(1)
        place = names.get_name(own, try_suffixes=(".weight", ".bias"))
        assert place is not None, own
        writer.add_tensor(place, np.ascontiguousarray(array, np.float32))
    if (dense := folder / "dense.npz").exists():
        for name, array in np.load(dense).items():
            writer.add_tensor(f"{name}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _facts(config: dict[str, Any]) -> dict[str, Any]:
    """Keys that the base class of all converters writes."""
    longest = config["max_position_embeddings"]
    if config["model_type"] == "xlm-roberta":
        longest -= config["pad_token_id"] + 1
    rope = config.get("rope_parameters") or {}
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": longest,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config.get("num_key_value_heads"),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", config.get("norm_eps")),
        "attention.layer_norm_epsilon": config.get("layer_norm_eps"),
        "rope.freq_base": rope.get("full_attention", {}).get("rope_theta"),
        "rope.freq_base_swa": rope.get("sliding_attention", {}).get("rope_theta"),
        "attention.causal": False,
    }


def _bert(config: dict[str, Any]) -> dict[str, Any]:
    labels = config.get("id2label") or {}
    return {"classifier.output_labels": [*labels.values()]} if len(labels) == 1 else {}


def _modern_bert(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention.layer_norm_epsilon": config["norm_eps"],
        "attention.sliding_window": config["local_attention"],
        "rope.scaling.type": "none",
        "vocab_size": config["vocab_size"],
        "hidden_activation": config["hidden_activation"],
    }


def _gemma(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention.causal": None,  # known by the architecture
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [
            kind == "sliding_attention" for kind in config["layer_types"]
        ],
    }


_OWN = {"bert": _bert, "modern-bert": _modern_bert, "gemma-embedding": _gemma}


def write_wordpiece(writer: Any, folder: Path) -> None:
    """The tokenizer of a folder as the converter of BERT writes it."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    special = {each["content"] for each in tokenizer["added_tokens"] if each["special"]}
    kinds = [3 if token in special else 1 for token, _ in vocabulary]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")  # by a hash of ids, without a meaning here
    writer.add_token_list(
        [
            token if kind == 3 else token[2:] if token.startswith("##") else f"\u2581{token}"
            for (token, _), kind in zip(vocabulary, kinds, strict=True)
        ]
    )
    writer.add_token_types(kinds)
    gguf.SpecialVocab(folder, n_vocab=len(vocabulary)).add_to_gguf(writer, quiet=True)


def write_unigram(writer: Any, folder: Path, vocab_size: int) -> None:
    """A SentencePiece model as the converter of XLM-RoBERTa writes it, filled to `vocab_size`."""
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    stored = (folder / "sentencepiece.bpe.model").read_bytes()
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(stored)
    pieces = SentencePieceProcessor(model_proto=stored)
    own = [(pieces.IdToPiece(index), pieces.GetScore(index)) for index in range(len(pieces))][3:]
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *(token for token, _ in own)]
    scores = [0.0] * 4 + [score for _, score in own]
    filled = vocab_size - len(tokens)
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*tokens, *(f"[PAD{len(tokens) - 1 + at}]" for at in range(filled))])
    writer.add_token_scores([*scores, *[-10000.0] * filled])
    writer.add_token_types([3, 3, 3, 2, *[1] * len(own), *[5] * filled])
    writer.add_add_space_prefix(model.normalizer_spec.add_dummy_prefix)
    writer.add_remove_extra_whitespaces(model.normalizer_spec.remove_extra_whitespaces)
    writer.add_precompiled_charsmap(model.normalizer_spec.precompiled_charsmap)
    for role, index in (("bos", 0), ("pad", 1), ("eos", 2), ("sep", 2), ("unk", 3)):
        getattr(writer, f"add_{role}_token_id")(index)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)


def write_byte_level(writer: Any, folder: Path, pre: str) -> None:
    """The byte-level BPE of a folder as the converter of ModernBERT writes it."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    special = {each["content"] for each in tokenizer["added_tokens"] if each["special"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if token in special else 1 for token, _ in vocabulary])
    for role in ("bos", "eos", "sep"):
        getattr(writer, f"add_add_{role}_token")(True)
    gguf.SpecialVocab(folder, load_merges=True).add_to_gguf(writer, quiet=True)
