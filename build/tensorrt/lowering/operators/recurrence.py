"""Recurrent layers in TensorRT's operators, without loops.

States are inputs of the graph, and what a commit needs of its rows are outputs, in the types that
edgellm's kernels read (`state_memory.py`): they advance the states between passes.
Shapes: S tokens, H value heads, J key heads, dk and dv their sizes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.function_calls import require_known
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.recurrent import store_taps
from edgellm.build.tensorrt.lowering.kernel_recurrence import Recurrence
from edgellm.core import graph_io
from edgellm.device_runtime.runners.tensorrt.state_memory import CHUNK_ROWS

_F16, _F32 = ir.DataType.FLOAT16, ir.DataType.FLOAT
_END = 1 << 40  # of slices; more than any pass has
_NEVER = np.float32(-1e30)  # log decay between tokens that do not attend to each other
_OWN = -1  # of the table of levels


def lower_recurrences(graph: GraphEditor, dtype: ir.DataType) -> None:
    """Rewrite all recurrent layers of a graph.

    Args:
        graph: before functions are inlined.
        dtype: of activations.
    """
    for layer in list(Recurrence.all_of(graph.graph)):
        require_known(layer.call)
        graph.cursor = layer.call
        if layer.is_convolution:
            found = [_convolution(graph, layer, dtype)]
        else:
            found = [*_LinearAttention(graph, layer).emit()]
        # Without the delta term deltas are an input.
        for old, new in zip(layer.call.outputs, found, strict=layer.takes):
            graph.replace(old, new)
        graph.graph.remove(layer.call, safe=True)
    _store_keys(graph)


def _store_keys(graph: GraphEditor) -> None:
    """Hand out keys in float16, as commits read them."""
    graph.cursor = None
    for at, output in enumerate(graph.graph.outputs):
        name = str(output.name)
        if name.startswith(graph_io.STATE_ROWS) and name.endswith(".key"):
            node = ir.Node(
                "", "Cast", [output], ir.convenience.convert_attributes({"to": int(_F16)})
            )
            graph.graph.append(node)
            (new,) = node.outputs
            output.name, node.name, new.name = f"{name}.float", f"lowered.{name}", name
            new.type, new.shape = ir.TensorType(_F16), output.shape
            graph.graph.outputs[at] = new


def _convolution(graph: GraphEditor, layer: Recurrence, dtype: ir.DataType) -> ir.Value:
    """As `edgellm.export.layers.recurrent.convolution`, with sums in float32."""
    x, window, _, parents = layer.call.inputs
    before, _ = layer.dims

    def cast(value: ir.Value | None, kind: ir.DataType) -> ir.Value:
        return graph.node("Cast", [value], to=int(kind))

    taps = store_taps(graph, layer.call, _F32)
    taps = graph.nodes("Split", [taps], before + 1, axis=0, num_outputs=before + 1)
    rows = graph.node("Concat", [window, x], axis=1)  # the window's rows are their next's parents
    places = graph.node("Add", [parents, _numbers(graph, before)])
    chain = _numbers(graph, *(max(at - 1, 0) for at in range(before)))
    parent_of = graph.node("Concat", [chain, places], axis=0)
    y = graph.node("Mul", [cast(x, _F32), taps[-1]])
    for tap in taps[-2::-1]:
        above = cast(graph.node("Gather", [rows, places], axis=1), _F32)
        y = graph.node("Add", [y, graph.node("Mul", [above, tap])])
        places = graph.node("Gather", [parent_of, places], axis=0)
    return cast(y, dtype)


class _LinearAttention:
    """As `edgellm.export.onnx.functions.delta_rule`, with a fixed number of steps.

    The first token has no ancestors in the pass. So the system of equations is that of the others,
    and a pass of one token has none, at compile time.
    """

    def __init__(self, graph: GraphEditor, layer: Recurrence) -> None:
        self._graph, self._layer, self._state = graph, layer, layer.state
        self._heads, self._key_dim, _ = layer.dims

    def emit(self) -> tuple[ir.Value, ir.Value]:
        """Outputs and deltas [1, S, H * dv]."""
        q, k, v, g, *rates, _, mask, _ = self._layer.call.inputs
        queries, keys = (self._by_head(each, self._layer.key_heads) for each in (q, k))
        deltas = self._by_head(v, self._heads)
        seen = self._node("Cast", mask, to=int(_F32))
        logs = self._by_head(self._node("MatMul", seen, g), self._heads)  # since the state
        decays = self._node("Exp", logs)
        between = self._node("Sub", logs, self._turned(logs))
        never = self._graph.constant("never", _NEVER)
        between = self._node("Exp", self._node("Where", mask, between, never))

        def products(x: ir.Value) -> ir.Value:
            """[1, H, S, S] with the decayed keys of ancestors and its own."""
            return self._node("Mul", self._node("MatMul", x, self._turned(keys)), between)

        def recalled(x: ir.Value) -> ir.Value:
            """[1, H, S, dv] from the decayed state."""
            return self._node("Mul", self._recalled(x), decays)

        if self._layer.takes:
            share = self._by_head(rates[0], self._heads)
            wanted = self._node("Mul", self._node("Sub", deltas, recalled(keys)), share)
            deltas = self._solved(self._node("Mul", products(keys), share), wanted)
        new = self._node("MatMul", products(queries), deltas)
        y = self._node("Add", recalled(queries), new)
        return self._by_row(y), self._by_row(deltas)

    def _recalled(self, x: ir.Value) -> ir.Value:
        """X [1, H, S, dk] times the state; of a single row a product would transpose the state."""
        column = self._turned(self._part(x, 0, 1))
        axis = _numbers(self._graph, 2)
        first = self._node("ReduceSum", self._node("Mul", column, self._state), axis, keepdims=1)
        others = self._node("MatMul", self._part(x, 1, _END), self._state)
        return self._node("Concat", first, others, axis=2)

    def _solved(self, below: ir.Value, wanted: ir.Value) -> ir.Value:
        """(I + L)^-1 wanted [1, H, S, dv], with L the strictly lower triangle of `below`."""
        first, others = self._part(wanted, 0, 1), self._part(wanted, 1, _END)
        lower = self._part(below, 1, _END)
        column = self._part(lower, 0, 1, axis=3)
        left = self._node("Sub", others, self._node("Mul", column, first))
        inverse = self._inverse(self._part(lower, 1, _END, axis=3))
        return self._node("Concat", first, self._node("MatMul", inverse, left), axis=2)

    def _inverse(self, below: ir.Value) -> ir.Value:
        """(I + L)^-1 [1, H, R, R]: two inverted diagonal blocks give that of twice the size."""
        graph = self._graph
        count = self._node("Shape", below, start=2, end=3)
        size = self._node("Concat", count, count, axis=0)
        levels = self._graph.constant("levels", _levels(CHUNK_ROWS))
        ends = _numbers(graph, 0, 0), size, _numbers(graph, 0, 1)
        levels = self._node("Slice", levels, *ends)
        zero, one = (graph.constant(f"float.{each}", np.float32(each)) for each in (0, 1))

        def where(level: int, value: ir.Value) -> ir.Value:
            number = graph.constant(f"level.{level}", np.int32(level))
            return self._node("Where", self._node("Equal", levels, number), value, zero)

        unit = where(_OWN, one)
        inverse = self._node("Sub", unit, where(0, below))
        for level in range(1, (CHUNK_ROWS - 1).bit_length()):
            corner = self._node("MatMul", where(level, below), inverse)
            inverse = self._node("Sub", inverse, self._node("MatMul", inverse, corner))
        return inverse

    def _by_head(self, x: ir.Value | None, heads: int) -> ir.Value:
        """[1, S, heads * width] -> [1, H, S, width]; key heads are repeated for value heads."""
        apart = self._node("Reshape", x, _numbers(self._graph, 0, 0, heads, -1))
        if heads < self._heads:
            each = self._node("Unsqueeze", apart, _numbers(self._graph, 3))
            repeats = _numbers(self._graph, 1, 1, 1, self._heads // heads, 1)
            whole = _numbers(self._graph, 0, 0, self._heads, self._key_dim)
            apart = self._node("Reshape", self._node("Expand", each, repeats), whole)
        return self._node("Transpose", apart, perm=[0, 2, 1, 3])

    def _by_row(self, x: ir.Value) -> ir.Value:
        """[1, H, S, dv] -> [1, S, H * dv]."""
        rows = self._node("Transpose", x, perm=[0, 2, 1, 3])
        return self._node("Reshape", rows, _numbers(self._graph, 0, 0, -1))

    def _turned(self, x: ir.Value) -> ir.Value:
        return self._node("Transpose", x, perm=[0, 1, 3, 2])

    def _part(self, x: ir.Value, begin: int, end: int, axis: int = 2) -> ir.Value:
        ends = (_numbers(self._graph, each) for each in (begin, end, axis))
        return self._node("Slice", x, *ends)

    def _node(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        return self._graph.node(op_type, inputs, **attributes)


def _levels(count: int) -> np.ndarray:
    """Steps that add an entry of the lower triangle, int32 [count, count]; the diagonal is `_OWN`.

    A step joins neighbouring blocks of 2 ** step rows; -2 are entries above the diagonal.
    """
    rows = np.arange(count)
    joined = np.floor(np.log2(np.maximum(rows[:, None] ^ rows, 1))).astype(np.int32)
    found = np.where(rows[:, None] > rows, joined, np.int32(-2))
    np.fill_diagonal(found, _OWN)
    return found


def _numbers(graph: GraphEditor, *values: int) -> ir.Value:
    shown = ".".join(map(str, values))
    return graph.constant(f"numbers.{shown}", np.array(values, np.int64))
