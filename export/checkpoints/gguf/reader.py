"""GGUF reader: metadata as plain Python, tensors as rows of bytes.

Source: the GGUF specification, versions 2 and 3, and llama.cpp's gguf-split. The reader of the
package gguf makes an array of every string of the vocabulary, which takes seconds.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core.errors import UnsupportedModelError

_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_ALIGNMENT_BYTES = 32  # default
_SPLIT, _SPLIT_NAME = "split", re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
# Number in the file -> name, values of a block, bytes of a block. Others are from the package.
_KINDS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136), 30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """A stored tensor."""

    name: str
    kind: str  # llama.cpp's name of the type, "Q4_K"
    shape: tuple[int, ...]  # row-major, [out, in]
    # [rows, bytes of a row]; for a vector, single numbers or groups of them.
    data: NDArray[np.uint8] = field(repr=False)


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A GGUF file with memory-mapped tensors."""

    metadata: dict[str, Any] = field(repr=False)
    tensors: tuple[GGUFTensor, ...] = field(repr=False)


def read_gguf(path: Path) -> GGUFFile:
    """Read the header and map the tensors, of all files if llama-gguf-split divided the model.

    Args:
        path: of the file, or of any file of a split. The first has the metadata.

    Raises:
        ValueError: not a GGUF file of a known version, damaged, truncated, or its split is not
            complete.
    """
    file = _read_one(path)
    count = file.metadata.get(f"{_SPLIT}.count", 0)
    return file if count in (0, 1) else _joined(path, count)


def _signs(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """A bit for each value: -1 or 1."""
    return 2 * np.unpackbits(codes, axis=1, bitorder="little").astype(np.float32) - 1


def _quarters(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Two bits for each value: -1 to 2."""
    bits = np.unpackbits(codes, axis=1, bitorder="little").astype(np.float32)
    return bits[:, ::2] + 2 * bits[:, 1::2] - 1


# Types that the package has in newer versions only: a scale, then codes.
_OWN = {"Q1_0": _signs, "Q2_0": _quarters}


def decoded(rows: NDArray[np.uint8], kind: str) -> NDArray[np.float32]:
    """Blocks as float32.

    Raises:
        UnsupportedModelError: the package gguf does not decode the type.
    """
    from gguf import GGMLQuantizationType, dequantize

    if (own := _OWN.get(kind)) is not None:
        blocks = rows.reshape(-1, 18)
        scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
        return (own(blocks[:, 2:]) * scales).reshape(*rows.shape[:-1], -1)
    try:
        return dequantize(rows, GGMLQuantizationType[kind])
    except NotImplementedError:
        raise UnsupportedModelError(
            f"the GGUF file has tensors of type {kind}, which the package gguf does not decode",
            hint="quantize the model again to another type, as Q8_0 or Q4_K_M",
        ) from None


def is_split(path: Path) -> bool:
    """Whether a file's name says that it is one of several."""
    found = _SPLIT_NAME.fullmatch(path.name)
    return found is not None and int(found[2]) > 1


def _joined(path: Path, count: int) -> GGUFFile:
    """All files of a split, by the names that llama.cpp gives them."""
    name = _SPLIT_NAME.fullmatch(path.name)
    if name is None or int(name[2]) != count:
        raise ValueError(
            f"it is one of {count} files, whose names must end with -00001-of-{count:05}.gguf"
        )
    files: list[GGUFFile] = []
    for number in range(count):
        part = path.with_name(f"{name[1]}-{number + 1:05}-of-{count:05}.gguf")
        if not part.exists():
            raise ValueError(f"{part.name} is missing")
        files.append(_read_one(part))
        said = [files[-1].metadata.get(f"{_SPLIT}.{key}") for key in ("no", "count")]
        if said != [number, count]:
            raise ValueError(f"{part.name} says that it is number {said[0]} of {said[1]}, from 0")
    tensors = tuple(tensor for file in files for tensor in file.tensors)
    names, metadata = {tensor.name for tensor in tensors}, files[0].metadata
    if not len(names) == len(tensors) == metadata.get(f"{_SPLIT}.tensors.count", len(tensors)):
        raise ValueError("its files are of different splits")
    return GGUFFile(metadata, tensors)


def _read_one(path: Path) -> GGUFFile:
    with path.open("rb") as stream:
        header = _Header(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    if header.take(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = header.number("<u4")
    if version and version % (1 << 24) == 0:
        raise ValueError("it is big-endian; gguf_convert_endian.py of llama.cpp converts it")
    if version not in _VERSIONS:
        raise ValueError(f"version {version}")
    tensor_count, pair_count = header.number("<u8"), header.number("<u8")
    metadata = _metadata(header, pair_count)
    facts = [_tensor_facts(header) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", _ALIGNMENT_BYTES)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"an alignment of {alignment!r}")
    begin = -(-header.place // alignment) * alignment
    return GGUFFile(metadata, tuple(_mapped(header.data, begin, *each) for each in facts))


class _Header:
    """Reads values one after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.place = data, 0

    def take(self, count: int) -> bytes:
        end = self.place + count
        if end > len(self.data):
            raise ValueError("it ends within its header")
        taken = self.data[self.place : end]
        self.place = end
        return taken

    def number(self, kind: str) -> Any:
        dtype = np.dtype(kind)
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()

    def text(self) -> str:
        return self.take(self.number("<u8")).decode()

    def texts(self, count: int) -> Iterator[str]:
        """Strings of a list, without a call for each length."""
        data, place, length = self.data, self.place, struct.Struct("<Q")
        for _ in range(count):
            if place + length.size > len(data):
                raise ValueError("it ends within a list")
            (size,) = length.unpack_from(data, place)
            begin, place = place + length.size, place + length.size + size
            if place > len(data):
                raise ValueError("it ends within a string")
            yield data[begin:place].decode()
            self.place = place

    def value(self) -> Any:
        kind = self.number("<u4")
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_scalar(kind))
        item, count = self.number("<u4"), self.number("<u8")
        if item == _STRING:
            return list(self.texts(count))
        dtype = np.dtype(_scalar(item))
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"a value of type {kind}")
    return _SCALARS[kind]


def _metadata(header: _Header, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(count):
        key = header.text()
        if key in found:
            raise ValueError(f"{key} is given twice")
        found[key] = header.value()
    return found


def _tensor_facts(header: _Header) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape (row-major), type and offset of a tensor."""
    name, rank = header.text(), header.number("<u4")
    shape = tuple(header.number("<u8") for _ in range(rank))[::-1]
    return name, shape, header.number("<u4"), header.number("<u8")


def _mapped(
    data: mmap.mmap, begin: int, name: str, shape: tuple[int, ...], number: int, offset: int
) -> GGUFTensor:
    kind, values, size = _KINDS.get(number) or _rare(number)
    is_vector = len(shape) == 1 and values == 1
    width = 1 if is_vector or not shape else shape[-1]
    if width % values:
        raise ValueError(f"{name} has rows of {width} values, {kind} has blocks of {values}")
    row_bytes = width // values * size
    rows, first = math.prod(shape) // width if width else 0, begin + offset
    if first + rows * row_bytes > len(data):
        raise ValueError(f"it ends before {name} does")
    held = np.frombuffer(data, np.uint8, rows * row_bytes, first)
    return GGUFTensor(name=name, kind=kind, shape=shape, data=held.reshape(rows, row_bytes))


def _rare(number: int) -> tuple[str, int, int]:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = GGMLQuantizationType(number)
    return kind.name, *GGML_QUANT_SIZES[kind]
