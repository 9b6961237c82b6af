"""Experts as in GGUF files: one tensor [E, out, in] each for gates, ups and downs.

Floats, the blocks of `export.checkpoints.quantized.gguf`, or MXFP4: blocks of 32 codes after the
exponent of their scale, the first sixteen in the low halves of the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm.core.errors import UnsupportedModelError
from edgellm.core.onnx_functions import (
    BLOCK_EXPERTS,
    EXPERTS,
    FP4_EXPERTS,
    MXFP4_BLOCK,
)
from edgellm.export.checkpoints.experts.gpt_oss import powers
from edgellm.export.checkpoints.experts.weights import (
    JoinedExperts,
    Operand,
    SeparateExperts,
    Stack,
    Stored,
)
from edgellm.export.checkpoints.quantized import gguf
from edgellm.export.checkpoints.quantized_weight import StoredPlanes, pair_nibbles
from edgellm.export.checkpoints.weights import StoredTensor, Weights, as_bytes

_PARTS = ("gate_proj", "up_proj", "down_proj")
_JOINED = "gate_up_proj"


def experts_of(
    weights: Weights,
    experts: int,
    sizes: tuple[int, int],
    names: tuple[str, str, str] = _PARTS,
    *,
    is_gated: bool = True,
) -> Stack:
    """Experts below `weights`, all of a layer in one tensor or two, or separate.

    Args:
        weights: of the experts.
        experts: their number.
        sizes: H and I.
        names: of gate, up and down if experts are separate.
        is_gated: whether there are gates; else the ups stand in for them.
    """
    if is_stacked(weights):
        return StackedExperts(weights=weights, experts=experts, sizes=sizes, is_gated=is_gated)
    if weights.info(_JOINED) is not None:
        both, down = (weights, _JOINED), (weights, "down_proj")
        return JoinedExperts(gate_up=both, down=down, experts=experts, sizes=sizes)
    return SeparateExperts(weights=weights, experts=experts, sizes=sizes, names=names)


def is_stacked(weights: Weights) -> bool:
    """Whether one tensor has the ups of all experts."""
    return (weights / _PARTS[1]).info("weight") is not None


@dataclass(frozen=True, slots=True)
class _Part:
    function: str
    operands: tuple[Operand, ...]
    block: int = 0

    @property
    def form(self) -> tuple[object, ...]:
        """Form of the tensor, which gates and ups must share."""
        codes = self.operands[0]
        assert isinstance(codes, (StoredTensor, StoredPlanes))
        kind = codes.form if isinstance(codes, StoredPlanes) else codes.dtype
        return kind, self.block, len(self.operands) > 2 and self.operands[2] is None


class StackedExperts:
    """One tensor for each projection of all experts of a layer."""

    def __init__(
        self,
        *,
        weights: Weights,
        experts: int,
        sizes: tuple[int, int],
        has_biases: bool = False,
        is_gated: bool = True,
    ) -> None:
        """`sizes`: H and I; `is_gated`: see `experts_of`."""
        hidden, inner = sizes
        self.prefix = weights.prefix
        self._weights, self._has_biases = weights, has_biases
        self._names = _PARTS if is_gated else (_PARTS[1], *_PARTS[1:])
        self._shapes = (
            (experts, inner, hidden), (experts, inner, hidden), (experts, hidden, inner)
        )  # fmt: skip

    def read(self, dtype: ir.DataType) -> Stored:
        """See `Stack`."""
        layers = [self._weights / name for name in self._names]
        gate, up, down = (
            self._part(layer, shape, dtype)
            for layer, shape in zip(layers, self._shapes, strict=True)
        )
        if len({part.function for part in (gate, up, down)}) > 1 or gate.form != up.form:
            raise UnsupportedModelError(
                f"{self.prefix}*: gates, ups and downs of the experts are quantized differently",
                hint="export with --dtype fp32, which decodes them",
            )
        blocks = {"block_size": gate.block, "down_block_size": down.block} if gate.block else {}
        stored = Stored(
            function=gate.function,
            operands=(*gate.operands, *up.operands, *down.operands),
            blocks=blocks,
        )
        if not self._has_biases:
            return stored
        gates, ups, downs = (
            layer.take("bias", shape[:2], dtype)
            for layer, shape in zip(layers, self._shapes, strict=True)
        )
        return Stored(
            function=stored.function,
            operands=stored.operands,
            blocks=blocks,
            biases=(gates, ups, downs),
        )

    def _part(self, layer: Weights, shape: tuple[int, int, int], dtype: ir.DataType) -> _Part:
        info = layer.info("weight")
        if info is not None and info.dtype == gguf.MXFP4:
            layer.layouts.add("gguf")
            return _Part(FP4_EXPERTS, _fp4(layer, shape, dtype))
        if (found := gguf.read(layer, shape, dtype)) is not None:
            layer.layouts.add("gguf")
            operands = (found.codes, found.scales, found.minima)
            return _Part(BLOCK_EXPERTS, operands, found.block_size)
        return _Part(EXPERTS, (layer.take("weight", shape, dtype),))


def _fp4(
    layer: Weights, shape: tuple[int, int, int], dtype: ir.DataType
) -> tuple[StoredTensor, StoredTensor]:
    """Pairs of codes [E, out, in / 2] and scales [E, out, in / 32]."""
    name, (experts, rows, width) = f"{layer.prefix}weight", shape
    blocks = layer.blocks("weight", shape, 1 + MXFP4_BLOCK // 2)

    def codes() -> Iterator[memoryview]:
        for block in blocks():
            apart = np.concatenate([block[:, 1:] & 15, block[:, 1:] >> 4], 1)
            yield as_bytes(pair_nibbles(apart))

    def scales() -> Iterator[memoryview]:
        for block in blocks():
            yield as_bytes(powers(name, np.ascontiguousarray(block[:, 0]), dtype))

    return (
        StoredTensor(
            name=name, dtype=ir.DataType.UINT8, shape=(experts, rows, width // 2), stream=codes
        ),
        StoredTensor(
            name=f"{name}_scale",
            dtype=ir.DataType.BFLOAT16,
            shape=(experts, rows, width // MXFP4_BLOCK),
            stream=scales,
        ),
    )
