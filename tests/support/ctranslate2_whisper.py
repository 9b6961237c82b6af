"""Whisper in CTranslate2's `model.bin` as a Hugging Face checkpoint.

The format (version 6) is little endian: a version, the name and revision of a specification, and
variables, each with its name, dimensions, type and bytes; then aliases. A text is its length with
the zero at its end, and its bytes. Query, key and value are one matrix, those of audio two.
"""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FLOAT16 = 4  # type of arrays
_HEAD_SIZE = 64  # of all sizes of Whisper
_ENGLISH_VOCABULARY = 51864
Arrays = dict[str, NDArray[np.float16]]


def convert(source: Path, target: Path) -> Path:
    """Write the English-only model in folder `source` as a checkpoint to `target`."""
    from safetensors.numpy import save_file

    arrays = read_arrays(source / "model.bin")
    target.mkdir(parents=True)
    save_file(renamed(arrays), target / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(source / "tokenizer.json", target / "tokenizer.json")
    own = json.loads((source / "config.json").read_text())
    for name, content in (
        ("config.json", _config(arrays)),
        ("generation_config.json", _decoding(own)),
        ("preprocessor_config.json", {"feature_size": arrays["encoder/conv1/weight"].shape[1]}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        (target / name).write_text(json.dumps(content))
    return target


def read_arrays(path: Path) -> Arrays:
    """The float16 arrays of a file by name."""
    data, at, found = path.read_bytes(), 0, Arrays()

    def number(form: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(f"<{form}", data, at)
        at += struct.calcsize(form)
        return value

    def text() -> str:
        nonlocal at
        size = number("H")
        at += size
        return data[at - size : at - 1].decode()

    assert number("I") == 6
    assert text() == "WhisperSpec"
    number("I")
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        kind, size = number("B"), number("I")
        if kind == _FLOAT16:
            found[name] = np.frombuffer(data, "<f2", size // 2, at).reshape(shape)
        at += size
    return found


def renamed(arrays: Arrays) -> Arrays:
    """The arrays with transformers' names, and projections apart; keys' biases are zeros."""
    found = {
        f"model.{part}.{own}": arrays[f"{part}/{theirs}"]
        for part, theirs, own in (
            ("encoder", "position_encodings/encodings", "embed_positions.weight"),
            ("decoder", "position_encodings/encodings", "embed_positions.weight"),
            ("decoder", "embeddings/weight", "embed_tokens.weight"),
            *(
                ("encoder", f"conv{index}/{kind}", f"conv{index}.{kind}")
                for index in (1, 2)
                for kind in ("weight", "bias")
            ),
        )
    }
    for part in ("encoder", "decoder"):
        found |= _norm(arrays, f"{part}/layer_norm", f"model.{part}.layer_norm")
        for index in range(_layers(arrays, part)):
            theirs, own = f"{part}/layer_{index}", f"model.{part}.layers.{index}"
            found |= _layer(arrays, theirs, own)
    return {name: np.ascontiguousarray(array) for name, array in found.items()}


def _layer(arrays: Arrays, theirs: str, own: str) -> Arrays:
    found = _norm(arrays, f"{theirs}/ffn/layer_norm", f"{own}.final_layer_norm")
    parts = {
        "self_attention": ("self_attn", [("q_proj", "k_proj", "v_proj"), ("out_proj",)]),
        "attention": ("encoder_attn", [("q_proj",), ("k_proj", "v_proj"), ("out_proj",)]),
        "ffn": ("", [("fc1",), ("fc2",)]),
    }
    for part, (name, layers) in parts.items():
        if name and f"{theirs}/{part}/layer_norm/gamma" in arrays:
            found |= _norm(arrays, f"{theirs}/{part}/layer_norm", f"{own}.{name}_layer_norm")
        for index, names in enumerate(layers):
            for kind in ("weight", "bias"):
                array = arrays.get(f"{theirs}/{part}/linear_{index}/{kind}")
                if array is None:  # an encoder attends to no other audio
                    continue
                for each, values in zip(names, np.split(array, len(names)), strict=True):
                    if (each, kind) != ("k_proj", "bias"):
                        found[".".join(filter(None, (own, name, each, kind)))] = values
    return found


def _norm(arrays: Arrays, theirs: str, own: str) -> Arrays:
    return {f"{own}.weight": arrays[f"{theirs}/gamma"], f"{own}.bias": arrays[f"{theirs}/beta"]}


def _layers(arrays: Arrays, part: str) -> int:
    norms = [name for name in arrays if name.startswith(f"{part}/layer_")]
    return len({name.split("/")[1] for name in norms} - {"layer_norm"})


def _config(arrays: Arrays) -> dict[str, object]:
    vocab_size, width = arrays["decoder/embeddings/weight"].shape
    assert vocab_size == _ENGLISH_VOCABULARY
    sizes = {
        f"{part}_{key}": value
        for part in ("encoder", "decoder")
        for key, value in (
            ("layers", _layers(arrays, part)),
            ("attention_heads", width // _HEAD_SIZE),
            ("ffn_dim", len(arrays[f"{part}/layer_0/ffn/linear_0/bias"])),
        )
    }
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 50256)
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "vocab_size": vocab_size,
        "d_model": width,
        "num_mel_bins": arrays["encoder/conv1/weight"].shape[1],
        "decoder_start_token_id": 50257,
        "torch_dtype": "float16",
        **sizes,
        **ends,
    }


def _decoding(own: dict[str, list[Any]]) -> dict[str, object]:
    """generation_config.json of openai/whisper-tiny.en."""
    return {
        "decoder_start_token_id": 50257,
        "bos_token_id": 50257,
        "eos_token_id": 50256,
        "pad_token_id": 50256,
        "is_multilingual": False,
        "max_length": 448,
        "max_initial_timestamp_index": 50,
        "no_timestamps_token_id": 50362,
        "suppress_tokens": own["suppress_ids"],
        "begin_suppress_tokens": own["suppress_ids_begin"],
        "alignment_heads": own["alignment_heads"],
    }
