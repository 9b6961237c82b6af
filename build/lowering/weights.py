"""Constants of a portable graph, and the weight file of an engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
_ALIGNMENT_BYTES = 64


def constant_array(value: ir.Value) -> np.ndarray | None:
    """The data after an initializer, through Cast and Transpose; None if it is computed."""
    if value.const_value is not None:
        return value.const_value.numpy()
    node = value.producer()
    if node is None or node.op_type not in ("Cast", "Transpose") or node.inputs[0] is None:
        return None
    array = constant_array(node.inputs[0])
    if array is None:
        return None
    if node.op_type == "Transpose":
        return array.T
    return array.astype(ir.DataType(node.attributes["to"].as_int()).numpy())


def stored_bytes(tensor: ir.TensorProtocol) -> U8:
    """Stored bytes of a constant; onnx_ir would unpack 4-bit numbers and cache them."""
    if isinstance(tensor, ir.ExternalTensor):
        return np.fromfile(tensor.path, np.uint8, tensor.nbytes, offset=tensor.offset or 0)
    return np.frombuffer(tensor.tobytes(), np.uint8)


def stored_array(tensor: ir.TensorProtocol) -> np.ndarray:
    """A constant's numbers, read from its file without caching; 4-bit numbers are unpacked."""
    dims, bits = tuple(tensor.shape.numpy()), tensor.dtype.bitwidth
    if not isinstance(tensor, ir.ExternalTensor) or bits % 8:
        return nibbles(tensor).reshape(dims) if bits == 4 else tensor.numpy()
    return stored_bytes(tensor).view(tensor.dtype.numpy()).reshape(dims)


def stored_columns(tensor: ir.TensorProtocol, part: slice) -> np.ndarray:
    """Columns of a matrix, or entries of a vector; only these are read from a file."""
    dims, bits = tuple(map(int, tensor.shape.numpy())), tensor.dtype.bitwidth
    if not isinstance(tensor, ir.ExternalTensor) or (bits == 4 and dims[-1] % 2):
        return stored_array(tensor)[..., part]
    per_byte = 8 // bits if bits < 8 else 1
    first, end = part.start // per_byte, -(-part.stop // per_byte)
    dtype = np.dtype(np.uint8) if bits == 4 else tensor.dtype.numpy()
    shape = *dims[:-1], dims[-1] // per_byte
    mapped = np.memmap(tensor.path, np.uint8, "r", tensor.offset or 0, tensor.nbytes)
    columns = np.ascontiguousarray(mapped.view(dtype).reshape(shape)[..., first:end])
    if bits != 4:
        return columns
    skipped = part.start - first * per_byte
    return _unpacked(columns, tensor.dtype)[..., skipped : skipped + part.stop - part.start]


def nibbles(tensor: ir.TensorProtocol) -> np.ndarray:
    """4-bit numbers as bytes, flat: int8 for INT4; uint8 for UINT4 and FP4 codes."""
    return _unpacked(stored_bytes(tensor), tensor.dtype)[: math.prod(tensor.shape.numpy())]


def _unpacked(pairs: U8, dtype: ir.DataType) -> np.ndarray:
    """Bytes [..., n] as numbers [..., 2 n]: the low half of a byte is the first."""
    words = pairs.astype("<u2")
    words |= words << np.uint16(4)
    words &= np.uint16(0x0F0F)
    values = words.view(np.uint8)
    if dtype != ir.DataType.INT4:
        return values
    values ^= np.uint8(8)
    values -= np.uint8(8)
    return values.view(np.int8)


def parameter_name(value: ir.Value) -> str:
    """The name of the initializer after Casts and Transposes."""
    node = value.producer()
    if node is not None and node.inputs[0] is not None:
        return parameter_name(node.inputs[0])
    return str(value.name)


class WeightFile:
    """One external data file; each name is stored once."""

    def __init__(self, path: Path, on_progress: Callable[[int], None] = lambda _: None) -> None:
        """`on_progress`: how many bytes were written, while they are."""
        self.path, self._on_progress = path, on_progress
        self._stream = path.open("wb")
        self._stored: dict[str, ir.ExternalTensor] = {}

    def add(
        self,
        name: str,
        make: Callable[[], np.ndarray],
        dtype: ir.DataType | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> ir.ExternalTensor:
        """Append the array under `name`, unless it is there already.

        `dtype` and `shape` are those of the tensor if the array holds its packed bytes.
        """
        if name not in self._stored:
            array = np.ascontiguousarray(make())
            self._append(
                name,
                iter([array.view(np.uint8).data.cast("B")]),
                dtype or ir.DataType.from_numpy(array.dtype),
                array.shape if shape is None else shape,
            )
        return self._stored[name]

    def stream(
        self,
        name: str,
        num_bytes: int,
        make: Callable[[], Iterator[bytes]],
        dtype: ir.DataType = ir.DataType.UINT8,
        shape: tuple[int, ...] | None = None,
    ) -> ir.ExternalTensor:
        """Append bytes [num_bytes] piece by piece under `name`, unless they are there already."""
        if name not in self._stored:
            self._append(name, make(), dtype, shape or (num_bytes,))
        return self._stored[name]

    def _append(
        self,
        name: str,
        pieces: Iterator[bytes | memoryview],
        dtype: ir.DataType,
        shape: tuple[int, ...],
    ) -> None:
        self._stream.write(bytes(-self._stream.tell() % _ALIGNMENT_BYTES))
        offset = self._stream.tell()
        for piece in pieces:
            self._stream.write(piece)
            self._on_progress(self._stream.tell())
        self._stream.flush()  # later steps of the lowering read it back
        self._stored[name] = ir.ExternalTensor(
            self.path.name, offset, self._stream.tell() - offset, dtype, shape=ir.Shape(shape),
            name=name, base_dir=self.path.parent,
        )  # fmt: skip

    def close(self) -> None:
        """Flush the file."""
        self._stream.close()


def keep_apart(graph: ir.Graph, weights: WeightFile) -> None:
    """Move weights that are still in the bundle's file to the engine's."""
    for value in graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and Path(tensor.path) != weights.path:
            shape = tuple(tensor.shape.numpy())
            stored = partial(stored_bytes, tensor)  # pairs of 4-bit numbers share a byte
            value.const_value = weights.add(str(value.name), stored, tensor.dtype, shape)
