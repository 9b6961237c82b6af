"""Linear weights of a portable graph, as kernels want them.

In the graph a weight is a short chain: parameter -> (Cast) -> Transpose, a DequantizeLinear of
integers or FP8, or NVFP4's two DequantizeLinears and a Transpose. `LinearWeight` hides the chain;
several that read the same input can be merged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgellm.build.lowering.weights import U8, constant_array, stored_bytes

F32 = NDArray[np.float32]
_KINDS = {
    ir.DataType.INT4: "int4",
    ir.DataType.UINT4: "int4",
    ir.DataType.INT8: "int8",
    ir.DataType.UINT8: "int8",
    ir.DataType.FLOAT8E4M3FN: "fp8",
    ir.DataType.FLOAT4E2M1: "fp4",
}
_BLOCK_SIZES = (256, 128, 64, 32, 16)  # of MatMulNBits, largest first
_REROUNDED_BLOCK = 32  # of weights that become int8 only here
_E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.int16)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight as com.microsoft.MatMulNBits wants it."""

    bits: int  # 4 or 8
    block_size: int
    codes: U8  # [out, in / block, block * bits / 8], low nibble first
    scales: F32  # [out, in / block]
    zero_points: U8 | None  # [out, ceil(in / block * bits / 8)]; None: half of the range


