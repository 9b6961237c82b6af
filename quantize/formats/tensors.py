"""Tensors of a checkpoint in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.export.checkpoints.checkpoint import TensorInfo, TensorSource, read_whole
from edgellm.quantize.formats.modelopt import E4M3, F32

_PLAIN = {"F32": np.float32, "F16": np.float16, "I8": np.int8, "U8": np.uint8, "I64": np.int64,
          "I32": np.int32, "F64": np.float64, "BOOL": np.bool_}  # fmt: skip
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A stored tensor: type, shape and its bytes, row-major and little-endian."""

    info: TensorInfo
    data: bytes | bytearray | memoryview

    def floats(self) -> F32:
        """Return the values as float32."""
        if self.info.dtype == "BF16":
            wide = np.frombuffer(self.data, np.uint16).astype(np.uint32) << np.uint32(16)
            return wide.view(np.float32).reshape(self.info.shape)
        if self.info.dtype == "F8_E4M3":
            return E4M3[self.bits()]
        return self.array().astype(np.float32)

    def array(self) -> NDArray:
        """Return the values in numpy's type of the same name."""
        return np.frombuffer(self.data, _PLAIN[self.info.dtype]).reshape(self.info.shape)

    def transposed(self) -> Tensor:
        """Return the matrix with its axes swapped."""
        rows, width = self.info.shape
        bits = np.frombuffer(self.data, f"V{self.info.num_bytes // (rows * width)}")
        turned = bits.reshape(rows, width).T.tobytes()
        return Tensor(TensorInfo(self.info.dtype, (width, rows)), turned)

    def rows(self, begin: int, end: int) -> Tensor:
        """Return a part along the first axis."""
        row = self.info.num_bytes // self.info.shape[0]
        count = min(end, self.info.shape[0]) - begin
        info = TensorInfo(self.info.dtype, (count, *self.info.shape[1:]))
        return Tensor(info, memoryview(self.data)[begin * row : (begin + count) * row])

    def bits(self) -> NDArray[np.uint8]:
        """Return the bytes of a type of one byte."""
        return np.frombuffer(self.data, np.uint8).reshape(self.info.shape)


def read_tensor(source: TensorSource, name: str) -> Tensor:
    """Read one tensor."""
    return Tensor(source.infos()[name], read_whole(source, name))


def read_below(source: TensorSource, prefix: str) -> dict[str, Tensor]:
    """Read all tensors whose names begin with `prefix`, which is removed."""
    return {
        name[len(prefix) :]: read_tensor(source, name)
        for name in source.infos()
        if name.startswith(prefix)
    }


class InMemory:
    """A `TensorSource` of tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by name."""
        return {name: tensor.info for name, tensor in self._tensors.items()}

    def stream(self, name: str) -> Iterator[memoryview]:
        """Yield the data of a tensor, whole."""
        yield memoryview(self._tensors[name].data)


class Joined:
    """A union of several sources; the last source with a name wins."""

    def __init__(self, sources: list[TensorSource]) -> None:
        self._owners: dict[str, TensorSource] = {}
        self._infos: dict[str, TensorInfo] = {}
        for source in sources:
            infos = source.infos()
            self._owners |= dict.fromkeys(infos, source)
            self._infos |= infos

    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by name."""
        return self._infos

    def stream(self, name: str) -> Iterator[memoryview]:
        """Yield the data of a tensor in parts."""
        yield from self._owners[name].stream(name)


def split_shards(source: TensorSource, names: list[str], shard_bytes: int) -> list[list[str]]:
    """Split names into shards of at most `shard_bytes`, or of one larger tensor."""
    shards: list[list[str]] = [[]]
    size, infos = 0, source.infos()
    for name in names:
        count = infos[name].num_bytes
        if shards[-1] and size + count > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += count
    return shards


def plain_tensor(values: F32) -> Tensor:
    """Return a float32 tensor."""
    return Tensor(TensorInfo("F32", values.shape), np.ascontiguousarray(values).tobytes())
