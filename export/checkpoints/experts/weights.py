"""Weights of all experts of a layer, one tensor for each projection: gates, ups and downs.

Checkpoints have separate experts with linear layers, or all experts in one tensor. Shapes: E
experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import onnx_ir as ir

from edgellm.core import onnx_functions
from edgellm.core.errors import (
    BrokenArtifactError,
    UnsupportedModelError,
)
from edgellm.export.checkpoints import quantized
from edgellm.export.checkpoints.quantized_weight import (
    BlockFactors,
    BlockWeight,
    QuantizedLinear,
    StoredPlanes,
    stored,
)
from edgellm.export.checkpoints.weights import Pieces, StoredTensor, Weights, as_bytes

Bias = StoredTensor | None
Operand = StoredTensor | StoredPlanes | BlockFactors | None  # None: no minima


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Operands of a call of experts."""

    function: str  # of `edgellm.core.onnx_functions`
    operands: tuple[Operand, ...]  # gates with their scales, ups, downs
    blocks: dict[str, int] = field(default_factory=dict)
    biases: tuple[Bias, Bias, Bias] = (None, None, None)


class Stack(Protocol):
    """A layout of a layer's experts."""

    prefix: str  # dotted prefix of their tensors

    def read(self, dtype: ir.DataType) -> Stored:
        """The weights for a graph of activation type `dtype`.

        Raises:
            EdgeLLMError: missing, of another shape, or stored in an unsupported form.
        """
        ...