@dataclass(frozen=True, slots=True)
class WeightPart:
    """One weight [in, out] and its chain."""

    kind: str  # "dense", or one of _KINDS
    shape: tuple[int, int]
    block_size: int  # 0: one scale, or one of each output channel
    dequantize: ir.Node | None
    operand: ir.Value

    @classmethod
    def of(cls, operand: ir.Value) -> WeightPart | None:
        """The weight behind the operand of a MatMul, None if it is none."""
        node = operand.producer()
        if node is None:
            return None
        if node.op_type == "DequantizeLinear":
            return cls._quantized(operand, node, is_transposed=False)
        if node.op_type != "Transpose":
            return None
        source = _behind_casts(node)
        producer = source.producer()
        if producer is not None and producer.op_type == "DequantizeLinear":
            return cls._quantized(operand, producer, is_transposed=True)
        if source.const_value is None:
            return None
        rows, columns = _dims(source.const_value)
        return cls("dense", (columns, rows), 0, None, operand)

    @classmethod
    def _quantized(cls, operand: ir.Value, node: ir.Node, *, is_transposed: bool) -> WeightPart:
        codes = node.inputs[0]
        assert codes is not None
        assert codes.const_value is not None
        rows, columns = _dims(codes.const_value)
        shape = (columns, rows) if is_transposed else (rows, columns)
        block = node.attributes["block_size"].as_int() if "block_size" in node.attributes else 0
        return cls(_KINDS[codes.const_value.dtype], shape, block, node, operand)

    def codes(self) -> np.ndarray:
        """Less their zero points: int16 [in, out]; FP8 as float32, FP4 doubled to integers."""
        tensor = self.stored(0)
        if self.kind == "fp4":
            nibbles = _nibbles(tensor).reshape(self.shape[::-1]).T
            magnitudes = _E2M1_DOUBLED[nibbles & 7]
            return np.where(nibbles & 8, -magnitudes, magnitudes)
        if self.kind == "fp8":
            return tensor.numpy().astype(np.float32)
        return _integers(tensor).reshape(self.shape) - self.repeated(self.zero_points())

    def scales(self) -> F32:
        """[in / block, out], [1, out] or [1, 1]; those of doubled FP4 codes."""
        assert self.dequantize is not None
        value = self.dequantize.inputs[1]
        assert value is not None
        if self.kind == "fp4":
            producer = _producer(value)
            parts = [constant_array(part) for part in producer.inputs if part is not None]
            fp8, global_scale = (part.astype(np.float32) for part in parts if part is not None)
            return (fp8 * global_scale / np.float32(2)).T
        scales = constant_array(value)
        assert scales is not None
        return np.atleast_2d(scales.astype(np.float32))

    def dense(self) -> np.ndarray:
        """[in, out], float32 where it is decoded."""
        if self.dequantize is None:
            array = constant_array(self.operand)
            assert array is not None
            return array
        return self.codes().astype(np.float32) * self.repeated(self.scales())

    def zero_points(self) -> np.ndarray:
        """int16 [in / block, out], or a single one."""
        assert self.dequantize is not None
        if len(self.dequantize.inputs) < 3:
            return np.zeros((1, 1), np.int16)
        tensor = self.stored(2)
        return _integers(tensor).reshape(_dims(tensor))

    def stored(self, index: int) -> ir.TensorProtocol:
        """The constant that the DequantizeLinear reads there."""
        assert self.dequantize is not None
        value = self.dequantize.inputs[index]
        assert value is not None
        assert value.const_value is not None
        return value.const_value

    def repeated(self, per_block: np.ndarray) -> np.ndarray:
        """One row for each input, or one in all."""
        return np.repeat(per_block, self.block_size, 0) if len(per_block) > 1 else per_block

    @property
    def _shared(self) -> int:
        """Inputs that share a scale."""
        return self.block_size or self.shape[0]

    @property
    def is_rerounded(self) -> bool:
        """Whether `blocks` has other codes than the checkpoint: floats, or unusual blocks."""
        return self.kind in ("fp8", "dense") or self._shared % _BLOCK_SIZES[-1] != 0

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
            codes, scales = _blocks_of_int8(self.dense(), size)
            return Blocks(bits, size, _rows(codes + middle, size, bits), _columns(scales), None)
        repeats = self._shared // size
        scales = np.repeat(self.scales(), repeats, 0)
        scales = np.broadcast_to(scales, (len(scales), self.shape[1]))
        codes, zeros = self.codes(), self.zero_points() if self.is_unsigned else None
        if zeros is None:
            return Blocks(bits, size, _rows(codes + middle, size, bits), _columns(scales), None)
        points = np.broadcast_to(np.repeat(zeros, repeats, 0), scales.shape).astype(np.uint8).T
        points = _packed(points) if bits == 4 else np.ascontiguousarray(points)
        unsigned = codes + self.repeated(zeros)
        return Blocks(bits, size, _rows(unsigned, size, bits), _columns(scales), points)

    @property
    def is_unsigned(self) -> bool:
        """Whether the codes have zero points of their own."""
        unsigned = (ir.DataType.UINT4, ir.DataType.UINT8)
        codes = self.dequantize.inputs[0] if self.dequantize is not None else None
        return codes is not None and codes.dtype in unsigned


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """One or several weights with the same input, side by side along the output axis."""

    parts: tuple[WeightPart, ...]

    @classmethod
    def of(cls, *operands: ir.Value | None) -> LinearWeight | None:
        """The weights behind MatMul operands, None if one of them is no weight."""
        parts = [WeightPart.of(operand) if operand is not None else None for operand in operands]
        found = tuple(part for part in parts if part is not None)
        return cls(found) if len(found) == len(parts) else None

    @property
    def kind(self) -> str:
        """How the weight is stored: dense, int4, int8, fp8 or fp4."""
        return self.parts[0].kind

    @property
    def key(self) -> tuple[str, int]:
        """Kind and block size; weights are alike when their keys are equal."""
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
    def decode_bytes(self) -> int:
        """Bytes that one token reads of the weight as `StoredKernel` keeps it."""
        if self.kind == "dense":
            return 4 * self.count
        bits, size = self.packing
        return self.count * bits // 8 + 4 * self.count // size

    def dense(self) -> F32:
        """float32 [in, out], contiguous."""
        result = np.empty((self.in_features, sum(self.widths)), np.float32)
        begin = 0
        for part, width in zip(self.parts, self.widths, strict=True):
            result[:, begin : begin + width] = part.dense()
            begin += width
        return result

    def columns(self) -> tuple[NDArray[np.int8], F32]:
        """int8 [in, out] with one scale of each column [out].

        Exactly the stored codes where they are such; everything else is rounded.
        """
        exact = self.kind == "int8" and not self.parts[0].block_size
        if not exact:
            return _column_int8(self.dense())
        codes = np.concatenate([part.codes() for part in self.parts], 1).astype(np.int8)
        scales = [np.broadcast_to(part.scales()[0], part.shape[1:]) for part in self.parts]
        return codes, np.concatenate(scales).astype(np.float32)

    def blocks(self) -> Blocks:
        """All parts for one MatMulNBits."""
        found = [part.blocks() for part in self.parts]
        zeros = None
        if self.has_zero_points:
            zeros = np.concatenate([_zero_points(blocks) for blocks in found])
        return Blocks(
            found[0].bits,
            found[0].block_size,
            np.concatenate([blocks.codes for blocks in found]),
            np.concatenate([blocks.scales for blocks in found]),
            zeros,
        )


