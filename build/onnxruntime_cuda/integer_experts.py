"""4-bit and 8-bit experts by ONNX Runtime's operator QMoE.

Its weights are raw codes [E, out, in * bits / 8], low nibble first, relative to the middle, with a
scale for each block. The library repacks them at load time, so sessions cannot share them, and an
engine with such experts has one graph.

Source: the operator's schema in ONNX Runtime 1.32, docs/contrib_ops/cuda/moe_qmoe.md (blocks of 32,
64 or 128 from compute capability 7.5 on, halves); `weights_prepacked=0` is
microsoft/onnxruntime#28749. `INTEGER_EXPERTS_VERSION` is the first release whose library loaded
such a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.experts import ExpertLayer
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.weights import Blocks, LinearWeight
from edgellm.build.onnxruntime_cuda.linears import split_blocks

INTEGER_EXPERTS_VERSION = "1.31"  # of ONNX Runtime
_BLOCK_SIZES = (128, 64, 32)  # with kernels, largest first
_ROUNDED_BLOCK = 32  # of rounded floats
_MULTIPLE = 64  # of inputs and outputs, as the kernels' layout interleaves them


@dataclass(frozen=True, slots=True)
class IntegerForm:
    """Stored form of the codes of a layer's experts."""

    bits: int
    block_size: int

    def num_bytes(self, count: int, rows: int, columns: int) -> int:
        """Bytes of codes and scales of `count` matrices [rows, columns]."""
        return (
            count * rows * columns * self.bits // 8 + 2 * count * rows * columns // self.block_size
        )


def integer_form(layer: ExpertLayer, dtype: ir.DataType, bits: int = 0) -> IntegerForm | None:
    """QMoE's form of a layer's experts; None if they are floats or unsupported.

    Args:
        layer: of experts.
        dtype: of activations.
        bits: of rounded floats; 0: they stay floats.
    """
    firsts = [stack.first for stack in layer.stacks]
    if dtype != ir.DataType.FLOAT16 or any(first.has_zero_points for first in firsts):
        return None
    if not bits and any(first.kind == "dense" for first in firsts):
        return None
    packings = {(bits, _ROUNDED_BLOCK) if f.kind == "dense" else f.packing for f in firsts}
    widths = {width for stack in layer.stacks for width in stack.shape[1:]}
    if len({each for each, _ in packings}) > 1 or any(width % _MULTIPLE for width in widths):
        return None
    sizes = [size for _, size in packings]
    block = next((b for b in _BLOCK_SIZES if all(s % b == 0 for s in (*sizes, *widths))), None)
    return None if block is None else IntegerForm(packings.pop()[0], block)


def emit_integer_experts(
    graph: GraphEditor,
    layer: ExpertLayer,
    form: IntegerForm,
    logits: ir.Value,
    biases: tuple[ir.Value | None, ir.Value | None],
    **attributes: float | str,
) -> ir.Value:
    """One QMoE; attributes are those of MoE."""
    count, hidden, inner = layer.gate.shape
    gate_up = _stored(
        graph, layer, form, "gate_up", (count, 2 * inner, hidden), lambda: _pairs(layer)
    )
    down = _stored(graph, layer, form, "down", (count, hidden, inner), lambda: _downs(layer))
    return graph.node(
        "QMoE",
        [layer.x, logits, *gate_up, biases[0], *down, biases[1]],
        domain="com.microsoft",
        quant_type="int",
        expert_weight_bits=form.bits,
        block_size=form.block_size,
        weights_prepacked=0,
        **attributes,
    )


def _stored(
    graph: GraphEditor,
    layer: ExpertLayer,
    form: IntegerForm,
    name: str,
    shape: tuple[int, int, int],
    experts: Callable[[], Iterator[tuple[LinearWeight, ...]]],
) -> tuple[ir.Value, ir.Value]:
    """Codes and scales of all experts, with the rows of their parts interleaved."""
    count, rows, columns = shape
    bits, size = form.bits, form.block_size

    def blocks() -> Iterator[list[Blocks]]:
        for parts in experts():
            yield [split_blocks(part.blocks(), size) for part in parts]

    def codes() -> Iterator[bytes]:
        for parts in blocks():
            yield _by_turns([each.codes.reshape(len(each.codes), -1) for each in parts]).tobytes()

    def scales() -> Iterator[bytes]:
        for parts in blocks():
            yield _by_turns([each.scales for each in parts]).astype(np.float16).tobytes()

    packed = (count, rows, columns * bits // 8)
    named = f"{layer.name}.{name}.int{bits}"
    return (
        graph.streamed_weight(f"{named}_blocks", int(np.prod(packed)), codes, shape=packed),
        graph.streamed_weight(
            f"{named}_scales",
            2 * count * rows * columns // size,
            scales,
            ir.DataType.FLOAT16,
            (count, rows, columns // size),
        ),
    )


def _pairs(layer: ExpertLayer) -> Iterator[tuple[LinearWeight, ...]]:
    for index in range(layer.count):
        yield tuple(LinearWeight((stack.expert(index),)) for stack in (layer.gate, layer.up))


def _downs(layer: ExpertLayer) -> Iterator[tuple[LinearWeight, ...]]:
    for down in layer.downs():
        yield (down,)


def _by_turns(parts: list[np.ndarray]) -> np.ndarray:
    """Interleave the rows of several matrices [n, columns]."""
    return np.stack(parts, 1).reshape(-1, parts[0].shape[1])
