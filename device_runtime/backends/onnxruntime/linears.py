"""How a linear layer is computed on the CPU: one class per kernel family.

Each `emit` appends nodes for `y = x W` and names its weights so that graphs can share them.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import onnx_ir as ir

from edgellm.device_runtime.backends.onnxruntime.graph import GraphEditor
from edgellm.device_runtime.backends.onnxruntime.weights import LinearWeight


class LinearKernel(Protocol):
    """A way to compute linear layers."""

    def emit(self, graph: GraphEditor, x: ir.Value, weight: LinearWeight, name: str) -> ir.Value:
        """Nodes for x [1, S, in] -> [1, S, out]."""
        ...


class StoredKernel:
    """INT4 weights as INT4, weights that were left dense as float32."""

    def emit(self, graph: GraphEditor, x: ir.Value, weight: LinearWeight, name: str) -> ir.Value:
        """What the weight's own type asks for."""
        kernel = BlockInt4Kernel() if weight.is_int4 else DenseKernel()
        return kernel.emit(graph, x, weight, name)


class DenseKernel:
    """float32 GEMM."""

    def emit(self, graph: GraphEditor, x: ir.Value, weight: LinearWeight, name: str) -> ir.Value:
        """One MatMul."""
        return graph.node("MatMul", [x, graph.weight(f"{name}.fp32", weight.dense)])


class BlockInt4Kernel:
    """com.microsoft.MatMulNBits on 4-bit blocks; activations are rounded to int8 per block.

    Without accuracy_level 4 the CPU kernel dequantizes the whole weight in every call.
    """

    def emit(self, graph: GraphEditor, x: ir.Value, weight: LinearWeight, name: str) -> ir.Value:
        """One MatMulNBits."""
        packed: list[np.ndarray] = []

        def load(index: int) -> np.ndarray:
            if not packed:
                packed.extend(weight.int4())
            return packed[index]

        blocks = graph.weight(f"{name}.int4", lambda: load(0))
        scales = graph.weight(f"{name}.int4_scale", lambda: load(1))
        return graph.node(
            "MatMulNBits",
            [x, blocks, scales],
            domain="com.microsoft",
            K=weight.in_features,
            N=sum(weight.widths),
            bits=4,
            block_size=weight.block_size,
            accuracy_level=4,
        )


class RowInt8Kernel:
    """Integer GEMM: one scale per activation row, one per weight column, both symmetric.

    A scale per row keeps an outlier in one token from costing the others their precision, which
    is what the per-tensor scale of DynamicQuantizeMatMul does.
    """

    def __init__(self) -> None:
        self._rows: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}

    def emit(self, graph: GraphEditor, x: ir.Value, weight: LinearWeight, name: str) -> ir.Value:
        """Quantize the rows, multiply, scale back."""
        columns: list[np.ndarray] = []

        def load(index: int) -> np.ndarray:
            if not columns:
                columns.extend(_column_int8(weight.dense()))
            return columns[index]

        codes, row_scale = self._quantize(graph, x)
        product = graph.node(
            "MatMulIntegerToFloat",
            [
                codes,
                graph.weight(f"{name}.int8", lambda: load(0)),
                graph.constant("one", np.float32(1)),
                graph.weight(f"{name}.int8_scale", lambda: load(1)),
                graph.constant("uint8_middle", np.uint8(128)),
            ],
            domain="com.microsoft",
        )
        return graph.node("Mul", [product, row_scale])

    def _quantize(self, graph: GraphEditor, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        """X [1, S, in] -> codes uint8 [1, S, in] around 128, and scales float32 [1, S, 1]."""
        if x not in self._rows:
            last = graph.constant("last_axis", np.array([-1], np.int64))
            amax = graph.node("ReduceMax", [graph.node("Abs", [x]), last], keepdims=1)
            floor = graph.constant("tiny", np.float32(1e-20))
            scale = graph.node(
                "Mul",
                [graph.node("Max", [amax, floor]), graph.constant("1/127", np.float32(1 / 127))],
            )
            codes = graph.node(
                "QuantizeLinear",
                [
                    graph.node("Div", [x, scale]),
                    graph.constant("one", np.float32(1)),
                    graph.constant("uint8_middle", np.uint8(128)),
                ],
            )
            self._rows[x] = codes, scale
        return self._rows[x]


def _column_int8(dense: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round float32 [in, out] to int8 with one scale per column; `dense` is used up."""
    amax = np.maximum(dense.max(axis=0), -dense.min(axis=0))
    scale = (np.maximum(amax, np.float32(1e-20)) / np.float32(127)).astype(np.float32)
    dense /= scale
    np.rint(dense, out=dense)
    return dense.astype(np.int8), scale
