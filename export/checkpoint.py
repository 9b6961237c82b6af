"""A checkpoint on disk: config, tensors as byte streams, tokenizer files; its files, written."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from edgellm.contract import BrokenArtifactError
from edgellm.strict_json import parse

CHUNK_BYTES = 1 << 22
ITEM_BITS = {
    "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "I8": 8, "U8": 8, "I32": 32, "I64": 64,
    "BOOL": 8, "F64": 64, "F8_E5M2": 8, "I16": 16, "U16": 16, "U32": 32, "U64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Type (safetensors spelling, e.g. "BF16") and shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * ITEM_BITS[self.dtype] // 8


class TensorSource(Protocol):
    """Named tensors whose data can be streamed without holding a whole tensor."""

    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by name."""
        ...

    def stream(self, name: str) -> Iterator[memoryview]:
        """Row-major little-endian data in pieces; a piece is valid until the next is taken."""
        ...


def read_whole(source: TensorSource, name: str) -> bytearray:
    """All data of one tensor (pieces share a buffer, so they must be copied one by one)."""
    data = bytearray()
    for piece in source.stream(name):
        data += piece
    return data


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything `edgellm-export` reads of a model."""

    label: str  # where it came from, for messages and provenance
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: TensorSource
    tokenizer_files: dict[str, bytes] = field(repr=False)
    quant_config: dict[str, Any] = field(default_factory=dict)
    processor_files: dict[str, bytes] = field(default_factory=dict, repr=False)
    last_token: tuple[str, int] = ("", -1)  # of the tokenizer, with its id, the highest
    blocks: TensorSource | None = None  # the tensors before they were decoded, of a GGUF file

    @property
    def quantization(self) -> str:
        """The checkpoint's own name for how its weights are stored, "none" for floats."""
        config = self.quant_config
        return str(config.get("quant_algo") or config.get("quant_method") or "none")


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


class Safetensors:
    """The tensors of one or several safetensors files (format version 1: JSON header + data)."""

    def __init__(self, paths: list[Path]) -> None:
        """Read and check all headers; raises `BrokenArtifactError` for a damaged file."""
        self._infos: dict[str, TensorInfo] = {}
        self._places: dict[str, tuple[Path, int]] = {}
        for path in paths:
            self._read_header(path)

    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by name."""
        return self._infos

    def stream(self, name: str) -> Iterator[memoryview]:
        """Row-major little-endian data in pieces of at most `CHUNK_BYTES`."""
        path, offset = self._places[name]
        left = self._infos[name].num_bytes
        buffer = memoryview(bytearray(min(CHUNK_BYTES, max(left, 1))))
        with path.open("rb", buffering=0) as stream:
            stream.seek(offset)
            while left:
                read = stream.readinto(buffer[: min(left, len(buffer))])
                if not read:
                    raise BrokenArtifactError(f"{path} ends inside tensor {name}")
                yield buffer[:read]
                left -= read

    def _read_header(self, path: Path) -> None:
        remedy = "download or copy the file again"
        try:
            size = path.stat().st_size
            with path.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                if length > size - 8:
                    raise BrokenArtifactError(
                        f"{path} is truncated: its header alone needs {length + 8} bytes, "
                        f"the file has {size}",
                        hint=remedy,
                    )
                header = parse(stream.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            for name, entry in entries.items():
                info = TensorInfo(entry["dtype"], tuple(entry["shape"]))
                begin, end = entry["data_offsets"]
                if info.num_bytes != end - begin:
                    raise BrokenArtifactError(f"{path}: wrong size of tensor {name}", hint=remedy)
                self._infos[name] = info
                self._places[name] = (path, 8 + length + begin)
            expected = 8 + length + max((e["data_offsets"][1] for e in entries.values()), default=0)
        except FileNotFoundError:
            raise BrokenArtifactError(f"{path} is missing", hint=remedy) from None
        except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BrokenArtifactError(
                f"{path} is not a safetensors file ({type(error).__name__}: {error})", hint=remedy
            ) from None
        if size < expected:
            raise BrokenArtifactError(
                f"{path} is truncated: {size} of {expected} bytes", hint=remedy
            )


def write_safetensors(path: Path, source: TensorSource, names: list[str]) -> None:
    """Write the tensors `names` of `source` in this order, without holding one of them."""
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