class SeparateExperts:
    """Separate experts with three linear layers each, dense or quantized."""

    def __init__(
        self,
        *,
        weights: Weights,
        experts: int,
        sizes: tuple[int, int],
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        """`sizes`: H and I; `names`: of gate, up and down; gate and up may be the same."""
        hidden, inner = sizes
        self.prefix = weights.prefix
        self._weights, self._experts, self._names = weights, experts, names
        self._shapes = (inner, hidden), (inner, hidden), (hidden, inner)

    def read(self, dtype: ir.DataType) -> Stored:
        """See `Stack`."""
        shapes = dict(zip(self._names, self._shapes, strict=True))
        found = {name: self._read_part(name, shape, dtype) for name, shape in shapes.items()}
        parts = [found[name] for name in self._names]
        functions = {part.function for part in parts}
        blocks = [tuple(part.blocks.values()) for part in parts]
        if len(functions) > 1 or blocks[0] != blocks[1]:
            raise UnsupportedModelError(
                f"{self.prefix}*: gates, ups and downs of the experts are quantized differently",
                hint="quantize them alike",
            )
        names = ("block_size", "down_block_size")
        sizes = [size for part in (blocks[0], blocks[2]) for size in part]
        operands = tuple(each for part in parts for each in part.operands)
        return Stored(
            function=functions.pop(),
            operands=operands,
            blocks=dict(zip(names, sizes, strict=False)),
        )

    def _read_part(self, name: str, shape: tuple[int, int], dtype: ir.DataType) -> Stored:
        layers = [self._weights / f"{index}.{name}" for index in range(self._experts)]
        found = [quantized.find(layer, shape, dtype) for layer in layers]
        title = f"{self.prefix}*.{name}.weight"
        first = next((each for each in found if each is not None), None)
        if first is None:
            dense = [layer.take("weight", shape, dtype) for layer in layers]
            return Stored(function=onnx_functions.EXPERTS, operands=(stacked(title, dense),))
        linears = [_plain(layer, each, first) for layer, each in zip(layers, found, strict=True)]
        return _stack_linears(title, linears, shape)


_Found = QuantizedLinear | BlockWeight | None


def _plain(layer: Weights, found: _Found, first: _Found) -> QuantizedLinear:
    """An expert's weight, if stored as the first one; its inputs stay floats.

    If the checkpoint has a scale for rounded inputs, float inputs are more exact.
    """
    name = layer.prefix.rstrip(".")
    if not isinstance(found, QuantizedLinear) or _form(found) != _form(first):
        raise UnsupportedModelError(
            f"{name} is not quantized as the other experts of its layer are",
            hint="quantize all experts alike",
        )
    unusual = {
        "inputs in another order": found.input_order is not None,
        "smoothed inputs": layer.info("pre_quant_scale") is not None,
    }
    if what := [words for words, holds in unusual.items() if holds]:
        raise UnsupportedModelError(
            f"{name} has {what[0]}, which experts of a mixture cannot have yet",
            hint="export the checkpoint before it was quantized, and give llm_build --quantize",
        )
    return found


def _form(linear: _Found) -> tuple[object, ...] | None:
    if not isinstance(linear, QuantizedLinear):
        return None
    is_nvfp4 = linear.global_scale is not None
    has_zeros = linear.zero_points is not None
    return linear.codes.dtype, linear.block_size, has_zeros, is_nvfp4, linear.scales.shape


def _stack_linears(
    title: str, linears: Sequence[QuantizedLinear], shape: tuple[int, int]
) -> Stored:
    out, width = shape
    first = linears[0]
    if first.global_scale is not None:
        return _stack_nvfp4(title, linears, shape)
    block = first.block_size or width
    scales = [_spread(each.scales, (width // block, out)) for each in linears]
    operands = [
        stacked(title, [each.codes for each in linears]), stacked(f"{title}_scale", scales)
    ]  # fmt: skip
    zeros = [each.zero_points for each in linears if each.zero_points is not None]
    if zeros:
        operands.append(stacked(f"{title}_zero_point", zeros))
    function = onnx_functions.SHIFTED_EXPERTS if zeros else onnx_functions.QUANTIZED_EXPERTS
    return Stored(function=function, operands=tuple(operands), blocks={"block_size": block})


def _stack_nvfp4(title: str, linears: Sequence[QuantizedLinear], shape: tuple[int, int]) -> Stored:
    out, width = shape
    pairs = [
        StoredTensor(
            name=each.codes.name,
            dtype=ir.DataType.UINT8,
            shape=(out, width // 2),
            stream=each.codes.stream,
        )
        for each in linears
    ]
    of_scales = np.array([each.global_scale for each in linears], np.float32)
    name = f"{title}_scale"
    operands = (
        stacked(title, pairs), stacked(name, [each.scales for each in linears]),
        stored(f"{name}_2", ir.DataType.FLOAT, of_scales.shape, lambda: of_scales),
    )  # fmt: skip
    return Stored(function=onnx_functions.NVFP4_EXPERTS, operands=operands)


def _spread(scales: StoredTensor, shape: tuple[int, int]) -> StoredTensor:
    """Broadcast scales to [blocks, out], from one in total or one per output."""
    if np.prod(scales.shape, dtype=int) == np.prod(shape):
        return StoredTensor(name=scales.name, dtype=scales.dtype, shape=shape, stream=scales.stream)

    def stream() -> Pieces:
        value = np.frombuffer(b"".join(scales.stream()), scales.dtype.numpy())
        yield as_bytes(np.broadcast_to(value, shape))

    return StoredTensor(name=scales.name, dtype=scales.dtype, shape=shape, stream=stream)


def stacked(name: str, tensors: Sequence[StoredTensor]) -> StoredTensor:
    """Tensors of one type and shape, one after the other along a new first axis.

    Raises:
        UnsupportedModelError: they are stored in several types.
    """
    first = tensors[0]
    for each in tensors:
        if each.dtype != first.dtype:
            raise UnsupportedModelError(
                f"{each.name} is stored as {each.dtype.name}, {first.name} as {first.dtype.name}"
            )

    def stream() -> Pieces:
        for each in tensors:
            yield from each.stream()

    return StoredTensor(
        name=name, dtype=first.dtype, shape=(len(tensors), *first.shape), stream=stream
    )


class JoinedExperts:
    """Gates and ups of all experts in one tensor [E, 2 I, H], downs in another [E, H, I].

    Files of some families, such as Qwen3-VL, have the last two axes the other way around.
    """

    def __init__(
        self, *, gate_up: tuple[Weights, str], down: tuple[Weights, str], experts: int,
        sizes: tuple[int, int],
    ) -> None:  # fmt: skip
        """`gate_up` and `down`: weights and names of the tensors; `sizes`: H and I."""
        self.prefix = gate_up[0].prefix
        self._gate_up, self._down, self._experts, self._sizes = gate_up, down, experts, sizes

    def read(self, dtype: ir.DataType) -> Stored:
        """See `Stack`."""
        hidden, inner = self._sizes
        both = self._rows(self._gate_up, (2 * inner, hidden), dtype)
        shape = (self._experts, inner, hidden)
        gate = each_expert(both, f"{both.name}.gate", shape, lambda rows: rows[:inner])
        up = each_expert(both, f"{both.name}.up", shape, lambda rows: rows[inner:])
        down = self._rows(self._down, (hidden, inner), dtype)
        return Stored(function=onnx_functions.EXPERTS, operands=(gate, up, down))

    def _rows(
        self, place: tuple[Weights, str], shape: tuple[int, int], dtype: ir.DataType
    ) -> StoredTensor:
        """A tensor [E, out, in]."""
        (weights, name), own = place, (self._experts, *shape)
        if not self._is_turned():
            return weights.take(name, own, dtype)
        turned = weights.take(name, (self._experts, *shape[::-1]), dtype)
        return each_expert(turned, turned.name, own, lambda columns: columns.T)

    def _is_turned(self) -> bool:
        """Whether both tensors are [E, in, out]; one of them may be square, but not both."""
        hidden, inner = self._sizes
        places = (self._gate_up, (hidden, 2 * inner)), (self._down, (inner, hidden))
        found = [(weights.info(name), sizes) for (weights, name), sizes in places]
        return all(info is not None and info.shape[1:] == sizes for info, sizes in found)


def each_expert(
    stored: StoredTensor,
    name: str,
    shape: tuple[int, ...],
    part: Callable[[np.ndarray], np.ndarray],
) -> StoredTensor:
    """`part` of each expert of a tensor [E, ...], with one expert in memory at a time."""
    own = stored.shape[1:]

    def stream() -> Pieces:
        for block in _blocks(stored.stream(), stored.num_bytes // stored.shape[0]):
            yield as_bytes(part(np.frombuffer(block, stored.dtype.numpy()).reshape(own)))

    return StoredTensor(name=name, dtype=stored.dtype, shape=shape, stream=stream)


def _blocks(pieces: Pieces, size: int) -> Iterator[bytearray]:
    """The same bytes, `size` at a time."""
    held = bytearray()
    for piece in pieces:
        begin = 0
        while begin < len(piece):
            taken = min(size - len(held), len(piece) - begin)
            held += piece[begin : begin + taken]
            begin += taken
            if len(held) == size:
                yield held
                held = bytearray()
    if held:
        raise BrokenArtifactError("a tensor of experts is shorter than its shape")
