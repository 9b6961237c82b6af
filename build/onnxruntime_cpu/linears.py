"""Linear kernels of ONNX Runtime on the CPU, one class per family.

Each `emit` appends nodes for `y = x W` and names its weights so that graphs can share them.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.groups import Rounding, RoundingKernel
from edgellm.build.lowering.linears.weights import Blocks, LinearWeight
from edgellm.device_runtime.runners.onnxruntime_cpu.processor import has_fast_int8


class StoredKernel:
    """Dense weights as float32, quantized ones by their own kernel."""

    def __init__(self, quantized: RoundingKernel | None = None) -> None:
        """`quantized`: None uses blocks of 4 or 8 bits."""
        self._quantized = quantized or BlockKernel()

    def emit(self, graph: GraphEditor, x: ir.Value, weight: LinearWeight, name: str) -> ir.Value:
        """Nodes for the weight's type."""
        return self._kernel(weight).emit(graph, x, weight, name)

    def rounding(self, weight: LinearWeight, name: str) -> Rounding:
        """See `RoundingKernel`."""
        return self._kernel(weight).rounding(weight, name)

    def _kernel(self, weight: LinearWeight) -> RoundingKernel:
        return DenseKernel() if weight.kind == "dense" else self._quantized


class DenseKernel:
    """float32 GEMM.

    A tied embedding is stored twice: as the table that Gather reads, and here. ONNX Runtime can
    share it (FusedMatMul with transB reads the table), but packs it at load or in the file all the
    same. For a table of 38 MB that saved 38 MB on disk, and took 76 MB of memory, not 40: the rows
    that Gather reads are all that is loaded of a table of its own (ONNX Runtime 1.32, x86).
    """

    def emit(self, graph: GraphEditor, x: ir.Value, weight: LinearWeight, name: str) -> ir.Value:
        """One MatMul."""
        return graph.node("MatMul", [x, graph.weight(f"{name}.fp32", weight.dense)])

    def rounding(self, weight: LinearWeight, name: str) -> Rounding:
        """No rounding."""
        del weight, name
        return Rounding()


class BlockKernel:
    """com.microsoft.MatMulNBits; activations are rounded to int8 per block.

    Integers and NVFP4 (whose values are halves of whole numbers) keep their codes and scales; FP8
    becomes int8 in blocks of 32. Without accuracy_level 4 the CPU kernel dequantizes the whole
    weight in every call.
    """

    def emit(self, graph: GraphEditor, x: ir.Value, weight: LinearWeight, name: str) -> ir.Value:
        """One MatMulNBits."""
        loaded: list[Blocks] = []

        def load() -> Blocks:
            if not loaded:
                loaded.append(weight.blocks())
            return loaded[0]

        bits, block_size = weight.packing
        inputs = [
            x,
            graph.weight(f"{name}.int{bits}_blocks", lambda: load().codes),
            graph.weight(f"{name}.int{bits}_scales", lambda: load().scales),
        ]
        if weight.has_zero_points:
            points = graph.weight(f"{name}.int{bits}_zero_points", lambda: _points(load()))
            inputs.append(points)
        return graph.node(
            "MatMulNBits",
            inputs,
            domain="com.microsoft",
            K=weight.in_features,
            N=sum(weight.widths),
            bits=bits,
            block_size=block_size,
            accuracy_level=4,
        )

    def rounding(self, weight: LinearWeight, name: str) -> Rounding:
        """Inputs in the blocks of the weight."""
        del name
        return Rounding(weight.packing[1], weight.is_rerounded)


def _points(blocks: Blocks) -> np.ndarray:
    assert blocks.zero_points is not None
    return blocks.zero_points


# For weights of fewer bits, whose error exceeds that of these inputs.
COARSE_INPUTS = ("gate_proj", "up_proj", "o_proj")
ALL_INPUTS = ("",)  # matches all names


