"""Reader of safetensors files that streams tensors. Standard library only."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.core.errors import BrokenArtifactError, UnsupportedModelError
from edgellm.core.strict_json import parse

CHUNK_BYTES = 1 << 22
ITEM_BITS = {
    "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "I8": 8, "U8": 8, "I32": 32, "I64": 64,
    "BOOL": 8, "F64": 64, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4,
    "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "U32": 32, "U64": 64, "C64": 64,
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


class Safetensors:
    """The tensors of one or several safetensors files (format version 1: JSON header + data)."""

    def __init__(self, paths: list[Path]) -> None:
        """Read and check all headers.

        Raises:
            BrokenArtifactError: a damaged file, or different tensors of one name in two files.
        """
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
                info, begin, end = _place_of(entry)
                if isinstance(info.dtype, str) and info.dtype not in ITEM_BITS:
                    raise UnsupportedModelError(
                        f"{path}: tensor {name} has the unknown type {info.dtype}",
                        hint=f"convert it to a known one ({', '.join(ITEM_BITS)}), or {remedy}",
                    )
                if info.num_bytes != end - begin:
                    raise BrokenArtifactError(f"{path}: wrong size of tensor {name}", hint=remedy)
                self._add(name, info, path, 8 + length + begin)
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

    def _add(self, name: str, info: TensorInfo, path: Path, offset: int) -> None:
        """Add a tensor; a duplicate in another file must be equal."""
        earlier = self._places.get(name)
        if earlier is not None:
            known = self._infos[name]
            if known != info or self._differs(info, earlier, (path, offset)):
                raise BrokenArtifactError(
                    f"{earlier[0]} and {path} hold different tensors {name}",
                    hint="one of these files is from another save; copy the checkpoint again",
                )
        self._infos[name], self._places[name] = info, (path, offset)

    @staticmethod
    def _differs(info: TensorInfo, one: tuple[Path, int], other: tuple[Path, int]) -> bool:
        left = info.num_bytes
        with one[0].open("rb") as first, other[0].open("rb") as second:
            first.seek(one[1])
            second.seek(other[1])
            while left:
                step = min(left, CHUNK_BYTES)
                if first.read(step) != second.read(step):
                    return True
                left -= step
        return False


def _place_of(entry: Mapping[str, Any]) -> tuple[TensorInfo, int, int]:
    """Type and shape, first byte of the data and the byte after it; raises `ValueError`."""
    info = TensorInfo(entry["dtype"], tuple(entry["shape"]))
    begin, end = entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*info.shape, begin, end)):
        raise ValueError(f"shape {entry['shape']}, data_offsets {entry['data_offsets']}")
    return info, begin, end
