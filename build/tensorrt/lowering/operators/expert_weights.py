"""Weights of experts as constants of a plan, which operators decode.

A stack [E, in, out] has 4, 8 or 16 bits. Scales are float32: with float16 scales TensorRT-RTX 1.7
stores 4-bit weights twice or crashes. FP4 is stored as INT4, which every GPU takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.experts import ExpertLayer, Stack
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.weights import WeightPart
from edgellm.build.tensorrt.lowering.addressed_weights import middle_of
from edgellm.build.tensorrt.lowering.kernel_experts import form_of, stored_stacks

_F32 = ir.DataType.FLOAT
_STORED = {"int4": ir.DataType.INT4, "int8": ir.DataType.INT8, "fp8": ir.DataType.FLOAT8E4M3FN}
_SOME_SCALE = np.float32(2.0**-6)  # of blocks that are zero, since TensorRT rejects zero scales


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanForm:
    """Stored form of a projection in a plan.

    Attributes:
        codes: "float" or a key of `_STORED`.
        is_fp4: codes are indices of FP4's magnitudes, with their signs.
        block: inputs that share a scale.
        has_shifts: blocks have float32 shifts besides scales.
    """

    codes: str
    is_fp4: bool
    block: int
    has_shifts: bool

    @classmethod
    def of(cls, *stacks: Stack) -> PlanForm:
        """The form that keeps values of projections, which are stored alike."""
        form, width = form_of(stacks[0]), sum(stack.shape[2] for stack in stacks)
        codes = {"fp16": "float", "fp4": "int4"}.get(form.codes, form.codes)
        if codes == "int4" and width % 2:  # pairs of outputs share a byte
            codes = "int8"
        has_shifts = form.codes in ("int4", "int8") and any(map(_needs_shifts, stacks))
        is_fp4 = form.codes == "fp4"
        return cls(codes=codes, is_fp4=is_fp4, block=form.block, has_shifts=has_shifts)

    def num_bytes(self, shape: tuple[int, int, int], dtype: ir.DataType) -> int:
        """Bytes of all experts [E, in, out]; `dtype` is that of activations."""
        count = math.prod(shape)
        if self.codes == "float":
            return int(count * dtype.itemsize)
        factors = (1 + self.has_shifts) * count // self.block
        return int(count * _STORED[self.codes].itemsize + factors * _F32.itemsize)


def plan_bytes(layer: ExpertLayer, dtype: ir.DataType) -> int:
    """Bytes of all experts of a layer in a plan, without biases."""
    return sum(PlanForm.of(each).num_bytes(each.shape, dtype) for each in stored_stacks(layer))


def can_merge(one: Stack, other: Stack) -> bool:
    """Whether two projections of the same inputs are stored alike."""
    forms = [form_of(each) for each in (one, other)]
    return len({(form.codes, form.block) for form in forms}) == 1


def store_stacks(graph: GraphEditor, stacks: Sequence[Stack], dtype: ir.DataType) -> ir.Value:
    """The weights [E, in, out] of projections in `dtype`, concatenated along their outputs."""
    form, name = PlanForm.of(*stacks), "+".join(stack.parameter for stack in stacks)
    count, width, _ = stacks[0].shape
    out = sum(stack.shape[2] for stack in stacks)

    def stored(
        ending: str, kind: ir.DataType, rows: int, make: Callable[[WeightPart], np.ndarray]
    ) -> ir.Value:
        def pieces() -> Iterator[bytes]:
            for index in range(count):
                parts = [make(stack.expert(index)) for stack in stacks]
                yield _bytes(np.concatenate(parts, 1), kind)

        size, shape = int(count * rows * out * kind.itemsize), (count, rows, out)
        return graph.streamed_weight(f"{name}.{ending}", size, pieces, kind, shape)

    if form.codes == "float":
        kind = dtype.name.lower()
        return stored(kind, dtype, width, lambda part: part.dense())
    blocks = width // form.block
    codes = stored("codes", _STORED[form.codes], width, lambda part: _split(part, form)[0])
    scales = stored("scales", _F32, blocks, lambda part: _split(part, form)[1])
    if form.is_fp4:
        floats = graph.constant(f"ones.{count}.{out}", np.ones((count, 1, out), np.float32))
        values = graph.node("DequantizeLinear", [codes, floats], axis=1, block_size=width)
        values = _by_block(
            graph, (count, width, out), "Mul", (_doubled(graph, values), scales), form.block
        )
    else:
        values = graph.node("DequantizeLinear", [codes, scales], axis=1, block_size=form.block)
    if form.has_shifts:
        shifts = stored("shifts", _F32, blocks, lambda part: _split(part, form)[2])
        values = _by_block(graph, (count, width, out), "Add", (values, shifts), form.block)
    return graph.node("Cast", [values], to=int(dtype))


def _needs_shifts(stack: Stack) -> bool:
    """Whether a projection of integer codes has shifts, or scales that are negative."""
    if form_of(stack).is_shifted:
        return True
    parts = (stack.expert(index) for index in range(stack.shape[0]))
    return any(bool((part.scales() < 0).any()) for part in parts)


def _bytes(array: np.ndarray, kind: ir.DataType) -> bytes:
    """An array [rows, out] in a type; pairs of 4-bit numbers share a byte, the first in its low."""
    if kind == ir.DataType.INT4:
        nibbles = array.astype(np.int8).view(np.uint8) & np.uint8(15)
        return (nibbles[:, 0::2] | nibbles[:, 1::2] << np.uint8(4)).tobytes()
    return np.ascontiguousarray(array.astype(kind.numpy())).tobytes()


def _split(part: WeightPart, form: PlanForm) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [in, out], positive scales and shifts [blocks, out].

    A code c of a negative scale s is -s * (-1 - c) - s, and -1 - c is in the range of c.
    """
    shape = part.shape[0] // form.block, part.shape[1]
    scales = np.broadcast_to(part.scales(), shape)
    codes, shifts = _codes(part), np.zeros(shape, np.float32)
    is_negative = np.repeat(scales < 0, form.block, 0)
    if form.has_shifts:
        shifts = np.broadcast_to(-part.offsets(middle_of(part)), shape)
        shifts = shifts + np.where(scales < 0, -scales, 0)
        codes = np.where(is_negative, -1 - codes, codes)
    else:
        codes = np.where(is_negative, -codes, codes)
    codes = np.where(np.repeat(scales == 0, form.block, 0), codes.dtype.type(0), codes)
    return codes, np.where(scales == 0, _SOME_SCALE, np.abs(scales)), shifts


