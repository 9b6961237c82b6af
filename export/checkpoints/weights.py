"""Streams weights from a checkpoint to the external data file of a graph.

No whole tensor is in memory: a weight is a recipe that yields its bytes in pieces.
"""

from __future__ import annotations

import hashlib
import math
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir

from edgellm.core.errors import (
    BrokenArtifactError,
    UnsupportedModelError,
)
from edgellm.core.manifest import FileRecord
from edgellm.export.checkpoints.checkpoint import TensorInfo, TensorSource, read_whole
from edgellm.export.checkpoints.nonfinite_check import checked

ONNX_TYPES = {
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
    "I8": ir.DataType.INT8,
    "U8": ir.DataType.UINT8,
    "F8_E4M3": ir.DataType.FLOAT8E4M3FN,
    "F8_E8M0": ir.DataType.FLOAT8E8M0,
    "I32": ir.DataType.INT32,
    "I64": ir.DataType.INT64,
    "BOOL": ir.DataType.BOOL,
}
_BITS_BUT_SIGN = {
    "F32": (np.uint32, 0x7FFFFFFF),
    "F16": (np.uint16, 0x7FFF),
    "BF16": (np.uint16, 0x7FFF),
}
_ALIGNMENT_BYTES = 64

Pieces = Iterable[memoryview]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of the external data file: name, ONNX type, shape, and a recipe for its bytes."""

    name: str
    dtype: ir.DataType
    shape: tuple[int, ...]
    stream: Callable[[], Pieces]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file (INT4 values are packed in pairs)."""
        return math.ceil(math.prod(self.shape) * self.dtype.bitwidth / 8)


@dataclass(frozen=True, slots=True)
class Taken:
    """Tensors that all parts of a model took from their checkpoint."""

    names: set[str] = field(default_factory=set)  # of tensors
    layouts: set[str] = field(
        default_factory=set
    )  # of quantized layers, see `export.checkpoints.quantized`
    quantized: dict[str, tuple[int, int]] = field(default_factory=dict)  # their [out, in] by name


