"""Mixtures of experts in TensorRT's operators.

The first token of a pass gathers the weights of its experts, which the compiler fuses with decoding
and products: one kernel reads the chosen weights only. Further tokens are computed by all experts,
with a share of 0 for the others. A pass of one token has none of these, at compile time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.experts import ExpertLayer
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.tensorrt.lowering.operators.expert_weights import can_merge, store_stacks

_END = 1 << 40  # of slices; more than any pass has


def lower_experts(graph: GraphEditor, dtype: ir.DataType) -> None:
    """Rewrite all experts of a graph; their routing is inlined.

    Args:
        graph: before functions are inlined.
        dtype: of activations.
    """
    for layer in ExpertLayer.all_of(graph.graph):
        graph.cursor = layer.call
        graph.replace(layer.call.outputs[0], _Emitter(graph, layer, dtype).emit())
        graph.graph.remove(layer.call, safe=True)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some tokens: x [1, R, H], their experts and shares [1, R, K]."""

    x: ir.Value
    ids: ir.Value
    shares: ir.Value


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Projections of the same inputs: weights [E, in, out], biases [E, 1, out] if there are any."""

    weight: ir.Value
    bias: ir.Value | None


@dataclass(frozen=True, slots=True)
class _Emitter:
    """Nodes of one layer. Shapes: R tokens, K experts of a token, E experts, H hidden size."""

    graph: GraphEditor
    layer: ExpertLayer
    dtype: ir.DataType  # of activations

    def emit(self) -> ir.Value:
        """The output [1, S, H]."""
        gate, up = (0,), (1,)
        if not self.layer.is_gated:
            groups = [up]
        elif can_merge(self.layer.gate, self.layer.up):
            groups = [gate + up]  # else the compiler merges their sums, and decodes apart
        else:
            groups = [gate, up]
        inner, down = [self._matrix(*group) for group in groups], self._matrix(2)
        first = self._of_one(self._rows(0, 1), inner, down)
        others = self._of_all(self._rows(1, _END), inner, down)
        return self.graph.node("Concat", [first, others], axis=1)

    def _matrix(self, *group: int) -> _Matrix:
        """Projections by their places among gate, up and down."""
        stacks = [self.layer.stacks[at] for at in group]
        biases = [self.layer.biases[at] for at in group]
        bias = None
        if any(each is not None for each in biases):
            found = [
                np.zeros((stack.shape[0], stack.shape[2]), np.float32) if each is None else each
                for stack, each in zip(stacks, biases, strict=True)
            ]
            whole = np.concatenate(found, 1)[:, None].astype(self.dtype.numpy())
            name = "+".join(stack.parameter for stack in stacks)
            bias = self.graph.weight(f"{name}.biases", lambda: whole)
        return _Matrix(store_stacks(self.graph, stacks, self.dtype), bias)

    def _rows(self, begin: int, end: int) -> _Rows:
        ends = [self._numbers(each) for each in (begin, end, 1)]
        given = self.layer.x, self.layer.ids, self.layer.shares
        x, ids, shares = (self.graph.node("Slice", [each, *ends]) for each in given)
        return _Rows(x, ids, shares)

    def _of_one(self, row: _Rows, inner: list[_Matrix], down: _Matrix) -> ir.Value:
        """[1, 1, H] of x [1, 1, H], by its experts. Values are rounded where `_of_all` does."""
        graph = self.graph

        def chosen(values: ir.Value) -> ir.Value:
            """[1, 1, K, rows, columns] of [E, rows, columns]."""
            return graph.node("Gather", [values, row.ids], axis=0)

        def product(given: ir.Value, weight: ir.Value, *axes: int) -> ir.Value:
            """Sums over inputs [1, 1, K or 1, in, 1], in float32."""
            y = graph.node("Mul", [self._float(chosen(weight)), self._float(given)])
            return self._cast(graph.node("ReduceSum", [y, self._numbers(*axes)], keepdims=1))

        x = graph.node("Unsqueeze", [row.x, self._numbers(2, 4)])
        shares = graph.node("Unsqueeze", [row.shares, self._numbers(3, 4)])
        found = []
        for each in inner:
            y = product(x, each.weight, 3)
            found.append(y if each.bias is None else graph.node("Add", [y, chosen(each.bias)]))
        gated = self._cast(graph.node("Mul", [self._gated(found, 5), self._float(shares)]))
        gated = graph.node("Transpose", [gated], perm=[0, 1, 2, 4, 3])
        y = product(gated, down.weight, 2, 3)
        if down.bias is not None:
            biases = graph.node("Mul", [chosen(down.bias), shares])
            sums = graph.node("ReduceSum", [biases, self._numbers(2)], keepdims=1)
            y = graph.node("Add", [y, sums])
        return graph.node("Squeeze", [y, self._numbers(2, 3)])

    def _of_all(self, given: _Rows, inner: list[_Matrix], down: _Matrix) -> ir.Value:
        """[1, R, H] of x [1, R, H], by all experts: their last products are one."""
        graph = self.graph
        _, width, hidden = self.layer.down.shape
        shares = self._share_of_each(given.ids, given.shares)
        by_expert = graph.node("Transpose", [shares], perm=[2, 1, 0])
        found = []
        for each in inner:
            y = graph.node("MatMul", [given.x, each.weight])  # [E, R, I]
            found.append(y if each.bias is None else graph.node("Add", [y, each.bias]))
        by_expert, zero = self._float(by_expert), self._number(0.0)
        # An expert that a token did not choose may have overflowed.
        is_unchosen = graph.node("Equal", [by_expert, zero])
        gated = graph.node("Mul", [self._gated(found, 3), by_expert])
        gated = self._cast(graph.node("Where", [is_unchosen, zero, gated]))
        gated = graph.node("Transpose", [gated], perm=[1, 0, 2])
        columns = self.layer.count * width
        rows = graph.node("Reshape", [gated, self._numbers(0, columns)])
        matrix = graph.node("Reshape", [down.weight, self._numbers(columns, hidden)])
        y = graph.node("Unsqueeze", [graph.node("MatMul", [rows, matrix]), self._numbers(0)])
        if down.bias is None:
            return y
        bias = graph.node("Squeeze", [down.bias, self._numbers(1)])
        return graph.node("Add", [y, graph.node("MatMul", [shares, bias])])

    def _share_of_each(self, ids: ir.Value, shares: ir.Value) -> ir.Value:
        """[1, R, E]; 0 for experts that a token did not choose."""
        graph, last = self.graph, self._numbers(3)
        is_chosen = graph.node(
            "Equal", [graph.node("Unsqueeze", [ids, last]), self._numbers(*range(self.layer.count))]
        )
        each = graph.node(
            "Where",
            [is_chosen, graph.node("Unsqueeze", [shares, last]), self._cast(self._number(0.0))],
        )
        return graph.node("ReduceSum", [each, self._numbers(2)], keepdims=0)

    def _gated(self, found: list[ir.Value], rank: int) -> ir.Value:
        """As `edgellm.export.onnx.functions.experts`, in float32; without gates a squared ReLU."""
        graph, layer = self.graph, self.layer
        found = [self._float(each) for each in found]
        if not layer.is_gated:
            positive = graph.node("Max", [found[0], self._number(0.0)])
            return graph.node("Mul", [positive, positive])
        gate, up = found if len(found) == 2 else self._halves(found[0], rank)
        if layer.limit is not None:
            limit, least = self._number(layer.limit), self._number(-layer.limit)
            gate = graph.node("Min", [gate, limit])
            up = graph.node("Max", [graph.node("Min", [up, limit]), least])
        slope = self._number(layer.alpha)
        if layer.cubic:  # not times the square, which overflows in float16
            scaled = graph.node("Mul", [gate, self._number(layer.cubic)])
            slope = graph.node("Add", [slope, graph.node("Mul", [scaled, gate])])
        sigmoid = graph.node("Sigmoid", [graph.node("Mul", [gate, slope])])
        if layer.offset:
            up = graph.node("Add", [up, self._number(layer.offset)])
        return graph.node("Mul", [graph.node("Mul", [gate, sigmoid]), up])

    def _halves(self, y: ir.Value, rank: int) -> list[ir.Value]:
        """Gates and ups of both [..., 2 I]; after a mere Split weights would be stored twice."""
        graph, axis = self.graph, rank - 1
        apart = self._numbers(*[0] * axis, 2, self.layer.up.shape[2])
        pieces = graph.nodes(
            "Split", [graph.node("Reshape", [y, apart])], 2, axis=axis, num_outputs=2
        )
        return [graph.node("Squeeze", [piece, self._numbers(axis)]) for piece in pieces]

    def _float(self, x: ir.Value) -> ir.Value:
        return self.graph.node("Cast", [x], to=int(ir.DataType.FLOAT))

    def _cast(self, x: ir.Value) -> ir.Value:
        return self.graph.node("Cast", [x], to=int(self.dtype))

    def _numbers(self, *values: int) -> ir.Value:
        shown = f"{values[0]}..{values[-1]}" if len(values) > 8 else values
        return self.graph.constant(f"numbers.{shown}", np.array(values, np.int64))

    def _number(self, value: float) -> ir.Value:
        return self.graph.constant(f"number.{value}", np.float32(value))