def _codes(part: WeightPart) -> np.ndarray:
    """Codes [in, out]: signed integers, FP8's values, or signed indices of FP4's magnitudes."""
    if part.kind == "fp4":
        nibbles = part.nibbles().T.astype(np.int8)
        return np.where(nibbles & 8, -(nibbles & 7), nibbles & 7)
    if part.kind == "fp8":
        return part.codes()
    return part.codes() + part.repeated(part.zero_points()) - np.int16(middle_of(part))


def _doubled(graph: GraphEditor, index: ir.Value) -> ir.Value:
    """Doubled FP4 values 0, 1, 2, 3, 4, 6, 8, 12 of signed indices 0 to 7.

    They are m + max(m - 4, 0) + 2 max(m - 6, 0), and odd functions are sums of clipped values.
    """
    parts = []
    for bound, factor in ((4.0, 1.0), (6.0, 2.0)):
        least, most = (graph.constant(f"fp4.{each}", np.float32(each)) for each in (-bound, bound))
        clipped = graph.node("Max", [graph.node("Min", [index, most]), least])
        parts.append(
            graph.node("Mul", [clipped, graph.constant(f"fp4.x{factor}", np.float32(factor))])
        )
    four = graph.node("Mul", [index, graph.constant("fp4.x4", np.float32(4))])
    return graph.node("Sub", [graph.node("Sub", [four, parts[0]]), parts[1]])


def _by_block(
    graph: GraphEditor,
    shape: tuple[int, int, int],
    operator: str,
    operands: tuple[ir.Value, ir.Value],
    block: int,
) -> ir.Value:
    """Values of a shape [E, in, out] with factors [E, blocks, out] of blocks of inputs."""
    (count, width, out), (values, factors) = shape, operands
    sizes = np.array([count, width // block, block, out]), np.array(shape)
    apart, whole = (graph.constant(f"shape.{each.tolist()}", each) for each in sizes)
    each = graph.node("Unsqueeze", [factors, graph.constant("axis.2", np.array([2]))])
    found = graph.node(operator, [graph.node("Reshape", [values, apart]), each])
    return graph.node("Reshape", [found, whole])
