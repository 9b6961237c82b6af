"""Linear layers as TensorRT keeps them once for all passes.

Its kernels for a single row want a weight [out, in], those for many rows take what they get, and
layers that read the same input are merged into [in, out], whatever they were. So weights are
written [out, in] and merged here, and the rows are taken apart in a way that keeps them merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.calls import is_call
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linear_weights import LinearWeight, WeightPart
from edgellm.build.lowering.weights import stored_bytes
from edgellm.contract import ROUND_INPUT, ROUND_INPUT_FP4, UnsupportedModelError

_MIDDLE = {"int4": 8, "int8": 128}
_SMALLEST_BLOCK = 32  # of INT4
_SIGNED = {"int4": ir.DataType.INT4, "int8": ir.DataType.INT8, "fp8": ir.DataType.FLOAT8E4M3FN}


def merge_key(weight: LinearWeight) -> tuple[str, int, float]:
    """Weights with equal keys become one; NVFP4's share a global scale."""
    part = weight.parts[0]
    global_scale = float(part.global_scale) if part.kind == "fp4" else 0.0
    return part.kind, part.block_size, global_scale


def is_widened(weight: LinearWeight) -> bool:
    """Whether a weight is multiplied as floats: TensorRT knows no small blocks of GGUF's int8."""
    part = weight.parts[0]
    is_small = part.kind == "int8" or part.block_size < _SMALLEST_BLOCK
    return part.kind == "dense" or (part.is_by_output and is_small)


def split_rows(graph: GraphEditor, y: ir.Value, widths: list[int], name: str) -> Sequence[ir.Value]:
    """Take y [1, S, sum of widths] apart behind a Reshape.

    A Split of the product itself is taken for as many products, which are merged anew.
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
    """Every weight in the type that it is stored in; sums have the activations' type."""

    dtype: ir.DataType  # of activations

    def emit(self, graph: GraphEditor, x: ir.Value, weight: LinearWeight, name: str) -> ir.Value:
        """One MatMul, with a second, small one where codes have zero points."""
        factors = None
        is_dense = is_widened(weight)
        if is_dense:
            operand = self._dense(graph, weight)
        elif weight.kind == "fp4":
            operand = self._fp4(graph, weight, name)
        elif (
            weight.kind in ("fp8", "int8") and not weight.parts[0].block_size and not _is_rounded(x)
        ):
            operand, factors = self._scaled_behind(graph, weight, name)
        else:
            operand = self._dequantized(graph, weight, name)
        y = graph.node("MatMul", [x, graph.node("Transpose", [operand], perm=[1, 0])])
        if factors is not None:
            y = graph.node("Mul", [y, factors])
        if not is_dense and any(part.is_unsigned for part in weight.parts):
            y = graph.node("Sub", [y, self._zero_points(graph, x, weight, name)])
        return y

    def _dense(self, graph: GraphEditor, weight: LinearWeight) -> ir.Value:
        """Named after the parameters, so that a head shares the table of an embedding."""
        names = [part.parameter for part in weight.parts]
        kind = self.dtype.name.lower()
        return graph.weight(
            f"{'+'.join(names)}.{kind}",
            lambda: _side_by_side([p.dense() for p in weight.parts]).astype(self.dtype.numpy()),
        )

    def _scaled_behind(
        self, graph: GraphEditor, weight: LinearWeight, name: str
    ) -> tuple[ir.Value, ir.Value]:
        """The largest scale for all of the weight, and what is left of each column's, [out].

        With a scale for each column TensorRT writes the weight as floats in every pass of one row.
        """
        shape = (sum(weight.widths), weight.in_features)
        codes = graph.weight(f"{name}.codes", lambda: _codes(weight), _SIGNED[weight.kind], shape)
        scales = self._scales(weight)
        largest = graph.constant(f"{name}.scale", scales.max())
        factors = graph.constant(f"{name}.factors", scales / scales.max())
        return graph.node("DequantizeLinear", [codes, largest]), factors

    def _dequantized(self, graph: GraphEditor, weight: LinearWeight, name: str) -> ir.Value:
        kind, block = weight.kind, weight.parts[0].block_size
        shape = (sum(weight.widths), weight.in_features)
        codes = graph.weight(f"{name}.codes", lambda: _codes(weight), _SIGNED[kind], shape)
        scales = graph.weight(f"{name}.scales", lambda: self._scales(weight))
        if block:
            return graph.node("DequantizeLinear", [codes, scales], axis=1, block_size=block)
        return graph.node("DequantizeLinear", [codes, scales], axis=0)

    def _scales(self, weight: LinearWeight) -> np.ndarray:
        """[out, in / block], or [out] without blocks."""
        block = weight.parts[0].block_size
        rows = weight.in_features // block if block else 1
        scales = _side_by_side(
            [np.broadcast_to(part.scales(), (rows, part.shape[1])) for part in weight.parts]
        ).astype(self.dtype.numpy())
        if (scales < 0).any():
            raise UnsupportedModelError(
                "TensorRT takes no negative scales, which this INT4 has",
                hint="quantize it with --target gpu, export a GGUF file with --dtype fp16, or "
                "build it with --backend onnxruntime",
            )
        return scales if block else scales.reshape(-1)

    def _fp4(self, graph: GraphEditor, weight: LinearWeight, name: str) -> ir.Value:
        """Two steps: the blocks' FP8 scales, then the codes; both [out, ...] as they are stored."""
        block = weight.parts[0].block_size
        shape = (sum(weight.widths), weight.in_features)
        codes = graph.weight(
            f"{name}.codes",
            lambda: np.concatenate([stored_bytes(part.stored[0]) for part in weight.parts]),
            ir.DataType.FLOAT4E2M1,
            shape,
        )
        scales = graph.weight(
            f"{name}.scales",
            lambda: np.concatenate([part.stored[1].numpy() for part in weight.parts]),
        )
        global_scale = graph.constant(f"{name}.global_scale", weight.parts[0].global_scale)
        floats = graph.node("DequantizeLinear", [scales, global_scale])
        values = graph.node("DequantizeLinear", [codes, floats], axis=-1, block_size=block)
        if self.dtype == ir.DataType.FLOAT:
            return values
        return graph.node("Cast", [values], to=int(self.dtype))

    def _zero_points(
        self, graph: GraphEditor, x: ir.Value, weight: LinearWeight, name: str
    ) -> ir.Value:
        """What codes that count from the middle of their range give too much, [..., out].

        TensorRT knows no zero points. Those of a block are a factor of the sum of its inputs.
        """
        block = weight.parts[0].block_size or weight.in_features
        blocks = weight.in_features // block
        apart = graph.constant(f"{name}.blocks", np.array([0, 0, blocks, block], np.int64))
        last = graph.constant("last", np.array([-1], np.int64))
        sums = graph.node("ReduceSum", [graph.node("Reshape", [x, apart]), last], keepdims=0)
        factors = graph.weight(
            f"{name}.zeros", lambda: _zero_factors(weight).astype(self.dtype.numpy())
        )
        return graph.node("MatMul", [sums, graph.node("Transpose", [factors], perm=[1, 0])])


