"""Linear layers in a form that TensorRT stores once for all passes.

Its kernels for a single row need [out, in] weights; those for many rows support both. TensorRT
merges layers with the same input into [in, out]. So weights are written [out, in] and merged here,
and outputs are split in a way that keeps them merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.function_calls import is_call
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.weights import LinearWeight, WeightPart
from edgellm.build.lowering.weights import stored_bytes
from edgellm.build.tensorrt.lowering.int4_blocks import (
    HALF_CODES,
    Layout,
    is_too_small,
    lay_out,
    layout_of,
    scales_of,
    spread,
)
from edgellm.core.onnx_functions import (
    ROUND_INPUT,
    ROUND_INPUT_FP4,
)

_MIDDLE = {"int4": 8, "int8": 128}
_SOME_SCALE = 2.0**-6  # of blocks that are zero; e4m3's smallest without leading zeros
_STORED = {"int8": ir.DataType.INT8, "fp8": ir.DataType.FLOAT8E4M3FN}


def merge_key(weight: LinearWeight) -> tuple[str, int]:
    """Weights with equal keys are merged."""
    part = weight.parts[0]
    return part.kind, part.block_size


def is_widened(weight: LinearWeight) -> bool:
    """Whether a weight is dequantized, since its blocks are too small for TensorRT."""
    part = weight.parts[0]
    return part.kind == "dense" or is_too_small(part)


def split_rows(graph: GraphEditor, y: ir.Value, widths: list[int], name: str) -> Sequence[ir.Value]:
    """Take y [1, S, sum of widths] apart after a Reshape.

    TensorRT would split the product itself at a Split, and merge the parts again.
    """
    unit = int(np.gcd.reduce(widths))
    units = np.array([width // unit for width in widths], np.int64)
    apart = graph.constant(f"{name}.apart", np.array([0, 0, units.sum(), unit], np.int64))
    pieces = graph.nodes(
        "Split",
        [graph.node("Reshape", [y, apart]), graph.constant(f"{name}.units", units)],
        len(widths),
        axis=2,
    )
    rows = graph.constant("rows", np.array([0, 0, -1], np.int64))
    return [graph.node("Reshape", [piece, rows]) for piece in pieces]


@dataclass(frozen=True, slots=True)
class StoredKernel:
    """Keeps each weight in its stored type; outputs have the activations' type."""

    dtype: ir.DataType  # of activations

    def emit(self, graph: GraphEditor, x: ir.Value, weight: LinearWeight, name: str) -> ir.Value:
        """One MatMul, and a second, small one for zero points."""
        factors, read = None, x
        is_dense, layout = is_widened(weight), layout_of(weight)
        if is_dense:
            operand = self._dense(graph, weight)
        elif layout is not None:
            operand = self._int4(graph, weight, layout, name)
            read = spread(graph, x, layout, weight.in_features)
        elif weight.kind == "fp4":
            operand, factors = self._fp4(graph, weight, name)
        elif weight.parts[0].block_size or _is_rounded(x):
            operand = self._dequantized(graph, weight, name)
        else:
            operand, factors = self._split_scales(graph, weight, name)
        y = graph.node("MatMul", [read, graph.node("Transpose", [operand], perm=[1, 0])])
        if factors is not None:
            y = graph.node("Mul", [y, factors])
        if not is_dense and (middles := _middles(weight, layout)):
            y = graph.node("Sub", [y, self._zero_points(graph, x, weight, name, middles)])
        return y

    def _dense(self, graph: GraphEditor, weight: LinearWeight) -> ir.Value:
        """A dense weight named by its parameters, so that a tied head shares the embedding."""
        names = [part.parameter for part in weight.parts]
        kind = self.dtype.name.lower()
        return graph.weight(
            f"{'+'.join(names)}.{kind}",
            lambda: _side_by_side([p.dense() for p in weight.parts]).astype(self.dtype.numpy()),
        )

    def _split_scales(
        self, graph: GraphEditor, weight: LinearWeight, name: str
    ) -> tuple[ir.Value, ir.Value]:
        """The largest scale, for the whole weight, and the remaining factor of each column [out].

        With a scale for each column TensorRT dequantizes the weight in each pass of one token.
        """
        scales = self._scales(weight).reshape(-1)
        largest = graph.constant(f"{name}.scale", scales.max())
        factors = graph.constant(f"{name}.factors", scales / scales.max())
        return graph.node("DequantizeLinear", [self._codes(graph, weight, name), largest]), factors

    def _dequantized(self, graph: GraphEditor, weight: LinearWeight, name: str) -> ir.Value:
        block, codes = weight.parts[0].block_size, self._codes(graph, weight, name)
        if block:
            scales = graph.weight(f"{name}.scales", lambda: self._scales(weight))
            return graph.node("DequantizeLinear", [codes, scales], axis=1, block_size=block)
        scales = graph.weight(f"{name}.scales", lambda: self._scales(weight).reshape(-1))
        return graph.node("DequantizeLinear", [codes, scales], axis=0)

    def _int4(
        self, graph: GraphEditor, weight: LinearWeight, layout: Layout, name: str
    ) -> ir.Value:
        """INT4 [out, in * codes_each]."""
        blocks = weight.in_features // layout.run

        def codes() -> np.ndarray:
            factors = self._factors(weight, blocks)
            signed = _signed_codes(weight).astype(np.int16) - np.int16(_code_offset(layout))
            pairs = lay_out(layout, _zeroed(signed, factors), factors).reshape(-1, 2).view(
                np.uint8
            ) & np.uint8(15)
            return pairs[:, 0] | pairs[:, 1] << np.uint8(4)

        def scales() -> np.ndarray:
            return scales_of(layout, _not_zero(self._factors(weight, blocks)))

        shape = (sum(weight.widths), weight.in_features * layout.codes_each)
        stored = [
            graph.weight(f"{name}.codes", codes, ir.DataType.INT4, shape),
            graph.weight(f"{name}.scales", scales),
        ]
        return graph.node("DequantizeLinear", stored, axis=1, block_size=layout.block_size)

    def _codes(self, graph: GraphEditor, weight: LinearWeight, name: str) -> ir.Value:
        """8-bit codes [out, in]."""
        shape = (sum(weight.widths), weight.in_features)

        def codes() -> np.ndarray:
            return _zeroed(_signed_codes(weight), self._factors(weight, _blocks(weight)))

        return graph.weight(f"{name}.codes", codes, _STORED[weight.kind], shape)

    def _scales(self, weight: LinearWeight) -> np.ndarray:
        """Positive ones, [out, in / block]; a single column without blocks."""
        return _not_zero(self._factors(weight, _blocks(weight)))

    def _factors(self, weight: LinearWeight, blocks: int) -> np.ndarray:
        """Scales of codes in the activations' type: [out, blocks]."""
        columns = []
        for part in weight.parts:
            scales = part.scales()
            scales = np.repeat(scales, blocks // len(scales), 0)
            columns.append(np.broadcast_to(scales, (blocks, part.shape[1])))
        return _side_by_side(columns).astype(self.dtype.numpy())

    def _fp4(
        self, graph: GraphEditor, weight: LinearWeight, name: str
    ) -> tuple[ir.Value, ir.Value | None]:
        """Dequantize the blocks' FP8 scales, then the codes; both [out, ...] as stored.

        Merged layers take the smallest global scale, so no product exceeds float16. The rest is a
        factor of each column [out]; None if all have that scale.
        """
        block = weight.parts[0].block_size
        shape = (sum(weight.widths), weight.in_features)
        codes = graph.weight(
            f"{name}.codes",
            lambda: np.concatenate([_fp4_codes(part).reshape(-1) for part in weight.parts]),
            ir.DataType.FLOAT4E2M1,
            shape,
        )
        scales = graph.weight(
            f"{name}.scales",
            lambda: _not_zero(np.concatenate([p.stored[1].numpy() for p in weight.parts])),
        )
        wanted = np.array([part.global_scale for part in weight.parts], np.float32).reshape(-1)
        global_scale = graph.constant(f"{name}.global_scale", wanted.min())
        factors = None
        if (wanted != wanted.min()).any():
            columns = np.repeat(wanted / wanted.min(), weight.widths)
            factors = graph.constant(f"{name}.factors", columns.astype(self.dtype.numpy()))
        floats = graph.node("DequantizeLinear", [scales, global_scale])
        values = graph.node("DequantizeLinear", [codes, floats], axis=-1, block_size=block)
        if self.dtype != ir.DataType.FLOAT:
            values = graph.node("Cast", [values], to=int(self.dtype))
        return values, factors

    def _zero_points(
        self, graph: GraphEditor, x: ir.Value, weight: LinearWeight, name: str, middles: list[int]
    ) -> ir.Value:
        """Correction for codes relative to the middle of their range, [..., out].

        TensorRT has no zero points. That of a block is a factor of the sum of its inputs.
        """
        block = weight.parts[0].block_size or weight.in_features
        blocks = weight.in_features // block
        apart = graph.constant(f"{name}.blocks", np.array([0, 0, blocks, block], np.int64))
        last = graph.constant("last", np.array([-1], np.int64))
        sums = graph.node("ReduceSum", [graph.node("Reshape", [x, apart]), last], keepdims=0)
        factors = graph.weight(
            f"{name}.zeros", lambda: _zero_factors(weight, middles).astype(self.dtype.numpy())
        )
        return graph.node("MatMul", [sums, graph.node("Transpose", [factors], perm=[1, 0])])


def _is_rounded(x: ir.Value) -> bool:
    """Whether a layer rounds its input."""
    return is_call(x.producer(), ROUND_INPUT, ROUND_INPUT_FP4)


def _blocks(weight: LinearWeight) -> int:
    """Number of scales of an output."""
    block = weight.parts[0].block_size
    return weight.in_features // block if block else 1


def _not_zero(factors: np.ndarray) -> np.ndarray:
    """Replace zero scales, which TensorRT rejects; their codes are zero, too (`_zeroed`)."""
    return np.where(factors == 0, factors.dtype.type(_SOME_SCALE), factors)


def _fp4_codes(part: WeightPart) -> np.ndarray:
    """Pairs of codes [out, in / 2]; 0 if the scale of their block is 0."""
    scales = part.stored[1].numpy()
    pairs = stored_bytes(part.stored[0]).reshape(len(scales), -1)
    is_zero = np.repeat(scales == 0, pairs.shape[1] // scales.shape[1], 1)
    return np.where(is_zero, np.uint8(0), pairs) if is_zero.any() else pairs


def _signed_codes(weight: LinearWeight) -> np.ndarray:
    """[out, in]."""
    return _side_by_side([_signed(part) for part in weight.parts])


def _zeroed(codes: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Codes [out, in], with 0 for factors [out, blocks] that are 0."""
    is_zero = factors == 0
    if not is_zero.any():
        return codes
    repeated = np.repeat(is_zero, codes.shape[1] // is_zero.shape[1], 1)
    return np.where(repeated, codes.dtype.type(0), codes)


def _signed(part: WeightPart) -> np.ndarray:
    """[in, out]; codes with zero points are relative to the middle of their range."""
    if part.kind == "fp8":
        return part.stored[0].numpy()
    codes = part.codes()
    if part.is_unsigned:
        codes = codes + part.repeated(part.zero_points() - np.int16(_MIDDLE[part.kind]))
    return codes.astype(np.int8)


def _code_offset(layout: Layout | None) -> int:
    """Difference of a code and its INT4 codes."""
    return HALF_CODES if layout is not None and layout.splits else 0


def _middles(weight: LinearWeight, layout: Layout | None) -> list[int]:
    """Zero points of the codes of each part; [] without zero points."""
    more = _code_offset(layout)
    middles = [(_MIDDLE[part.kind] if part.is_unsigned else 0) + more for part in weight.parts]
    return middles if any(middles) or any(part.has_minima for part in weight.parts) else []


def _zero_factors(weight: LinearWeight, middles: list[int]) -> np.ndarray:
    """float32 [out, in / block]."""
    pairs = zip(weight.parts, middles, strict=True)
    return _side_by_side([part.offsets(middle) for part, middle in pairs])


def _side_by_side(columns: list[np.ndarray]) -> np.ndarray:
    """[rows, out] each, as one [out, rows]."""
    return np.concatenate([array.T for array in columns])