def weight_kinds(model: ir.Model) -> set[str]:
    """How the linear weights of a portable graph are stored, see `LinearWeight.kind`."""
    return {kind for kind, _ in weight_keys(model)}


def weight_keys(model: ir.Model) -> set[tuple[str, int]]:
    """As `weight_kinds`, with the sizes of blocks, see `LinearWeight.key`."""
    weights = [LinearWeight.of(node.inputs[1]) for node in model.graph if node.op_type == "MatMul"]
    return {weight.key for weight in weights if weight is not None}


def _zero_points(blocks: Blocks) -> U8:
    """Those of blocks, also where they are left out."""
    if blocks.zero_points is not None:
        return blocks.zero_points
    middle = np.full(blocks.scales.shape, 1 << (blocks.bits - 1), np.uint8)
    return _packed(middle) if blocks.bits == 4 else middle


def _column_int8(dense: F32) -> tuple[NDArray[np.int8], F32]:
    """Round float32 [in, out] to int8 with one scale per column; `dense` is used up."""
    amax = np.maximum(dense.max(axis=0), -dense.min(axis=0))
    scale = (np.maximum(amax, np.float32(1e-20)) / np.float32(127)).astype(np.float32)
    dense /= scale
    np.rint(dense, out=dense)
    return dense.astype(np.int8), scale


def _blocks_of_int8(dense: F32, size: int) -> tuple[NDArray[np.int16], F32]:
    """Round [in, out] in blocks along the input: codes, and scales [ceil(in / size), out].

    The error of a weight is at most 1/254 of its block's largest.
    """
    rows = -(-len(dense) // size) * size
    padded = np.zeros((rows, dense.shape[1]), np.float32)
    padded[: len(dense)] = dense
    grouped = padded.reshape(-1, size, dense.shape[1])
    scales = np.maximum(np.abs(grouped).max(1), np.float32(1e-20)) / np.float32(127)
    grouped /= scales[:, None]
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


def _integers(tensor: ir.TensorProtocol) -> NDArray[np.int16]:
    """Values of a 4- or 8-bit integer tensor, flat."""
    if tensor.dtype.bitwidth == 8:
        return tensor.numpy().astype(np.int16).reshape(-1)
    nibbles = _nibbles(tensor).astype(np.int16)
    return (nibbles ^ 8) - np.int16(8) if tensor.dtype == ir.DataType.INT4 else nibbles


def _nibbles(tensor: ir.TensorProtocol) -> U8:
    """The 4-bit values of a tensor, flat."""
    pairs = stored_bytes(tensor)
    values = np.empty((len(pairs), 2), np.uint8)
    values[:, 0], values[:, 1] = pairs & 15, pairs >> 4
    return values.reshape(-1)[: int(np.prod(_dims(tensor)))]


def _behind_casts(node: ir.Node) -> ir.Value:
    """What a node reads, through Casts."""
    value = node.inputs[0]
    assert value is not None
    producer = value.producer()
    return _behind_casts(producer) if producer is not None and producer.op_type == "Cast" else value


def _dims(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    return tuple(tensor.shape.numpy())


def _producer(value: ir.Value) -> ir.Node:
    node = value.producer()
    assert node is not None
    return node
