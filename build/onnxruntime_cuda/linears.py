"""Linear layers by ONNX Runtime's CUDA kernels.

Dense weights stay [out, in] as checkpoints store them, so that a head shares the table of an
embedding. There is no product of int8 with int8 for CUDA: int8, FP8 and NVFP4 become 8-bit blocks
of MatMulNBits, as on the CPU, INT4 becomes 4-bit ones; activations are not rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.groups import Rounding
from edgellm.build.lowering.linears.weights import Blocks, LinearWeight

LARGEST_BLOCK = 128  # with dedicated kernels in MatMulNBits
# Its tensor-core GEMMs (fpA_intB, microsoft/onnxruntime#32324, for public builds) support blocks of
# 32 without zero points, and outputs in multiples by bits.
_GEMM_BLOCK = 32
_GEMM_OUTPUTS = {4: 64, 8: 32}


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """Dense products in the activations' type, others on blocks of 4 or 8 bits."""

    dtype: ir.DataType  # of activations
    rounds: bool = False  # dense weights become int8 in blocks
    int_gemm: bool = False  # use blocks for tensor cores, if possible

    def emit(self, graph: GraphEditor, x: ir.Value, weight: LinearWeight, name: str) -> ir.Value:
        """One FusedMatMul or MatMulNBits."""
        if weight.kind == "dense" and not self.rounds:
            return self._dense(graph, x, weight)
        return self._blocks(graph, x, weight, name)

    def rounding(self, weight: LinearWeight, name: str) -> Rounding:
        """Rounding of weights that become int8 here."""
        del name
        is_dense = weight.kind == "dense"
        return Rounding(weights=self.rounds if is_dense else weight.is_rerounded)

    def _dense(self, graph: GraphEditor, x: ir.Value, weight: LinearWeight) -> ir.Value:
        table = graph.weight(dense_name(weight, self.dtype), lambda: self._rows(weight))
        return graph.node("FusedMatMul", [x, table], domain="com.microsoft", transB=1)

    def _rows(self, weight: LinearWeight) -> np.ndarray:
        """[out, in]."""
        parts = [part.dense().T.astype(self.dtype.numpy()) for part in weight.parts]
        return np.concatenate(parts)

    def _blocks(self, graph: GraphEditor, x: ir.Value, weight: LinearWeight, name: str) -> ir.Value:
        loaded: list[Blocks] = []

        def load() -> Blocks:
            if not loaded:
                loaded.append(split_blocks(weight.blocks(), largest))
            return loaded[0]

        def points() -> np.ndarray:
            found = load().zero_points
            assert found is not None
            return found

        bits, block_size = weight.packing
        largest = _GEMM_BLOCK if self.int_gemm and takes_int_gemm(weight) else LARGEST_BLOCK
        inputs = [
            x,
            graph.weight(f"{name}.int{bits}_blocks", lambda: load().codes),
            graph.weight(
                f"{name}.int{bits}_scales", lambda: load().scales.astype(self.dtype.numpy())
            ),
        ]
        if weight.has_zero_points:
            inputs.append(graph.weight(f"{name}.int{bits}_zero_points", points))
        return graph.node(
            "MatMulNBits", inputs, domain="com.microsoft", K=weight.in_features,
            N=sum(weight.widths), bits=bits, block_size=min(block_size, largest),
        )  # fmt: skip


def dense_name(weight: LinearWeight, dtype: ir.DataType) -> str:
    """Name of the weight by its parameters, so that equal ones are shared."""
    names = [part.parameter for part in weight.parts]
    return f"{'+'.join(names)}.{dtype.name.lower()}"


def takes_int_gemm(weight: LinearWeight) -> bool:
    """Whether tensor cores support a weight's blocks, unchanged or split into smaller ones."""
    bits, block_size = weight.packing
    fits = block_size % _GEMM_BLOCK == 0 and weight.in_features % _GEMM_BLOCK == 0
    return fits and not weight.has_zero_points and sum(weight.widths) % _GEMM_OUTPUTS[bits] == 0


def split_blocks(blocks: Blocks, largest: int = LARGEST_BLOCK) -> Blocks:
    """The same numbers in blocks of `largest` at most."""
    parts = blocks.block_size // largest
    if parts < 2:
        return blocks
    count = len(blocks.codes)
    codes = blocks.codes.reshape(count, -1, largest * blocks.bits // 8)
    zeros = blocks.zero_points
    if zeros is not None:
        zeros = (
            _repeated_nibbles(zeros, blocks.scales.shape[1], parts)
            if blocks.bits == 4
            else (np.repeat(zeros, parts, 1))
        )
    return Blocks(
        bits=blocks.bits,
        block_size=largest,
        codes=codes,
        scales=np.repeat(blocks.scales, parts, 1),
        zero_points=zeros,
    )


def _repeated_nibbles(packed: np.ndarray, columns: int, parts: int) -> np.ndarray:
    """4-bit values [rows, ceil(columns / 2)], low nibble first, each `parts` times."""
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)[:, :columns]
    repeated = np.repeat(nibbles, parts, 1)  # an even number of columns
    return repeated[:, 0::2] | repeated[:, 1::2] << np.uint8(4)
