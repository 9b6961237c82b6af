"""GGUF files as checkpoints.

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
from edgellm.export.checkpoint import CHUNK_BYTES, Checkpoint, TensorInfo, TensorSource
from edgellm.export.gguf_families import SINKS, Facts, Family, read_config
from edgellm.export.gguf_file import GGUFFile, read_gguf
from edgellm.export.gguf_tokenizer import convert_tokenizer
from edgellm.export.quantized.gguf import FORMS, MXFP4
from edgellm.export.weights import as_bytes

_ROPES = ("rope_freqs", "rope_factors_")
# Stored types that a bundle has, too, as safetensors spell them.
_PLAIN = {"F32": "F32", "F16": "F16", "BF16": "BF16"}


class GGUFTensors:
    """Tensors of a GGUF file under Hugging Face names, floats as they stream."""

    def __init__(
        self,
        file: GGUFFile,
        permuted_heads: Mapping[str, int],
        family: Family,
        *,
        keeps_blocks: bool,
    ) -> None:
        """Args as follows.

        Args:
            file: holds them.
            permuted_heads: heads of the tensors whose rows llama.cpp interleaved, by kind.
            family: names them.
            keeps_blocks: blocks that a bundle can hold (`quantized.gguf`) stay as they are, their
                types spelled as llama.cpp does; all others are decoded.
        """
        self._tensors = {
            _hf_name(t.name, family): t for t in file.tensors if not t.name.startswith(_ROPES)
        }
        self._permuted_heads = permuted_heads
        kept = (*FORMS, MXFP4) if keeps_blocks else ()
        self._infos = {
            name: TensorInfo(
                tensor.kind if tensor.kind in kept else _PLAIN.get(tensor.kind, "F32"),
                _own_shape(name, tensor.shape),
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


def _own_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Weights of convolutions [W, 1, K], which files have without the middle."""
    is_flat = name.endswith(".conv.conv.weight") and len(shape) == 2
    return (shape[0], 1, shape[1]) if is_flat else shape


class UnshiftedNorms:
    """Tensors, the weights of whose norms are what they were before a shift was added."""

    def __init__(self, source: TensorSource, shift: float) -> None:
        self._source, self._shift = source, shift

    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by name."""
        return self._source.infos()

    def stream(self, name: str) -> Iterator[memoryview]:
        """Data in pieces."""
        if not name.endswith("norm.weight"):
            yield from self._source.stream(name)
            return
        if (kind := self.infos()[name].dtype) != "F32":
            raise UnsupportedModelError(f"{name} has type {kind}, not F32, in the GGUF file")
        for piece in self._source.stream(name):
            yield as_bytes(np.frombuffer(piece, np.float32) - np.float32(self._shift))


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
    metadata = file.metadata
    try:
        facts = Facts(metadata, _rope_tensors(file), {t.name for t in file.tensors})
        config = read_config(facts)
        tokenizer_files = convert_tokenizer(metadata.get)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise BrokenArtifactError(
            f"{path} holds damaged metadata ({error})", hint="download or copy it again"
        ) from None
    heads, family = (config["num_attention_heads"], config["num_key_value_heads"]), facts.family
    permuted = {"attn_q": heads[0], "attn_k": heads[1]} if family.is_interleaved else {}
    tensors, blocks = (
        _unshifted(GGUFTensors(file, permuted, family, keeps_blocks=keeps), family)
        for keeps in (False, True)
    )
    return Checkpoint(
        label=str(path),
        config=config,
        generation_config={"eos_token_id": _end_ids(metadata)},
        tensors=tensors,
        tokenizer_files=tokenizer_files,
        blocks=blocks,
    )


def _unshifted(tensors: TensorSource, family: Family) -> TensorSource:
    return UnshiftedNorms(tensors, family.norm_shift) if family.norm_shift else tensors


def _rope_tensors(file: GGUFFile) -> dict[str, list[float]]:
    """`rope_freqs`, `rope_factors_long` and their kin by these names."""
    return {
        tensor.name.removesuffix(".weight"): tensor.data.view(np.float32).reshape(-1).tolist()
        for tensor in file.tensors
        if tensor.name.startswith(_ROPES)
    }


def _end_ids(metadata: Mapping[str, Any]) -> list[int]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return sorted({metadata[key] for key in keys if key in metadata})


def _hf_name(name: str, family: Family) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?([\w.]+)\.(weight|bias)", name)
    known = None if match is None else family.name_of(match[2])
    if match is None or known is None:
        return name  # reported as a leftover
    layer = f"model.layers.{match[1]}." if match[1] is not None else ""
    return f"{layer}{known}" if known.endswith(SINKS) else f"{layer}{known}.{match[3]}"


def _half_split(rows: np.ndarray, head_rows: int) -> np.ndarray:
    """Undo llama.cpp's order (pairs of one frequency side by side) within each head."""
    paired = rows.reshape(-1, head_rows // 2, 2, math.prod(rows.shape[1:]))
    return paired.swapaxes(1, 2).reshape(rows.shape)
