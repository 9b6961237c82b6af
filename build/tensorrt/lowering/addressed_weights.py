"""Weights of experts in a file of their own, which the runtime loads beside TensorRT's plan.

The file begins with the table of experts (`kernels/triton/experts.py`), whose addresses are
offsets in the file; tensors follow, each at a multiple of `ALIGNMENT`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from edgellm.build.lowering.experts import ExpertLayer, Stack
from edgellm.build.lowering.linears.block_factors import Joined
from edgellm.build.lowering.linears.weights import WeightPart
from edgellm.core.onnx_functions import SHIFTED_LINEAR
from edgellm.device_runtime.kernels.triton.catalog import EXPERT_STEP, FIRST_FP8
from edgellm.device_runtime.runners.tensorrt.cuda.weight_table import (
    ADDRESSES,
    HEADER,
    MAGIC,
    table_entries,
)
from edgellm.device_runtime.runners.tensorrt.packed_buffers import aligned

_CODES = {"dense": "fp16", "int4": "int4", "int8": "int8", "fp4": "fp4", "fp8": "fp8"}
_BITS = {"fp16": 16, "int4": 4, "int8": 8, "fp4": 4, "fp8": 8}
_MIDDLES = {"int4": 8, "int8": 128}  # of unsigned codes
_FACTOR_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredForm:
    """Stored form of a projection."""

    codes: str  # as kernels name them
    block: int  # inputs that share a scale
    is_shifted: bool  # whether blocks have shifts besides scales

    @classmethod
    def of(cls, stack: Stack) -> StoredForm:
        """The form that keeps a projection's values."""
        part, width = stack.expert(0), stack.shape[1]
        is_integer = stack.kind in _MIDDLES
        has_points = part.is_unsigned or part.has_minima or part.operation == SHIFTED_LINEAR
        return cls(
            codes=_CODES[stack.kind],
            block=stack.block_size or width,
            is_shifted=is_integer and has_points,
        )

    def fault(self, shape: tuple[int, int, int], sm: int) -> str:
        """Why there are no kernels for projections [E, in, out] on a GPU; "" if there are."""
        if self.codes == "fp8" and sm < FIRST_FP8:
            return f"experts in FP8 from compute capability {FIRST_FP8 / 10} on, not for {sm / 10}"
        if odd := [size for size in (*shape[1:], self.block) if size % EXPERT_STEP]:
            return f"experts with widths and groups of a multiple of {EXPERT_STEP}, not of {odd[0]}"
        return ""

    def num_bytes(self, shape: tuple[int, int, int]) -> int:
        """Bytes of all experts."""
        count = math.prod(shape)
        factors = 0 if self.codes == "fp16" else 1 + self.is_shifted
        return count * _BITS[self.codes] // 8 + factors * _FACTOR_BYTES * count // self.block


def expert_bytes(layer: ExpertLayer) -> int:
    """Bytes of all experts of a layer in an engine, without biases."""
    return sum(StoredForm.of(stack).num_bytes(stack.shape) for stack in stored_stacks(layer))


def stored_stacks(layer: ExpertLayer) -> tuple[Stack, ...]:
    """Those with weights of their own: without gates the ups are read twice."""
    return layer.stacks if layer.is_gated else layer.stacks[1:]


def write_experts(path: Path, layers: list[ExpertLayer]) -> None:
    """Write the experts of all layers, in the order of the table."""
    count = max(layer.count for layer in layers)
    table = np.zeros(table_entries(len(layers)), np.int64)
    table[:HEADER] = count, count ^ MAGIC
    offsets = table[HEADER:].reshape(len(layers), -1, ADDRESSES)
    with path.open("wb") as stream:
        stream.write(table.tobytes())
        for layer, own in zip(layers, offsets, strict=True):
            own[:, 3] = [_append(stream, _biases(bias)) for bias in layer.biases]
            for at in (1, 2) if not layer.is_gated else (0, 1, 2):
                stack = layer.stacks[at]
                own[at, :3] = [_append(stream, pieces) for pieces in _tensors(stack)]
            if not layer.is_gated:
                own[0, :3] = own[1, :3]
        stream.seek(0)
        stream.write(table.tobytes())


def _append(stream: BinaryIO, pieces: Iterator[np.ndarray] | None) -> int:
    """Write a tensor; returns its offset, 0 if there is none."""
    if pieces is None:
        return 0
    offset = aligned(stream.tell())
    stream.write(bytes(offset - stream.tell()))
    for piece in pieces:
        stream.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    return offset


def _biases(bias: np.ndarray | None) -> Iterator[np.ndarray] | None:
    return None if bias is None else iter([bias.astype(np.float16)])


def _tensors(stack: Stack) -> Iterator[Iterator[np.ndarray] | None]:
    """Weights, scales and shifts of all experts; None: there are none."""
    form, width = StoredForm.of(stack), stack.shape[1]

    def of_each(make: Callable[[WeightPart], np.ndarray]) -> Iterator[np.ndarray]:
        return (make(stack.expert(index)) for index in range(stack.shape[0]))

    def factors(found: np.ndarray) -> np.ndarray:
        """[out, blocks] of [blocks, out], or of fewer that all share."""
        shape = width // form.block, stack.shape[2]
        return np.broadcast_to(found, shape).T.astype(np.float16)

    yield of_each(lambda part: _stored(part, form))
    yield None if form.codes == "fp16" else of_each(lambda part: factors(part.scales()))
    yield of_each(lambda part: factors(-part.offsets(middle_of(part)))) if form.is_shifted else None


def middle_of(part: WeightPart) -> int:
    """What integer codes are counted from; their products in float16 should be small."""
    codes = part.stored[0]
    if not part.is_unsigned:
        return 0
    if part.kind == "int8" and isinstance(codes, Joined):
        return 1 << (codes.form.bits - 1)
    return _MIDDLES[part.kind]


def _stored(part: WeightPart, form: StoredForm) -> np.ndarray:
    """Weights or codes of an expert, as kernels read them."""
    if form.codes == "fp16":
        return part.dense().T.astype(np.float16)
    if form.codes == "fp4":
        return _pairs(part.nibbles())
    codes = part.codes().T  # [out, in]
    if form.codes == "fp8":
        return codes.astype(part.stored[0].dtype.numpy())
    stored = codes + part.repeated(part.zero_points()).T - np.int16(middle_of(part))
    return _pairs((stored + 8).astype(np.uint8)) if form.codes == "int4" else stored.astype(np.int8)


def _pairs(codes: np.ndarray) -> np.ndarray:
    """4-bit codes [out, in] as bytes [out, in / 2], the first in the lower half."""
    return codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
