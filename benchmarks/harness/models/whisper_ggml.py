"""Whisper in whisper.cpp's file format, from a checkpoint of transformers.

Little endian: magic, sizes, mel filters [bins, frequencies], the tokens' bytes, then tensors with
their dimensions from the last to the first.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer, pre_tokenizers

from edgellm.multimodal.log_mel import mel_filters

_MAGIC = 0x67676D6C
F16, Q8_0 = gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0
_F32 = gguf.GGMLQuantizationType.F32
_FILE_TYPES = {F16: 1, Q8_0: 7}  # of most tensors
_SIZES = (
    "vocab_size",
    "max_source_positions",
    "d_model",
    "encoder_attention_heads",
    "encoder_layers",
    "max_target_positions",
    "d_model",
    "decoder_attention_heads",
    "decoder_layers",
    "num_mel_bins",
)
_DEFAULTS = {"max_source_positions": 1500, "max_target_positions": 448}
_NAMES = {
    "model.": "",
    "layers": "blocks",
    "self_attn_layer_norm": "attn_ln",
    "encoder_attn_layer_norm": "cross_attn_ln",
    "final_layer_norm": "mlp_ln",
    "encoder_attn": "cross_attn",
    "self_attn": "attn",
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "out_proj": "out",
    "fc1": "mlp.0",
    "fc2": "mlp.2",
    "encoder.layer_norm": "encoder.ln_post",
    "decoder.layer_norm": "decoder.ln",
    "embed_positions.weight": "positional_embedding",
    "embed_tokens": "token_embedding",
}


def write(checkpoint: Path, path: Path, kind: gguf.GGMLQuantizationType = F16) -> Path:
    """Write a checkpoint's weights as F16 or Q8_0, unless the file exists."""
    if path.exists():
        return path
    config = {**_DEFAULTS, **json.loads((checkpoint / "config.json").read_text())}
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        sizes = [config[name] for name in _SIZES]
        file.write(struct.pack("<I11i", _MAGIC, *sizes, _FILE_TYPES[kind]))
        filters = mel_filters(config["num_mel_bins"]).T.astype(np.float32)
        file.write(struct.pack("<2i", *filters.shape) + np.ascontiguousarray(filters).tobytes())
        _write_tokens(file, Tokenizer.from_file(str(checkpoint / "tokenizer.json")))
        for name, array in load_file(checkpoint / "model.safetensors").items():
            _write_tensor(file, _renamed(name), array, kind)
    return partial.replace(path)


def _write_tokens(file: BinaryIO, tokenizer: Tokenizer) -> None:
    """Write ordinary tokens; whisper.cpp names the special ones."""
    letters = _byte_letters()
    ordinary = tokenizer.get_vocab(with_added_tokens=False)
    words = sorted(ordinary, key=ordinary.__getitem__)
    file.write(struct.pack("<i", len(words)))
    for word in words:
        data = bytes(letters[each] for each in word) if set(word) <= letters.keys() else b""
        data = data or word.encode()
        file.write(struct.pack("<i", len(data)) + data)


def _byte_letters() -> dict[str, int]:
    """Bytes by the letters that stand for them in a vocabulary of bytes."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = {}
    for byte in range(128):
        ((letter, _),) = plain.pre_tokenize_str(chr(byte))
        found[letter] = byte
    for byte in range(128, 256):  # in a character of two bytes
        lead = 0xC2 if byte < 0xC0 else byte
        pair = bytes([lead, byte]) if byte < 0xC0 else bytes([lead, 0x80])
        try:
            ((letters, _),) = plain.pre_tokenize_str(pair.decode())
        except UnicodeDecodeError:
            continue  # no text has this byte first
        found[letters[1 if byte < 0xC0 else 0]] = byte
    return found


def _renamed(name: str) -> str:
    for theirs, own in _NAMES.items():
        name = name.replace(theirs, own)
    return name


def _write_tensor(
    file: BinaryIO, name: str, array: np.ndarray, kind: gguf.GGMLQuantizationType
) -> None:
    if name.endswith(("conv1.bias", "conv2.bias")):
        array = array[:, None]
    if array.ndim < 2 or name.endswith(("positional_embedding", "bias")):
        stored, data = _F32, array.astype(np.float32)
    elif array.ndim == 2 and kind != F16:
        stored, data = kind, gguf.quants.quantize(array.astype(np.float32), kind)
    else:
        stored, data = F16, array.astype(np.float16)
    encoded = name.encode()
    file.write(struct.pack("<3i", array.ndim, len(encoded), stored))
    file.write(struct.pack(f"<{array.ndim}i", *reversed(array.shape)) + encoded + data.tobytes())
