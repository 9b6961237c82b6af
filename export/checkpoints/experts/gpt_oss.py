"""Experts of gpt-oss: one tensor for a layer, gates and ups interleaved, floats or MXFP4.

MXFP4 (OCP Microscaling Formats 1.0): FP4 codes, with one power of two for 32 inputs, whose exponent
is a byte. Shapes: E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm.core.errors import (
    BrokenArtifactError,
    UnsupportedModelError,
)
from edgellm.core.onnx_functions import (
    EXPERTS,
    FP4_EXPERTS,
    MXFP4_BLOCK,
)
from edgellm.export.checkpoints.experts.weights import Stored, each_expert
from edgellm.export.checkpoints.quantized_weight import stored
from edgellm.export.checkpoints.weights import StoredTensor, Weights

LAYOUT = "mxfp4"
# Exponents of the largest scales with which 6, the largest code, is finite.
_LARGEST = {ir.DataType.FLOAT: 125 + 127, ir.DataType.FLOAT16: 13 + 127}
_GATES, _UPS = slice(0, None, 2), slice(1, None, 2)
_ALL = slice(None)


class InterleavedExperts:
    """A `Stack`: gate_up_proj [E, H, 2 I] and down_proj [E, I, H], or MXFP4 [E, out, in]."""

    def __init__(self, weights: Weights, experts: int, sizes: tuple[int, int]) -> None:
        """`sizes`: H and I."""
        self.prefix = weights.prefix
        self._weights, self._experts, self._sizes = weights, experts, sizes

    def read(self, dtype: ir.DataType) -> Stored:
        """See `Stack`."""
        hidden, inner = self._sizes
        both = self._biases("gate_up_proj_bias", 2 * inner, dtype)
        down = self._biases("down_proj_bias", hidden, dtype)
        shape = (self._experts, inner)
        biases = (
            each_expert(both, f"{both.name}.gate", shape, lambda bias: bias[_GATES]),
            each_expert(both, f"{both.name}.up", shape, lambda bias: bias[_UPS]),
            down,
        )
        if self._weights.info("gate_up_proj_blocks") is None:
            return Stored(function=EXPERTS, operands=self._floats(dtype), biases=biases)
        self._weights.layouts.add(LAYOUT)
        operands = (
            *self._fp4("gate_up_proj", ".gate", (2 * inner, hidden), _GATES, dtype),
            *self._fp4("gate_up_proj", ".up", (2 * inner, hidden), _UPS, dtype),
            *self._fp4("down_proj", "", (hidden, inner), _ALL, dtype),
        )
        return Stored(function=FP4_EXPERTS, operands=operands, biases=biases)

    def _biases(self, name: str, width: int, dtype: ir.DataType) -> StoredTensor:
        return self._weights.take(name, (self._experts, width), dtype)

    def _floats(self, dtype: ir.DataType) -> tuple[StoredTensor, ...]:
        """Floats in the order of calls: [E, out, in]."""
        hidden, inner = self._sizes
        both = self._weights.take("gate_up_proj", (self._experts, hidden, 2 * inner), dtype)
        down = self._weights.take("down_proj", (self._experts, inner, hidden), dtype)
        shape = (self._experts, inner, hidden)
        return (
            each_expert(both, f"{both.name}.gate", shape, lambda rows: rows[:, _GATES].T),
            each_expert(both, f"{both.name}.up", shape, lambda rows: rows[:, _UPS].T),
            each_expert(down, down.name, (self._experts, hidden, inner), lambda rows: rows.T),
        )

    def _fp4(
        self, name: str, part: str, shape: tuple[int, int], taken: slice, dtype: ir.DataType
    ) -> tuple[StoredTensor, StoredTensor]:
        """Pairs of codes [E, out, in / 2] and scales [E, out, in / 32] of the rows `taken`."""
        weights, experts, (rows, width) = self._weights, self._experts, shape
        if width % MXFP4_BLOCK:
            raise BrokenArtifactError(
                f"{self.prefix}{name}_blocks: {width} inputs are not a multiple of {MXFP4_BLOCK}"
            )
        blocks = width // MXFP4_BLOCK
        codes = weights.array(f"{name}_blocks", (experts, rows, blocks, MXFP4_BLOCK // 2), "U8")
        exponents = weights.array(f"{name}_scales", (experts, rows, blocks), "U8")
        count = len(range(rows)[taken])
        title = f"{self.prefix}{name}"
        return (
            stored(
                f"{title}_blocks{part}", ir.DataType.UINT8, (experts, count, width // 2),
                lambda: codes()[:, taken],
            ),
            stored(
                f"{title}_scales{part}", ir.DataType.BFLOAT16, (experts, count, blocks),
                lambda: powers(f"{title}_scales", exponents()[:, taken], dtype),
            ),
        )  # fmt: skip


def powers(name: str, exponents: np.ndarray, dtype: ir.DataType) -> np.ndarray:
    """2 ** (exponent - 127) as bits of bfloat16, which has the same exponents.

    Raises:
        BrokenArtifactError: NaN, or weights would be infinite.
        UnsupportedModelError: weights would exceed the range of activations of type `dtype`.
    """
    found = exponents.astype(np.uint16)
    largest = int(found.max())
    if largest > _LARGEST[ir.DataType.FLOAT]:
        raise BrokenArtifactError(
            f"tensor {name} holds values that are not numbers",
            hint="the checkpoint is damaged; fetch it again",
        )
    if largest > _LARGEST[dtype]:
        raise UnsupportedModelError(
            f"tensor {name} scales weights beyond the range of fp16, which ends at 65504",
            hint="export with --dtype fp32",
        )
    return np.where(found == 0, np.uint16(0x40), found << np.uint16(7))  # 2 ** -127 at 0