def _has_columns(weight: LinearWeight) -> bool:
    """Whether there is one scale for all inputs of an output."""
    return weight.kind in ("fp8", "int8") and not weight.parts[0].block_size


def _is_rounded(x: ir.Value) -> bool:
    """Whether a layer rounds its input."""
    return is_call(x.producer(), ROUND_INPUT, ROUND_INPUT_FP4)


def _codes(weight: LinearWeight) -> np.ndarray:
    """Signed codes [out, in] as bytes."""
    codes = _side_by_side([_signed(part) for part in weight.parts])
    if weight.kind != "int4":
        return codes
    pairs = codes.reshape(-1, 2).astype(np.uint8) & np.uint8(15)
    return pairs[:, 0] | pairs[:, 1] << np.uint8(4)


def _signed(part: WeightPart) -> np.ndarray:
    """[in, out]; codes with zero points count from the middle of their range."""
    if part.kind == "fp8":
        return part.stored[0].numpy()
    codes = part.codes()
    if part.is_unsigned:
        codes = codes + part.repeated(part.zero_points() - np.int16(_MIDDLE[part.kind]))
    return codes.astype(np.int8)


def _zero_factors(weight: LinearWeight) -> np.ndarray:
    """float32 [out, in / block]."""
    return _side_by_side(
        [part.offsets(_MIDDLE[part.kind] if part.is_unsigned else 0) for part in weight.parts]
    )


def _side_by_side(columns: list[np.ndarray]) -> np.ndarray:
    """[rows, out] each, as one [out, rows]."""
    return np.concatenate([array.T for array in columns])
