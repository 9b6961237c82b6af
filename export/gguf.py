"""GGUF files of the Llama, Qwen2 and Qwen3 families as checkpoints.

Source: the GGUF specification (version 3) and llama.cpp's naming of tensors. A checkpoint has
their tensors twice: as floats, decoded while they are read, and as the blocks that they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.contract import BrokenArtifactError, UnsupportedModelError
from edgellm.export.checkpoint import CHUNK_BYTES, Checkpoint, TensorInfo
from edgellm.export.gguf_file import GGUFFile, read_gguf
from edgellm.export.gguf_tokenizer import convert_tokenizer
from edgellm.export.quantized.gguf import FORMS
from edgellm.export.weights import as_bytes

_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Stored types that a bundle has, too, as safetensors spell them.
_PLAIN = {"F32": "F32", "F16": "F16", "BF16": "BF16"}


class GGUFMetadata:
    """The key/value section of a GGUF file."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key` as plain Python, `default` when absent."""
        return self._fields.get(key, default)

    def require(self, key: str) -> Any:
        """The value of `key`; raises `BrokenArtifactError` when absent."""
        if key not in self._fields:
            raise BrokenArtifactError(f"the GGUF file has no {key}")
        return self._fields[key]


class GGUFTensors:
    """Tensors of a GGUF file under Hugging Face names, floats as they stream."""

    def __init__(
        self, file: GGUFFile, permuted_heads: Mapping[str, int], *, keeps_blocks: bool
    ) -> None:
        """Args as follows.

        Args:
            file: holds them.
            permuted_heads: heads of the tensors whose rows llama.cpp interleaved, by kind.
            keeps_blocks: blocks that a bundle can hold (`quantized.gguf`) stay as they are, their
                types spelled as llama.cpp does; all others are decoded.
        """
        self._tensors = {
            _hf_name(t.name): t for t in file.tensors if not t.name.startswith("rope_freqs")
        }
        self._permuted_heads = permuted_heads
        kept = FORMS if keeps_blocks else ()
        self._infos = {
            name: TensorInfo(
                tensor.kind if tensor.kind in kept else _PLAIN.get(tensor.kind, "F32"), tensor.shape
            )
            for name, tensor in self._tensors.items()
        }

    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by Hugging Face name."""
        return self._infos

    def stream(self, name: str) -> Iterator[memoryview]:
        """Data, row-major, some whole rows at a time."""
        tensor, info = self._tensors[name], self._infos[name]
        rows = len(tensor.data)
        heads = self._permuted_heads.get(tensor.name.split(".")[-2], 0)
        head_rows = rows // heads if heads else 1
        row_bytes = max(4 * math.prod(tensor.shape) // max(rows, 1), 1)  # of float32
        step = max(CHUNK_BYTES // (row_bytes * head_rows), 1) * head_rows
        for begin in range(0, rows, step):
            piece = tensor.data[begin : begin + step]
            if info.dtype != tensor.kind:
                piece = _decoded(piece, tensor.kind)
            if heads:
                piece = _half_split(piece, head_rows)
            yield as_bytes(piece)


def _decoded(rows: np.ndarray, kind: str) -> np.ndarray:
    """Blocks as float32."""
    from gguf import GGMLQuantizationType, dequantize

    return dequantize(rows, GGMLQuantizationType[kind])


def open_gguf(path: Path) -> Checkpoint:
    """Read a GGUF file.

    Raises:
        BrokenArtifactError: not a GGUF file, cut short, or without required metadata.
        UnsupportedModelError: another architecture or tokenizer.
    """
    try:
        file = read_gguf(path)
    except (ValueError, OverflowError) as error:
        raise BrokenArtifactError(
            f"{path} is not a whole GGUF file ({error})", hint="download or copy it again"
        ) from None
    metadata = GGUFMetadata(file.metadata)
    try:
        config = _config(metadata, file)
        tokenizer_files = convert_tokenizer(metadata.get)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise BrokenArtifactError(
            f"{path} holds damaged metadata ({error})", hint="download or copy it again"
        ) from None
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    interleaved = config["model_type"] == "llama"
    permuted = {"attn_q": heads[0], "attn_k": heads[1]} if interleaved else {}
    return Checkpoint(
        label=str(path),
        config=config,
        generation_config={"eos_token_id": _end_ids(metadata)},
        tensors=GGUFTensors(file, permuted, keeps_blocks=False),
        tokenizer_files=tokenizer_files,
        blocks=GGUFTensors(file, permuted, keeps_blocks=True),
    )


def _config(metadata: GGUFMetadata, file: GGUFFile) -> dict[str, Any]:
    """The equivalent config.json."""
    arch = metadata.require("general.architecture")
    if arch not in _MODEL_TYPES:
        raise UnsupportedModelError(
            f"GGUF architecture {arch!r} is not supported",
            hint=f"supported: {', '.join(_MODEL_TYPES)}; docs/reference/models.md says more",
        )
    heads = metadata.require(f"{arch}.attention.head_count")
    hidden = metadata.require(f"{arch}.embedding_length")
    epsilon = metadata.require(f"{arch}.attention.layer_norm_rms_epsilon")
    names = {tensor.name for tensor in file.tensors}
    config = {
        "model_type": _MODEL_TYPES[arch],
        "vocab_size": len(metadata.require("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": metadata.require(f"{arch}.feed_forward_length"),
        "num_hidden_layers": metadata.require(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get(f"{arch}.attention.head_count_kv", heads),
        "head_dim": metadata.get(f"{arch}.attention.key_length", hidden // heads),
        "rms_norm_eps": float(f"{epsilon:.6g}"),  # stored as float32
        "max_position_embeddings": metadata.require(f"{arch}.context_length"),
        "rope_parameters": _rope(metadata, file, arch),
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if arch == "llama" and "blk.0.attn_q.bias" in names:
        config["attention_bias"] = True
    return config


def _rope(metadata: GGUFMetadata, file: GGUFFile, arch: str) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": metadata.get(f"{arch}.rope.freq_base", 10000.0)}
    factors = next((t for t in file.tensors if t.name == "rope_freqs.weight"), None)
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    if factors is not None:
        numbers = factors.data.view(np.float32).reshape(-1).tolist()
        rope |= {"rope_type": "factors", "factors": numbers}
    elif kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": metadata.require(f"{arch}.rope.scaling.factor")}
        original = metadata.get(f"{arch}.rope.scaling.original_context_length")
        rope |= {"original_max_position_embeddings": original} if original else {}
    elif kind != "none":
        raise UnsupportedModelError(f"GGUF rope scaling {kind!r} is not supported")
    return rope


def _end_ids(metadata: GGUFMetadata) -> list[int]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return sorted({metadata.get(key) for key in keys} - {None})


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _TENSOR_NAMES:
        return name  # reported as a leftover
    layer = f"model.layers.{match[1]}." if match[1] is not None else ""
    return f"{layer}{_TENSOR_NAMES[match[2]]}.{match[3]}"


def _half_split(rows: np.ndarray, head_rows: int) -> np.ndarray:
    """Undo llama.cpp's order (pairs of one frequency side by side) within each head."""
    paired = rows.reshape(-1, head_rows // 2, 2, math.prod(rows.shape[1:]))
    return paired.swapaxes(1, 2).reshape(rows.shape)
