"""Checkpoints: config, tensors as byte streams, tokenizer files; writer of safetensors files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm.core.model_spec import PoolerSpec
from edgellm.core.safetensors_io import CHUNK_BYTES, ITEM_BITS, Safetensors, TensorInfo

__all__ = [
    "CHUNK_BYTES",
    "ITEM_BITS",
    "Checkpoint",
    "Renamed",
    "Safetensors",
    "TensorInfo",
    "TensorSource",
    "read_whole",
    "write_safetensors",
]


class TensorSource(Protocol):
    """Named tensors whose data can be streamed without holding a whole tensor."""

    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by name."""
        ...

    def stream(self, name: str) -> Iterator[memoryview]:
        """Row-major little-endian data in pieces; a piece is valid until the next is taken."""
        ...


def read_whole(source: TensorSource, name: str) -> bytearray:
    """All data of one tensor, copied piece by piece, since pieces share a buffer."""
    data = bytearray()
    for piece in source.stream(name):
        data += piece
    return data


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model's files as input of `edgellm-export`."""

    label: str  # its source, for messages and provenance
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: TensorSource
    tokenizer_files: dict[str, bytes] = field(repr=False)
    quant_config: dict[str, Any] = field(default_factory=dict)
    processor_files: dict[str, bytes] = field(default_factory=dict, repr=False)
    last_token: tuple[str, int] = ("", -1)  # of the tokenizer, with its id, which is the highest
    blocks: TensorSource | None = None  # stored tensors of a GGUF file
    eos_token_id: int | None = None  # from the tokenizer
    pooling: str = ""  # of `POOLINGS`: pooling of an embedding model, if its files state it
    pooler: PoolerSpec | None = None  # what follows pooling, if its files state it
    score_activation: str | None = None  # class of a cross-encoder's, if its files state it
    pooler_tensors: dict[str, NDArray[np.float32]] = field(default_factory=dict, repr=False)

    @property
    def quantization(self) -> str:
        """The checkpoint's quantization method, "none" for floats."""
        config = self.quant_config
        return str(config.get("quant_algo") or config.get("quant_method") or "none")


def with_parts(name: str, renamed: Mapping[str, str]) -> str:
    """A tensor's name with other parts between its dots."""
    return ".".join(renamed.get(part, part) for part in name.split(".")) if renamed else name


class Renamed:
    """Some tensors of a source under other names."""

    def __init__(self, source: TensorSource, names: Mapping[str, str]) -> None:
        """`names`: the source's name of each new one."""
        self._source, self._names = source, names

    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by name."""
        infos = self._source.infos()
        return {name: infos[stored] for name, stored in self._names.items()}

    def stream(self, name: str) -> Iterator[memoryview]:
        """See `TensorSource`."""
        return self._source.stream(self._names[name])


def write_safetensors(path: Path, source: TensorSource, names: list[str]) -> None:
    """Write the tensors `names` of `source` in this order, as streams."""
    infos, position = source.infos(), 0
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name in names:
        info = infos[name]
        end = position + info.num_bytes
        header[name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            for piece in source.stream(name):
                stream.write(piece)