class Weights:
    """The tensors below one dotted name of a checkpoint; records which were taken."""

    def __init__(
        self,
        *,
        source: TensorSource,
        quantization: Mapping[str, Any] | None = None,
        rounding: str = "none",
        prefix: str = "",
        taken: Taken | None = None,
    ) -> None:
        """Tensors of `source`.

        Args:
            source: all tensors of the checkpoint.
            quantization: the checkpoint's quantization config.
            rounding: "int8" or "fp8" for linear layers whose weights are floats.
            prefix: dotted name with its final dot.
            taken: shared by all parts of one checkpoint.
        """
        self._source = source
        self._prefix = prefix
        self.quantization: Mapping[str, Any] = quantization or {}
        self.rounding = rounding
        self._taken = Taken() if taken is None else taken

    def __truediv__(self, name: str) -> Weights:
        """The tensors below `name`."""
        return Weights(
            source=self._source,
            quantization=self.quantization,
            rounding=self.rounding,
            prefix=f"{self._prefix}{name}.",
            taken=self._taken,
        )

    def info(self, name: str) -> TensorInfo | None:
        """Type and shape of a tensor; None if the checkpoint lacks it."""
        return self._source.infos().get(self._prefix + name)

    def has_any(self) -> bool:
        """Whether the checkpoint has a tensor here."""
        return any(name.startswith(self._prefix) for name in self._source.infos())

    def take(self, name: str, shape: tuple[int, ...], dtype: ir.DataType) -> StoredTensor:
        """A float tensor for a graph of activation type `dtype`.

        Bytes are stored unchanged and cast inside the graph, except float32 for a float16 graph,
        which would double the bundle.

        Raises:
            BrokenArtifactError: absent, or not of this shape.
            UnsupportedModelError: not stored as floats.

        Raises (when the tensor is written):
            EdgeLLMError: see `nonfinite_check.checked`.
        """
        info = self._checked(name, shape)
        if info.dtype not in ("F32", "F16", "BF16"):
            raise UnsupportedModelError(
                f"{self._prefix}{name} has type {info.dtype}",
                hint="convert it to F32, F16 or BF16, or quantize the model again",
            )
        full, kind = self._prefix + name, info.dtype
        half = dtype == ir.DataType.FLOAT16

        def stream() -> Pieces:
            return checked(full, kind, self._source.stream(full), half=half)

        if kind == "F32" and half:
            return StoredTensor(
                name=full, dtype=dtype, shape=shape, stream=lambda: _to_half(stream())
            )
        return StoredTensor(name=full, dtype=ONNX_TYPES[kind], shape=shape, stream=stream)

    def take_joined(
        self, names: tuple[str, ...], name: str, shape: tuple[int, ...], dtype: ir.DataType
    ) -> StoredTensor:
        """Tensors one after the other along the first axis, as one; see `take`.

        Args:
            names: of these tensors, whose rows add up to `shape`.
            name: of the result.
            shape: of the result.
            dtype: of activations.

        Raises:
            BrokenArtifactError: one is absent, or of another shape or type than the others.
        """
        rows = [info.shape[0] if (info := self.info(each)) and info.shape else 0 for each in names]
        parts = [
            self.take(each, (count, *shape[1:]), dtype)
            for each, count in zip(names, rows, strict=True)
        ]
        kinds = {part.dtype for part in parts}
        if sum(rows) != shape[0] or len(kinds) > 1:
            raise BrokenArtifactError(
                f"tensors {self._prefix}{names[0]} to {names[-1]} do not join to {list(shape)}",
                hint="the weights and config.json do not belong together, or a file is missing",
            )
        return StoredTensor(
            name=self._prefix + name,
            dtype=parts[0].dtype,
            shape=shape,
            stream=lambda: chain.from_iterable(part.stream() for part in parts),
        )

    def take_shifted(
        self, name: str, shape: tuple[int, ...], dtype: ir.DataType, shift: float
    ) -> StoredTensor:
        """A small tensor plus `shift`, in float32: half types would lose precision."""
        stored = self.take(name, shape, dtype)

        def stream() -> Pieces:
            values = b"".join(bytes(piece) for piece in stored.stream())
            floats = np.frombuffer(values, stored.dtype.numpy()).astype(np.float32)
            yield as_bytes(floats + np.float32(shift))

        return replace(stored, dtype=ir.DataType.FLOAT, stream=stream)

    def array(self, name: str, shape: tuple[int, ...], dtype: str) -> Callable[[], np.ndarray]:
        """A loader of a whole tensor (for quantized weights, which must be repacked)."""
        info = self._checked(name, shape)
        if info.dtype != dtype:
            raise UnsupportedModelError(f"{self._prefix}{name} has type {info.dtype}, not {dtype}")
        if dtype not in ONNX_TYPES:
            raise UnsupportedModelError(
                f"{self._prefix}{name} has type {dtype}", hint=f"supported: {', '.join(ONNX_TYPES)}"
            )
        full, numpy_type = self._prefix + name, ONNX_TYPES[dtype].numpy()
        return lambda: np.frombuffer(read_whole(self._source, full), numpy_type).reshape(shape)

    def number(self, name: str) -> float:
        """The first number of a tensor, read now; it may be infinite or NaN."""
        info = self.info(name)
        value = self.array(name, info.shape if info else (), info.dtype if info else "F32")()
        if not value.size:
            raise BrokenArtifactError(
                f"tensor {self._prefix}{name} is empty",
                hint="the checkpoint is damaged; fetch it again",
            )
        return float(value.astype(np.float32).reshape(-1)[0])

    def blocks(
        self, name: str, shape: tuple[int, ...], block_bytes: int
    ) -> Callable[[], Iterator[np.ndarray]]:
        """A loader of a tensor in blocks, uint8 [n, block_bytes], some of them at a time."""
        self._checked(name, shape)
        full = self._prefix + name

        def load() -> Iterator[np.ndarray]:
            for piece in self._source.stream(full):
                yield np.frombuffer(piece, np.uint8).reshape(-1, block_bytes)

        return load

    def drop_zeros(self, name: str) -> None:
        """Count a float tensor as taken if it is all zeros; else it stays in `unused`."""
        info = self.info(name)
        if info is None or info.dtype not in _BITS_BUT_SIGN:
            return
        values = read_whole(self._source, self._prefix + name)
        kind, magnitude = _BITS_BUT_SIGN[info.dtype]
        if not (np.frombuffer(values, kind) & kind(magnitude)).any():
            self._taken.names.add(self._prefix + name)

    def drop(self, *names: str) -> None:
        """Count tensors as taken that the checkpoint may have, but the model does not read."""
        self._taken.names.update(self._prefix + name for name in names)

    def unused(self) -> list[str]:
        """Names of the checkpoint's unused tensors."""
        return sorted(set(self._source.infos()) - self._taken.names)

    @property
    def layouts(self) -> set[str]:
        """Layouts of all quantized layers so far; readers add theirs."""
        return self._taken.layouts

    @property
    def quantized(self) -> dict[str, tuple[int, int]]:
        """[out, in] of all quantized layers so far, by name; readers add theirs."""
        return self._taken.quantized

    @property
    def prefix(self) -> str:
        """Prefix of all tensors here, with its final dot."""
        return self._prefix

    def _checked(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self.info(name)
        if info is None:
            raise BrokenArtifactError(
                f"the checkpoint has no tensor {self._prefix}{name}",
                hint="the weights and config.json do not belong together, or a file is missing",
            )
        if info.shape != shape:
            raise BrokenArtifactError(
                f"tensor {self._prefix}{name} has shape {list(info.shape)}, "
                f"config.json implies {list(shape)}"
            )
        self._taken.names.add(self._prefix + name)
        return info


def as_bytes(array: np.ndarray) -> memoryview:
    """The array's data, row-major, as bytes."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _to_half(pieces: Pieces) -> Pieces:
    for piece in pieces:
        yield as_bytes(np.frombuffer(piece, np.float32).astype(np.float16))


def write_weights(
    path: Path, parameters: Iterable[tuple[ir.Value, StoredTensor]], advance: Callable[[int], None]
) -> FileRecord:
    """Stream all parameters into one external data file and point their values at it.

    The hash is computed in a second thread while the next piece is read and written.

    Args:
        path: the output file, in the graph's folder.
        parameters: graph values with their recipes.
        advance: called with the number of bytes after each piece.

    Returns:
        Size and sha256 of the file.
    """
    with path.open("wb") as stream, _HashThread() as hasher:
        position = 0
        for value, stored in parameters:
            padding = -position % _ALIGNMENT_BYTES
            position += _write(stream, hasher, memoryview(bytes(padding)))
            begin = position
            for piece in stored.stream():
                position += _write(stream, hasher, piece)
                advance(len(piece))
            if position - begin != stored.num_bytes:
                raise BrokenArtifactError(f"tensor {stored.name} is shorter than its shape")
            value.const_value = ir.ExternalTensor(
                path.name, begin, stored.num_bytes, stored.dtype,
                shape=ir.Shape(stored.shape), name=stored.name, base_dir=path.parent,
            )  # fmt: skip
    return FileRecord(position, hasher.hexdigest())


def _write(stream: BinaryIO, hasher: _HashThread, piece: memoryview) -> int:
    hasher.update(piece)
    stream.write(piece)
    hasher.wait()  # the next piece reuses the buffer
    return len(piece)


class _HashThread:
    """sha256 in its own thread (hashlib and file writes both release the GIL)."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._pieces: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._done = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _HashThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._pieces.put(None)
        self._thread.join()

    def update(self, piece: memoryview) -> None:
        self._pieces.put(piece)

    def wait(self) -> None:
        """Return when the last piece was hashed."""
        self._done.acquire()

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            self._digest.update(piece)
            self._done.release()
