"""Calls of mixtures of experts, see `edgellm.export.onnx.functions.experts`.

Shapes: S tokens, H hidden size, E experts, K experts per token, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.function_calls import EXPERT_CALLS, find_calls, require_known
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.block_factors import slice_first, stored_tensor
from edgellm.build.lowering.linears.weights import (
    LinearWeight,
    WeightPart,
    kind_of,
    layer_name,
    linear_layers,
)
from edgellm.build.lowering.weights import constant_array, parameter_name
from edgellm.core.errors import UnsupportedModelError
from edgellm.core.onnx_functions import (
    BLOCK_EXPERTS,
    BLOCK_LINEAR,
    EXPERTS,
    FP4_EXPERTS,
    FUNCTIONS,
    NVFP4_EXPERTS,
    OFFSET_LINEAR,
    QUANTIZED_EXPERTS,
    QUANTIZED_LINEAR,
    SHIFTED_EXPERTS,
    SHIFTED_LINEAR,
)

_OF_ALL = ("alpha", "limit", "offset", "cubic", "top_k")
_ATTRIBUTES = (*_OF_ALL, "block_size", "down_block_size")
_UNLIMITED = 65504.0  # stands for infinity in a float16 portable graph
_KINDS = {EXPERTS: "dense", FP4_EXPERTS: "fp4", NVFP4_EXPERTS: "fp4"}
_OPERATIONS = {SHIFTED_EXPERTS: SHIFTED_LINEAR, BLOCK_EXPERTS: OFFSET_LINEAR}
_FP4_BLOCKS = {FP4_EXPERTS: 32, NVFP4_EXPERTS: 16}
PARTS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Weights of all experts for one projection: gate, up or down."""

    kind: str  # as `WeightPart.kind`
    name: str  # gate_proj, up_proj or down_proj
    parameter: str
    shape: tuple[int, int, int]  # E, in, out
    block_size: int
    call: ir.Node
    values: tuple[ir.Value, ...]  # its operands

    def expert(self, index: int) -> WeightPart:
        """The weight of one expert; only this is read from its file."""
        part = slice(index, index + 1)
        tensors = [
            slice_first(stored_tensor(value, self.call), part, drops_axis=True)
            for value in self.values
        ]
        if self.kind == "fp4":
            tensors[0] = _pairs(tensors[0], self.shape[:0:-1])
            if len(tensors) == 2:  # no scale of scales
                tensors.append(ir.tensor(np.array(1, np.float32)))
        operation, block = _OPERATIONS.get(self.call.op_type, QUANTIZED_LINEAR), self.block_size
        if operation == OFFSET_LINEAR and tensors[2].size == 1:  # no minima
            operation = BLOCK_LINEAR
            tensors.pop()
        if self.call.op_type != BLOCK_EXPERTS and block == self.shape[1]:
            block = 0
        shape = self.shape[1:]
        return WeightPart(
            kind=self.kind,
            shape=shape,
            block_size=block,
            parameter=self.parameter,
            stored=tuple(tensors),
            operation=operation,
        )

    @property
    def first(self) -> LinearWeight:
        """The weight of the first expert, representative of all."""
        return LinearWeight((self.expert(0),))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayer:
    """Operands and attributes of one layer's experts."""

    call: ir.Node
    x: ir.Value  # [1, S, H]
    ids: ir.Value  # int64 [1, S, K]
    shares: ir.Value  # [1, S, K]
    gate: Stack
    up: Stack
    down: Stack
    biases: tuple[np.ndarray | None, ...]  # [E, out] of gate, up and down
    top_k: int
    alpha: float
    limit: float | None  # None: gates and ups are not clamped
    offset: float
    cubic: float  # 0: the activation is Swish

    @property
    def is_gated(self) -> bool:
        """Whether gate and up exist; else up is followed by a squared ReLU."""
        return self.alpha < _UNLIMITED

    @classmethod
    def all_of(cls, graph: ir.Graph) -> list[ExpertLayer]:
        """Expert layers of a portable graph, in order.

        Raises:
            UnsupportedModelError: a call has an unknown attribute.
        """
        return [cls._of(call) for call in find_calls(graph, *EXPERT_CALLS)]

    @classmethod
    def _of(cls, call: ir.Node) -> ExpertLayer:
        require_known(call, *_ATTRIBUTES)
        x, ids, shares, *weights = call.inputs
        assert x is not None and ids is not None and shares is not None  # noqa: PT018
        per_part = (len(weights) - 3) // 3
        parts = [weights[at * per_part : (at + 1) * per_part] for at in range(3)]
        blocks = ("block_size", "block_size", "down_block_size")
        gate, up, down = (
            _stack(call, name, part, block)
            for name, part, block in zip(PARTS, parts, blocks, strict=True)
        )
        alpha, limit, offset = (
            call.attributes[name].as_float() for name in ("alpha", "limit", "offset")
        )
        return cls(
            call=call,
            x=x,
            ids=ids,
            shares=shares,
            gate=gate,
            up=up,
            down=down,
            biases=tuple(_bias(value) for value in weights[-3:]),
            top_k=call.attributes["top_k"].as_int(),
            alpha=alpha,
            limit=limit if limit < _UNLIMITED else None,
            offset=offset,
            cubic=call.attributes.get_float("cubic", 0.0),
        )

    @property
    def count(self) -> int:
        """E."""
        return self.gate.shape[0]

    @property
    def stacks(self) -> tuple[Stack, Stack, Stack]:
        """Gates, ups and downs."""
        return self.gate, self.up, self.down

    @property
    def name(self) -> str:
        """The checkpoint's name of the experts."""
        return str(self.call.name).rpartition(".")[0]

    @property
    def first_inner(self) -> LinearWeight:
        """`inner` of the first expert, representative of all."""
        return next(self.inner())

    def inner(self) -> Iterator[LinearWeight]:
        """Gate and up of each expert, concatenated; where there are no gates, its up."""
        stacks = (self.gate, self.up) if self.is_gated else (self.up,)
        for index in range(self.count):
            yield LinearWeight(tuple(stack.expert(index) for stack in stacks))

    def downs(self) -> Iterator[LinearWeight]:
        """Down of each expert."""
        for index in range(self.count):
            yield LinearWeight((self.down.expert(index),))