class RowInt8Kernel:
    """Integer GEMM: one scale per activation row, one per weight column, both symmetric.

    With a scale per row, an outlier token does not reduce the precision of other tokens, as it does
    with the per-tensor scale of DynamicQuantizeMatMul. Outlier channels still reduce that of other
    channels, so inputs become the sum of two int8 terms, the second 1/254 of the first: 16 bits
    from one product with twice the rows. Layers with small errors may be named to use one term.

    Without int8 dot products weights are uint8 around 128: AVX2 adds pairs of products of uint8
    with int8 in 16 bits, which overflow; for uint8 with uint8 ONNX Runtime widens them first.
    """

    def __init__(self, one_term: tuple[str, ...] = ()) -> None:
        """`one_term`: suffixes of names of layers whose inputs keep 8 bits."""
        self._one_term_names = one_term
        self._rows: dict[tuple[ir.Value, bool], tuple[ir.Value, ir.Value]] = {}

    def emit(self, graph: GraphEditor, x: ir.Value, weight: LinearWeight, name: str) -> ir.Value:
        """Quantize the rows, multiply, scale back."""
        two_terms = not name.endswith(self._one_term_names)
        if (x, two_terms) not in self._rows:
            quantize = self._two_terms if two_terms else self._one_term
            self._rows[x, two_terms] = quantize(graph, x)
        codes, scale = self._rows[x, two_terms]
        columns, column_scales, *zero = self._columns(graph, weight, name)
        one, middle = (
            graph.constant("one", np.float32(1)),
            graph.constant("uint8_middle", np.uint8(128)),
        )
        product = graph.node(
            "MatMulIntegerToFloat",
            [codes, columns, one, column_scales, middle, *zero],
            domain="com.microsoft",
        )
        if two_terms:
            coarse, fine = graph.nodes("Split", [product], 2, axis=-2, num_outputs=2)
            finer = graph.constant("1/254", np.float32(1 / 254))
            product = graph.node("Add", [coarse, graph.node("Mul", [fine, finer])])
        return graph.node("Mul", [product, scale])

    def rounding(self, weight: LinearWeight, name: str) -> Rounding:
        """Rows of one term, and columns; rows of two terms keep 16 bits."""
        one_term = name.endswith(self._one_term_names)
        return Rounding(weight.in_features if one_term else 0, not weight.has_columns)

    def _columns(self, graph: GraphEditor, weight: LinearWeight, name: str) -> list[ir.Value]:
        """Codes [in, out] and scales [out] of a weight; the zero point of unsigned codes."""
        loaded: list[np.ndarray] = []

        def load(index: int) -> np.ndarray:
            if not loaded:
                loaded.extend(weight.columns())
            return loaded[index]

        scales = graph.weight(f"{name}.int8_scale", lambda: load(1))
        if has_fast_int8():
            return [graph.weight(f"{name}.int8", lambda: load(0)), scales]
        middle = np.uint8(128)
        codes = graph.weight(f"{name}.uint8", lambda: load(0).view(np.uint8) ^ middle)
        return [codes, scales, graph.constant("uint8_middle", middle)]

    def _one_term(self, graph: GraphEditor, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        """X [..., S, in] -> codes uint8 [..., S, in] around 128, scales float32 [..., S, 1]."""
        scale = self._row_scale(graph, x)
        return self._codes(graph, graph.node("Div", [x, scale])), scale

    def _two_terms(self, graph: GraphEditor, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        """X [..., S, in] -> codes uint8 [..., 2S, in] around 128, scales float32 [..., S, 1]."""
        scale = self._row_scale(graph, x)
        steps = graph.node("Div", [x, scale])
        coarse = graph.node("Round", [steps])
        finer = graph.constant("254", np.float32(254))
        fine = graph.node("Mul", [graph.node("Sub", [steps, coarse]), finer])
        return self._codes(graph, graph.node("Concat", [coarse, fine], axis=-2)), scale

    def _row_scale(self, graph: GraphEditor, x: ir.Value) -> ir.Value:
        """The largest magnitude of each row / 127, float32 [..., S, 1]."""
        last = graph.constant("last_axis", np.array([-1], np.int64))
        amax = graph.node("ReduceMax", [graph.node("Abs", [x]), last], keepdims=1)
        floor = graph.constant("tiny", np.float32(1e-20))
        step = graph.constant("1/127", np.float32(1 / 127))
        return graph.node("Mul", [graph.node("Max", [amax, floor]), step])

    def _codes(self, graph: GraphEditor, steps: ir.Value) -> ir.Value:
        """Round to uint8 around 128."""
        one = graph.constant("one", np.float32(1))
        return graph.node(
            "QuantizeLinear", [steps, one, graph.constant("uint8_middle", np.uint8(128))]
        )
