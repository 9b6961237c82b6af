"""GGUF files as checkpoints.

Source: the GGUF specification (version 3) and llama.cpp's naming of tensors. Block-quantized
weights are dequantized while they are read; nothing of their precision is gained back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, dequantize

from edgellm.contract import BrokenArtifactError
from edgellm.export.checkpoint import CHUNK_BYTES, Checkpoint, TensorInfo, TensorSource
from edgellm.export.gguf_families import Facts, Family, UnshiftedNorms, read_config
from edgellm.export.gguf_tokenizer import convert_tokenizer
from edgellm.export.weights import as_bytes

_ROPES = ("rope_freqs", "rope_factors_")
_PLAIN = {GGMLQuantizationType.F32: "F32", GGMLQuantizationType.F16: "F16"}


class GGUFMetadata(Mapping[str, Any]):
    """The key/value section of a GGUF file as plain Python."""

    def __init__(self, reader: GGUFReader) -> None:
        self._fields = reader.fields

    def __getitem__(self, key: str) -> Any:
        return self._fields[key].contents()

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


class GGUFTensors:
    """Tensors of a GGUF file under Hugging Face names, dequantized to float as they stream."""

    def __init__(
        self, reader: GGUFReader, permuted_heads: Mapping[str, int], family: Family
    ) -> None:
        """`permuted_heads`: heads of the tensors whose rows llama.cpp interleaved, by kind."""
        self._tensors = {
            _hf_name(t.name, family): t for t in reader.tensors if not t.name.startswith(_ROPES)
        }
        self._permuted_heads = permuted_heads
        self._infos = {
            name: TensorInfo(
                _PLAIN.get(tensor.tensor_type, "F32"), tuple(int(d) for d in tensor.shape[::-1])
            )
            for name, tensor in self._tensors.items()
        }

    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by Hugging Face name."""
        return self._infos

    def stream(self, name: str) -> Iterator[memoryview]:
        """Float data, row-major, some rows at a time."""
        tensor, info = self._tensors[name], self._infos[name]
        rows = info.shape[0]
        heads = self._permuted_heads.get(tensor.name.split(".")[-2], 0)
        head_rows = rows // heads if heads else 1
        row_bytes = max(info.num_bytes // rows, 1)
        step = max(CHUNK_BYTES // (row_bytes * head_rows), 1) * head_rows
        for begin in range(0, rows, step):
            piece = tensor.data[begin : begin + step]
            if tensor.tensor_type not in _PLAIN:
                piece = dequantize(piece, tensor.tensor_type)
            if heads:
                piece = _half_split(piece, head_rows)
            yield as_bytes(piece)


def open_gguf(path: Path) -> Checkpoint:
    """Read a GGUF file.

    Raises:
        BrokenArtifactError: not a GGUF file, cut short, or without required metadata.
        UnsupportedModelError: another architecture or tokenizer.
    """
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise BrokenArtifactError(
            f"{path} is not a whole GGUF file ({error})", hint="download or copy it again"
        ) from None
    metadata = GGUFMetadata(reader)
    try:
        facts = Facts(metadata, _rope_tensors(reader), {t.name for t in reader.tensors})
        config = read_config(facts)
        tokenizer_files = convert_tokenizer(metadata.get)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise BrokenArtifactError(
            f"{path} holds damaged metadata ({error})", hint="download or copy it again"
        ) from None
    heads, family = (config["num_attention_heads"], config["num_key_value_heads"]), facts.family
    permuted = {"attn_q": heads[0], "attn_k": heads[1]} if family.is_interleaved else {}
    tensors: TensorSource = GGUFTensors(reader, permuted, family)
    if family.norm_shift:
        tensors = UnshiftedNorms(tensors, family.norm_shift)
    return Checkpoint(
        label=str(path),
        config=config,
        generation_config={"eos_token_id": _end_ids(metadata)},
        tensors=tensors,
        tokenizer_files=tokenizer_files,
    )


def _rope_tensors(reader: GGUFReader) -> dict[str, list[float]]:
    """`rope_freqs`, `rope_factors_long` and their kin by these names."""
    return {
        tensor.name.removesuffix(".weight"): np.asarray(tensor.data, np.float32).tolist()
        for tensor in reader.tensors
        if tensor.name.startswith(_ROPES)
    }


def _end_ids(metadata: GGUFMetadata) -> list[int]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return sorted({metadata[key] for key in keys if key in metadata})


def _hf_name(name: str, family: Family) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    known = None if match is None else family.name_of(match[2])
    if match is None or known is None:
        return name  # reported as a leftover
    layer = f"model.layers.{match[1]}." if match[1] is not None else ""
    return f"{layer}{known}.{match[3]}"


def _half_split(rows: np.ndarray, head_rows: int) -> np.ndarray:
    """Undo llama.cpp's order (pairs of one frequency side by side) within each head."""
    paired = rows.reshape(-1, head_rows // 2, 2, math.prod(rows.shape[1:]))
    return paired.swapaxes(1, 2).reshape(rows.shape)
