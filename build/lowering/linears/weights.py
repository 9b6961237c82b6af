"""Linear weights of a portable graph, in the layouts of kernels.

`LinearWeight` reads the weight of a linear layer's call: dense, or codes with scales. Weights with
the same input can be merged. `WeightPart.outputs` slices output channels, so that no weight must be
decoded whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgellm.build.lowering.function_calls import LINEARS, is_call, require_known
from edgellm.build.lowering.linears.block_factors import (
    Joined,
    slice_first,
    slice_last,
    stored_tensor,
)
from edgellm.build.lowering.weights import U8, parameter_name, stored_array
from edgellm.core.onnx_functions import (
    BLOCK_LINEAR,
    FP4_LINEAR,
    LINEAR,
    OFFSET_LINEAR,
    QUANTIZED_LINEAR,
    SHIFTED_LINEAR,
)

F32 = NDArray[np.float32]
KINDS = {
    ir.DataType.INT4: "int4",
    ir.DataType.UINT4: "int4",
    ir.DataType.INT8: "int8",
    ir.DataType.UINT8: "int8",
    ir.DataType.FLOAT8E4M3FN: "fp8",
    ir.DataType.FLOAT4E2M1: "fp4",
}
_FP4_BLOCK = 16
_BY_INPUT = QUANTIZED_LINEAR, SHIFTED_LINEAR  # whose codes are [in, out]
_BY_OUTPUT = BLOCK_LINEAR, OFFSET_LINEAR  # whose codes and scales are [out, ...]
_BLOCK_SIZES = (256, 128, 64, 32, 16)  # of MatMulNBits, largest first
_REROUNDED_BLOCK = 32  # of weights that are requantized to int8 here
_NUMBERS_AT_ONCE = 1 << 20  # of a weight, when it is decoded
_E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.int16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A weight in the layout of com.microsoft.MatMulNBits."""

    bits: int  # 4 or 8
    block_size: int
    codes: U8  # [out, in / block, block * bits / 8], low nibble first
    scales: F32  # [out, in / block]
    zero_points: U8 | None  # [out, ceil(in / block * bits / 8)]; None: half of the range


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPart:
    """One weight [in, out] of a linear layer's call."""

    kind: str  # "dense", or one of KINDS
    shape: tuple[int, int]
    block_size: int  # 0: one scale, or one of each output channel
    parameter: str  # the name of the weight, or of its codes, or their first plane
    stored: tuple[ir.TensorProtocol, ...]  # the weight; or codes, scales and further operands
    operation: str = QUANTIZED_LINEAR

    @classmethod
    def of(cls, call: ir.Node) -> WeightPart | None:
        """The weight of a linear layer; None for other nodes."""
        if not is_call(call, *LINEARS):
            return None
        require_known(call, "axis", "block_size")
        values = [value for value in call.inputs[1:] if value is not None]
        tensors = tuple(stored_tensor(value, call) for value in values)
        first = tensors[0]
        dims, is_quantized = _dims(first), call.op_type != LINEAR
        rows, columns = dims if call.op_type in _BY_INPUT else dims[::-1]
        block = call.attributes["block_size"].as_int() if "block_size" in call.attributes else 0
        return cls(
            kind=kind_of(first) if is_quantized else "dense",
            shape=(rows, columns),
            block_size=_FP4_BLOCK if call.op_type == FP4_LINEAR else block,
            parameter=parameter_name(values[0]),
            stored=tensors,
            operation=call.op_type,
        )

    @classmethod
    def of_outputs(
        cls,
        stored: tuple[ir.TensorProtocol, ...],
        *,
        parameter: str,
        operation: str,
        block_size: int = 0,
    ) -> WeightPart:
        """A weight whose tensors are stored by output: those of LINEAR, or of blocks."""
        out, width = _dims(stored[0])
        return cls(
            kind="dense" if operation == LINEAR else kind_of(stored[0]),
            shape=(width, out),
            block_size=block_size,
            parameter=parameter,
            stored=stored,
            operation=operation,
        )

    def outputs(self, part: slice) -> WeightPart:
        """Some output channels; their stored data is read on access.

        4-bit codes of a weight [in, out] become bytes, of the same `kind`.
        """
        cut = slice_first if self.is_by_output else slice_last
        stored = tuple(cut(tensor, part) for tensor in self.stored)
        return replace(self, shape=(self.shape[0], part.stop - part.start), stored=stored)

    def slices(self) -> Iterator[WeightPart]:
        """All output channels in order, as many at a time as can be decoded at once."""
        width, out = self.shape
        step = max(1, _NUMBERS_AT_ONCE // width)
        for first in range(0, out, step):
            yield self.outputs(slice(first, min(first + step, out)))

    def codes(self) -> np.ndarray:
        """Codes minus zero points: int16 [in, out]; FP8 as float32, FP4 doubled to integers."""
        tensor = self.stored[0]
        if self.kind == "fp4":
            nibbles = self.nibbles().T
            magnitudes = _E2M1_DOUBLED[nibbles & 7]
            return np.where(nibbles & 8, -magnitudes, magnitudes)
        if self.kind == "fp8":
            return stored_array(tensor).astype(np.float32)
        codes = stored_array(tensor).astype(np.int16)
        return codes.T if self.is_by_output else codes - self.repeated(self.zero_points())

    def nibbles(self) -> U8:
        """FP4's codes [out, in]."""
        return stored_array(self.stored[0])

    def scales(self) -> F32:
        """[in / block, out], [1, out] or [1, 1]; those of doubled FP4 codes."""
        scales = stored_array(self.stored[1]).astype(np.float32)
        if self.kind == "fp4":
            return (scales * self.global_scale / np.float32(2)).T
        return scales.T if self.is_by_output else np.atleast_2d(scales)

    @property
    def global_scale(self) -> np.float32:
        """Of NVFP4's block scales."""
        return np.float32(stored_array(self.stored[2]))

    def dense(self) -> np.ndarray:
        """[in, out], float32 if it is decoded."""
        if self.kind == "dense":
            return stored_array(self.stored[0]).T
        values = self.codes().astype(np.float32) * self.repeated(self.scales())
        return values + self.repeated(self.minima()) if self.has_minima else values

    def minima(self) -> F32:
        """[in / block, out]."""
        return stored_array(self.stored[2]).astype(np.float32).T

    def zero_points(self) -> np.ndarray:
        """int16 [in / block, out], or a single one."""
        if self.operation != SHIFTED_LINEAR:
            return np.zeros((1, 1), np.int16)
        return stored_array(self.stored[2]).astype(np.int16)

    def offsets(self, middle: int) -> F32:
        """Offset for codes counted from `middle`: [in / block, out], or as `scales`."""
        found = (self.zero_points() - np.int16(middle)) * self.scales()
        return found - self.minima() if self.has_minima else found

    @property
    def is_by_output(self) -> bool:
        """Whether weights, or codes and scales, are stored [out, ...]."""
        return self.kind in ("dense", "fp4") or self.operation in _BY_OUTPUT

    @property
    def has_minima(self) -> bool:
        """Whether blocks have a minimum and a scale."""
        return self.operation == OFFSET_LINEAR

    def repeated(self, per_block: np.ndarray) -> np.ndarray:
        """`per_block` with one row for each input, or one in total."""
        return np.repeat(per_block, self.block_size, 0) if len(per_block) > 1 else per_block

    @property
    def _shared(self) -> int:
        """Inputs that share a scale."""
        return self.block_size or self.shape[0]

    @property
    def is_rerounded(self) -> bool:
        """Whether `blocks` is requantized: for floats, minima, unusual block sizes."""
        is_float = self.kind in ("fp8", "dense")
        return is_float or self.has_minima or self._shared % _BLOCK_SIZES[-1] != 0

    @property
    def packing(self) -> tuple[int, int]:
        """Bits and block size of `blocks`."""
        if self.is_rerounded:
            return 8, _REROUNDED_BLOCK
        size = next(size for size in _BLOCK_SIZES if self._shared % size == 0)
        return 4 if self.kind == "int4" else 8, size

    def blocks(self) -> Blocks:
        """The weight as com.microsoft.MatMulNBits wants it."""
        bits, size = self.packing
        middle = np.int16(1 << (bits - 1))
        if self.is_rerounded:
            codes, scales = blocks_of_int8(self.dense(), size)
            return Blocks(
                bits=bits,
                block_size=size,
                codes=_rows(codes + middle, size, bits),
                scales=_columns(scales),
                zero_points=None,
            )
        repeats = self._shared // size
        scales = np.repeat(self.scales(), repeats, 0)
        scales = np.broadcast_to(scales, (len(scales), self.shape[1]))
        codes, zeros = self.codes(), self.zero_points() if self.is_unsigned else None
        if zeros is None:
            return Blocks(
                bits=bits,
                block_size=size,
                codes=_rows(codes + middle, size, bits),
                scales=_columns(scales),
                zero_points=None,
            )
        points = np.broadcast_to(np.repeat(zeros, repeats, 0), scales.shape).astype(np.uint8).T
        points = _packed(points) if bits == 4 else np.ascontiguousarray(points)
        unsigned = codes + self.repeated(zeros)
        return Blocks(
            bits=bits,
            block_size=size,
            codes=_rows(unsigned, size, bits),
            scales=_columns(scales),
            zero_points=points,
        )

    @property
    def is_unsigned(self) -> bool:
        """Whether the codes have zero points of their own."""
        return self.stored[0].dtype in (ir.DataType.UINT4, ir.DataType.UINT8)


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """One or several weights with the same input concatenated along the output axis."""

    parts: tuple[WeightPart, ...]

    @classmethod
    def of(cls, *calls: ir.Node) -> LinearWeight | None:
        """The weights of linear layers; None if a node is not a linear layer."""
        parts = [WeightPart.of(call) for call in calls]
        found = tuple(part for part in parts if part is not None)
        return cls(found) if len(found) == len(parts) else None

    @property
    def kind(self) -> str:
        """Stored type of the weight: dense, int4, int8, fp8 or fp4."""
        return self.parts[0].kind

    @property
    def key(self) -> tuple[str, int]:
        """Kind and block size; weights with equal keys can be merged."""
        return self.kind, self.parts[0].block_size

    @property
    def has_zero_points(self) -> bool:
        """Whether `blocks` has zero points."""
        return any(part.is_unsigned and not part.is_rerounded for part in self.parts)

    @property
    def widths(self) -> list[int]:
        """Output features of each part."""
        return [part.shape[1] for part in self.parts]

    @property
    def in_features(self) -> int:
        """Input features."""
        return self.parts[0].shape[0]

    @property
    def count(self) -> int:
        """Numbers in the weight."""
        return self.in_features * sum(self.widths)

    @property
    def packing(self) -> tuple[int, int]:
        """Bits and block size of `blocks`."""
        return self.parts[0].packing

    @property
    def is_rerounded(self) -> bool:
        """Whether `blocks` has other codes than the checkpoint."""
        return any(part.is_rerounded for part in self.parts)

    @property
    def has_columns(self) -> bool:
        """Whether `columns` are the stored codes."""
        return self.kind == "int8" and not self.parts[0].block_size

    @property
    def decode_bytes(self) -> int:
        """Bytes of the weight that a token reads, as stored by `StoredKernel`."""
        if self.kind == "dense":
            return 4 * self.count
        bits, size = self.packing
        return self.count * bits // 8 + 4 * self.count // size

    def _slices(self) -> Iterator[WeightPart]:
        """Output channels in order, some at a time."""
        for part in self.parts:
            yield from part.slices()

    def dense(self) -> F32:
        """float32 [in, out], contiguous."""
        result = np.empty((self.in_features, sum(self.widths)), np.float32)
        begin = 0
        for some in self._slices():
            end = begin + some.shape[1]
            result[:, begin:end] = some.dense()
            begin = end
        return result

    def columns(self) -> tuple[NDArray[np.int8], F32]:
        """int8 [in, out] with one scale of each column [out].

        The stored codes if they have this form; else the weight is rounded.
        """
        codes = np.empty((self.in_features, sum(self.widths)), np.int8)
        scales = np.empty(codes.shape[1], np.float32)
        begin = 0
        for some in self._slices():
            at = slice(begin, begin + some.shape[1])
            if self.has_columns:
                codes[:, at], scales[at] = some.codes(), some.scales()[0]
            else:
                codes[:, at], scales[at] = _column_int8(some.dense().astype(np.float32, order="C"))
            begin = at.stop
        return codes, scales

    def blocks(self) -> Blocks:
        """All parts for one MatMulNBits."""
        found = [some.blocks() for some in self._slices()]
        zeros = None
        if self.has_zero_points:
            zeros = np.concatenate([_zero_points(blocks) for blocks in found])
        return Blocks(
            bits=found[0].bits,
            block_size=found[0].block_size,
            codes=np.concatenate([blocks.codes for blocks in found]),
            scales=np.concatenate([blocks.scales for blocks in found]),
            zero_points=zeros,
        )


def kind_of(codes: ir.TensorProtocol) -> str:
    """One of `KINDS`: that of the smallest type with all values."""
    if isinstance(codes, Joined):
        return "int4" if codes.form.has_4_bits else "int8"
    return KINDS[codes.dtype]


def weight_kinds(model: ir.Model) -> set[str]:
    """Stored types of the linear weights of a portable graph, see `LinearWeight.kind`."""
    return {kind for kind, _ in weight_keys(model)}


def weight_keys(model: ir.Model) -> set[tuple[str, int]]:
    """As `weight_kinds`, with block sizes, see `LinearWeight.key`."""
    return {weight.key for _, weight in linear_layers(model.graph)}


def linear_layers(graph: ir.Graph) -> Iterator[tuple[ir.Node, LinearWeight]]:
    """The calls of linear layers in a portable graph, with their weights."""
    for node in graph:
        if (weight := LinearWeight.of(node)) is not None:
            yield node, weight


def layer_name(call: ir.Node) -> str:
    """The checkpoint's name of a linear layer."""
    return str(call.name).rpartition(".")[0]


def _zero_points(blocks: Blocks) -> U8:
    """Zero points of blocks, with the default if absent."""
    if blocks.zero_points is not None:
        return blocks.zero_points
    middle = np.full(blocks.scales.shape, 1 << (blocks.bits - 1), np.uint8)
    return _packed(middle) if blocks.bits == 4 else middle


def _column_int8(dense: F32) -> tuple[NDArray[np.int8], F32]:
    """Round float32 [in, out] to int8 with one scale per column; overwrites `dense`."""
    amax = np.maximum(dense.max(axis=0), -dense.min(axis=0))
    scale = (np.maximum(amax, np.float32(1e-20)) / np.float32(127)).astype(np.float32)
    dense /= scale
    np.rint(dense, out=dense)
    return dense.astype(np.int8), scale


def blocks_of_int8(dense: F32, size: int) -> tuple[NDArray[np.int16], F32]:
    """Round [in, out] in blocks along the input: codes, and scales [ceil(in / size), out].

    The error of a weight is at most 1/254 of its block's largest.
    """
    codes, scales = rows_of_int8(np.ascontiguousarray(dense.T), size)
    return np.ascontiguousarray(codes.T), np.ascontiguousarray(scales.T)


def rows_of_int8(rows: F32, size: int) -> tuple[NDArray[np.int16], F32]:
    """As `blocks_of_int8`, for [out, in]: codes [out, whole blocks], scales [out, blocks]."""
    width = -(-rows.shape[1] // size) * size
    padded = np.zeros((len(rows), width), np.float32)
    padded[:, : rows.shape[1]] = rows
    grouped = padded.reshape(len(rows), -1, size)
    scales = np.maximum(np.abs(grouped).max(2), np.float32(1e-20)) / np.float32(127)
    grouped /= scales[..., None]
    return np.rint(padded).astype(np.int16), scales


def _rows(codes: NDArray[np.int16], size: int, bits: int) -> U8:
    """Unsigned codes [in, out] as [out, in / size, size * bits / 8]."""
    rows = np.ascontiguousarray(codes.T.astype(np.uint8))
    packed = _packed(rows) if bits == 4 else rows
    return packed.reshape(len(rows), -1, size * bits // 8)


def _packed(rows: U8) -> U8:
    """4-bit values [rows, n] as [rows, ceil(n / 2)], low nibble first."""
    if rows.shape[1] % 2:
        rows = np.pad(rows, ((0, 0), (0, 1)))
    return rows[:, 0::2] | rows[:, 1::2] << np.uint8(4)


def _columns(scales: F32) -> F32:
    """[blocks, out] as [out, blocks]."""
    return np.ascontiguousarray(scales.T, np.float32)


def _dims(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    return tuple(tensor.shape.numpy())
