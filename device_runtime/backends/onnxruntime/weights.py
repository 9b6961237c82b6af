"""Weights of a portable graph, read for the lowering and written for an engine.

A linear weight is a short chain in the portable graph: parameter -> (Cast) -> Transpose, or an INT4
DequantizeLinear. `LinearWeight` hides the chain; several that read the same input can be merged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

F32 = NDArray[np.float32]
_ALIGNMENT_BYTES = 64


def constant_array(value: ir.Value) -> np.ndarray | None:
    """The data behind an initializer, through Cast and Transpose; None if it is computed."""
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


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """One or several weights with the same input, side by side along the output axis."""

    parts: tuple[ir.Value, ...]  # each the [in, out] operand of a MatMul

    @classmethod
    def of(cls, operand: ir.Value) -> LinearWeight | None:
        """The weight behind a MatMul operand, None if that is not a weight."""
        node = operand.producer()
        if node is None or node.op_type not in ("Transpose", "DequantizeLinear"):
            return None
        return cls((operand,))

    @property
    def is_int4(self) -> bool:
        """Whether all parts are INT4 blocks."""
        return all(_producer(part).op_type == "DequantizeLinear" for part in self.parts)

    @property
    def block_size(self) -> int:
        """Weights per scale of INT4 parts."""
        return _producer(self.parts[0]).attributes["block_size"].as_int()

    @property
    def key(self) -> tuple[str, int]:
        """Weights may be merged when their keys are equal."""
        return ("int4", self.block_size) if self.is_int4 else ("dense", 0)

    @property
    def widths(self) -> list[int]:
        """Output features of each part."""
        return [self._shape(part)[1] for part in self.parts]

    @property
    def in_features(self) -> int:
        """Input features."""
        return self._shape(self.parts[0])[0]

    def dense(self) -> F32:
        """float32 [in, out], contiguous."""
        result = np.empty((self.in_features, sum(self.widths)), np.float32)
        begin = 0
        for part, width in zip(self.parts, self.widths, strict=True):
            result[:, begin : begin + width] = self._dense_part(part)
            begin += width
        return result

    def int4(self) -> tuple[NDArray[np.uint8], F32]:
        """Blocks as com.microsoft.MatMulNBits wants them.

        Returns:
            uint8 [out, in / block, block / 2], codes + 8, low nibble first, and the scales,
            float32 [out, in / block].
        """
        packed, scales = zip(*(self._nbits_part(part) for part in self.parts), strict=True)
        return np.concatenate(packed, dtype=np.uint8), np.concatenate(scales)

    def _shape(self, part: ir.Value) -> tuple[int, int]:
        node = _producer(part)
        source = node.inputs[0]
        while source is not None and source.const_value is None:
            source = _producer(source).inputs[0]
        assert source is not None
        assert source.const_value is not None
        rows, columns = _dims(source.const_value)
        return (columns, rows) if node.op_type == "Transpose" else (rows, columns)

    def _dense_part(self, part: ir.Value) -> np.ndarray:
        node = _producer(part)
        if node.op_type == "Transpose":
            array = constant_array(part)
            assert array is not None
            return array
        codes, scales = self._codes(node)
        dense = codes.astype(np.float32).reshape(len(scales), -1, codes.shape[1])
        dense *= scales[:, None, :]
        return dense.reshape(codes.shape)

    def _nbits_part(self, part: ir.Value) -> tuple[NDArray[np.uint8], F32]:
        node = _producer(part)
        codes, scales = self._codes(node)  # [in, out], [in / block, out]
        unsigned = np.ascontiguousarray((codes + 8).astype(np.uint8).T)  # [out, in]
        packed = unsigned[:, 0::2] + unsigned[:, 1::2] * np.uint8(16)
        return packed.reshape(len(packed), scales.shape[0], -1), np.ascontiguousarray(scales.T)

    @staticmethod
    def _codes(node: ir.Node) -> tuple[NDArray[np.int8], F32]:
        """Codes int8 [in, out] and scales float32 [in / block, out] of a DequantizeLinear."""
        stored, scale = node.inputs[:2]
        assert stored is not None
        assert stored.const_value is not None
        assert scale is not None
        scales, tensor = constant_array(scale), stored.const_value
        assert scales is not None
        pairs = np.frombuffer(tensor.tobytes(), np.uint8)
        codes = np.empty((len(pairs), 2), np.uint8)
        codes[:, 0], codes[:, 1] = pairs & 15, pairs >> 4
        signed = (codes ^ 8).view(np.int8) - np.int8(8)
        return signed.reshape(_dims(tensor)), scales.astype(np.float32)


def _dims(tensor: ir.TensorProtocol) -> list[int]:
    return [int(dim) for dim in tensor.shape]  # type: ignore[arg-type]


def _producer(value: ir.Value) -> ir.Node:
    node = value.producer()
    assert node is not None
    return node


class WeightFile:
    """One external data file; what is added twice under a name is stored once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream = path.open("wb")
        self._stored: dict[str, ir.ExternalTensor] = {}

    def add(self, name: str, make: Callable[[], np.ndarray]) -> ir.ExternalTensor:
        """Append the array under `name`, unless it is there already."""
        if name not in self._stored:
            array = np.ascontiguousarray(make())
            self._stream.write(bytes(-self._stream.tell() % _ALIGNMENT_BYTES))
            offset = self._stream.tell()
            self._stream.write(array.view(np.uint8).data.cast("B"))
            self._stream.flush()  # later steps of the lowering read it back
            self._stored[name] = ir.ExternalTensor(
                self.path.name, offset, array.nbytes, ir.DataType.from_numpy(array.dtype),
                shape=ir.Shape(array.shape), name=name, base_dir=self.path.parent,
            )  # fmt: skip
        return self._stored[name]

    def close(self) -> None:
        """Flush the file."""
        self._stream.close()