def all_weights(graph: ir.Graph) -> Iterator[tuple[str, LinearWeight]]:
    """Weights of linear layers, and of the first expert of each mixture, by the layers' names."""
    for call, weight in linear_layers(graph):
        yield layer_name(call), weight
    for layer in ExpertLayer.all_of(graph):
        for stack in layer.stacks:
            yield stack.name, stack.first


def touched(experts: int, top_k: int, rows: int) -> float:
    """Expected number of different experts for `rows` tokens, with uniform routing."""
    return experts * (1 - (1 - top_k / experts) ** rows)


def expand_rounded(graph: GraphEditor) -> None:
    """Dequantize experts that the build rounded, since the graph defines no function for them."""
    for call in find_calls(graph.graph, QUANTIZED_EXPERTS):
        graph.cursor = call
        weights = []
        for at, name in ((3, "block_size"), (5, "block_size"), (7, "down_block_size")):
            block = call.attributes[name].as_int()
            codes, scales = call.inputs[at : at + 2]
            floats = graph.node("DequantizeLinear", [codes, scales], axis=1, block_size=block)
            weights.append(graph.node("Transpose", [floats], perm=[0, 2, 1]))
        given = {each: call.attributes[each].value for each in _OF_ALL if each in call.attributes}
        y = graph.node(
            EXPERTS, [*call.inputs[:3], *weights, *call.inputs[-3:]], domain=FUNCTIONS, **given
        )
        graph.replace(call.outputs[0], y)


def refuse_experts(graph: ir.Graph, label: str, hint: str) -> None:
    """Raise `UnsupportedModelError` for a backend without mixtures of experts."""
    if find_calls(graph, *EXPERT_CALLS):
        raise UnsupportedModelError(f"{label} does not compute mixtures of experts", hint=hint)


def _stack(call: ir.Node, name: str, values: list[ir.Value | None], size_name: str) -> Stack:
    given = tuple(value for value in values if value is not None)
    codes = stored_tensor(given[0], call)
    count, rows, columns = (int(dim) for dim in codes.shape.numpy())
    is_by_output = call.op_type in (EXPERTS, BLOCK_EXPERTS, *_FP4_BLOCKS)
    shape = (count, columns, rows) if is_by_output else (count, rows, columns)
    kind = _KINDS.get(call.op_type) or kind_of(codes)
    if kind == "fp4":
        shape = (count, 2 * columns, rows)
    size = call.attributes[size_name].as_int() if size_name in call.attributes else 0
    block = _FP4_BLOCKS.get(call.op_type, size)
    return Stack(
        kind=kind,
        name=name,
        parameter=parameter_name(given[0]),
        shape=shape,
        block_size=block,
        call=call,
        values=given,
    )


def _bias(value: ir.Value | None) -> np.ndarray | None:
    """[E, out]; None if it is a single zero."""
    array = constant_array(value) if value is not None else None
    return None if array is None or array.size == 1 else array.astype(np.float32)


def _pairs(tensor: ir.TensorProtocol, shape: tuple[int, ...]) -> ir.TensorProtocol:
    """Bytes [out, in / 2] as FP4 codes [out, in]."""
    dtype = ir.DataType.FLOAT4E2M1
    if not isinstance(tensor, ir.ExternalTensor):
        return ir.PackedTensor(tensor.numpy().reshape(-1), dtype, shape=shape)
    return ir.ExternalTensor(
        tensor.location, tensor.offset, tensor.length, dtype,
        shape=ir.Shape(shape), name=str(tensor.name), base_dir=tensor.base_dir,
    )  # fmt: skip
