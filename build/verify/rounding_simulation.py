"""Simulates an engine's rounding, or a coarser one, in a portable graph with plain ONNX."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.groups import Rounding, RoundingKernel
from edgellm.build.lowering.linears.weights import LinearWeight
from edgellm.build.verify.streamed_eval import CUT
from edgellm.core import graph_io
from edgellm.core.model_spec import BFLOAT16, INT4, KVCacheSpec

# Nodes that decode a weight; Gather looks up codes in a table of values.
_DECODING = (
    "Cast", "CastLike", "Transpose", "DequantizeLinear", "Reshape", "Mul", "Add", "Concat",
    "Unsqueeze", "Gather", "BitwiseAnd", "BitwiseOr", "BitShift", "Sub",
)  # fmt: skip
_HALVES = {
    "float16": ir.DataType.FLOAT16,
    INT4: ir.DataType.FLOAT16,  # of the last rows
    BFLOAT16: ir.DataType.BFLOAT16,
}
_CODES = {"Gather": 1}  # index of the codes' input if it is not the first
_SHIFTS = 1024  # layers share one error table, shifted by up to this many columns


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounding of an engine, compared with float32."""

    kernels: tuple[RoundingKernel, ...] = ()  # of its graphs' linear layers
    halves: bool = False  # activations are float16
    # Block size of an embedding in int8, by the Gather that looks it up; 0: it is not rounded.
    table_block: Callable[[ir.Node], int] = lambda _: 0

    def of(self, weight: LinearWeight, name: str) -> Rounding:
        """The coarsest rounding of all its graphs; blocks longer than a row become the row."""
        found = [kernel.rounding(weight, name) for kernel in self.kernels]
        block = max((each.input_block for each in found), default=0)
        fits = not block or weight.in_features % block == 0
        return Rounding(block if fits else weight.in_features, any(each.weights for each in found))


def round_layers(
    graph: GraphEditor, layers: Mapping[str, tuple[int, Rounding]], rows: int, *, halves: bool
) -> None:
    """Simulate an engine's int8 linear layers in an inlined graph.

    Args:
        graph: modified in place.
        layers: output features and rounding by the names of weights or codes.
        rows: of a pass; 1 if that varies.
        halves: activations are float16, else float32.
    """
    maximum = max((each[0] for each in layers.values()), default=0)
    errors = _Errors(graph=graph, max_outputs=maximum, rows=rows, halves=halves)
    rounded: dict[tuple[ir.Value, int], ir.Value] = {}
    for node in graph.find("MatMul", "FusedMatMul"):
        x, weight = node.inputs
        parameter = _parameter(weight)
        if x is None or weight is None or parameter is None or parameter not in layers:
            continue
        (width, rounding), graph.cursor = layers[parameter], node
        if block := rounding.input_block:
            x = _rounded_once(graph, rounded, x, block, halves=halves)
            node.replace_input_with(0, x)
        if rounding.weights:
            by_output = {"transB": 1} if node.op_type == "FusedMatMul" else {}
            y = graph.node(node.op_type, [x, weight], domain=node.domain, **by_output)
            error = errors.of(x, weight, width, by_output=bool(by_output))
            graph.replace(node.outputs[0], graph.node("Add", [y, error]))
            graph.graph.remove(node, safe=True)


def round_tables(graph: GraphEditor, blocks: Mapping[str, int]) -> None:
    """Round embeddings to int8 after they are looked up, as the engine's tables are.

    Args:
        graph: is changed.
        blocks: block sizes by the names of tables; 0: not rounded.
    """
    nodes = tuple(graph.graph)
    for node, following in itertools.pairwise(nodes):
        if node.op_type != "Gather" or node.inputs[0] is None:
            continue
        if block := blocks.get(str(node.inputs[0].name), 0):
            rows, graph.cursor = node.outputs[0], following
            uses = tuple(rows.uses())
            rounded = _rounded(graph, rows, block, halves=True)
            for user, place in uses:
                user.replace_input_with(place, rounded)


def _rounded_once(
    graph: GraphEditor,
    known: dict[tuple[ir.Value, int], ir.Value],
    x: ir.Value,
    block: int,
    *,
    halves: bool,
) -> ir.Value:
    """Round an input once: `known` has rounded inputs; for a slice, the whole is rounded."""
    if (x, block) in known:
        return known[x, block]
    cut = x.producer()
    if cut is not None and cut.inputs[0] is not None and str(x.name).startswith(CUT):
        whole = _rounded_once(graph, known, cut.inputs[0], block, halves=halves)
        known[x, block] = graph.node("Slice", [whole, *cut.inputs[1:]])
    else:
        known[x, block] = _rounded(graph, x, block, halves=halves)
    return known[x, block]


def _parameter(value: ir.Value | None) -> str | None:
    """The name of a product's weight, or of its codes."""
    node = value.producer() if value is not None else None
    if value is None or node is None:
        return str(value.name) if value is not None and value.const_value is not None else None
    if node.op_type not in _DECODING:
        return None
    return _parameter(node.inputs[_CODES.get(node.op_type, 0)])


def _rounded(graph: GraphEditor, x: ir.Value, block: int, *, halves: bool) -> ir.Value:
    """X [..., in] rounded to symmetric int8 with a scale for each block of a row, as floats."""
    floats = graph.node("Cast", [x], to=int(ir.DataType.FLOAT)) if halves else x
    folded = graph.node("Reshape", [floats, _integers(graph, -1, block)])
    largest = graph.node(
        "ReduceMax", [graph.node("Abs", [folded]), _integers(graph, -1)], keepdims=1
    )
    tiny, steps = (
        graph.constant(name, np.float32(number)) for name, number in (("tiny", 1e-20), ("127", 127))
    )
    scale = graph.node("Div", [graph.node("Max", [largest, tiny]), steps])
    codes = graph.node("Round", [graph.node("Div", [folded, scale])])
    back = graph.node("Reshape", [graph.node("Mul", [codes, scale]), graph.node("Shape", [x])])
    return graph.node("CastLike", [back, x]) if halves else back


class _Errors:
    """Random errors of x W from rounding weights to int8, with a scale for each output.

    Rounding errors are uniform over a step and independent; their sum over a row is normal with
    variance |x|^2 step^2 / 12. Finding the steps takes two passes over a weight, rounding five.
    """

    def __init__(self, *, graph: GraphEditor, max_outputs: int, rows: int, halves: bool) -> None:
        self._graph, self._halves, self._random = graph, halves, np.random.default_rng(5)
        self._shape = rows, max_outputs + _SHIFTS
        self._table: NDArray[np.float32] | None = None
        self._lengths: dict[ir.Value, ir.Value] = {}

    def of(self, x: ir.Value, weight: ir.Value, outputs: int, *, by_output: bool) -> ir.Value:
        """Errors of a layer, in the type of x [..., rows, in]: [..., rows, outputs].

        The weight is [in, out], that of all experts [E, in, out], or [out, in] `by_output`.
        """
        graph = self._graph
        if x not in self._lengths:
            last = _integers(graph, -1)
            self._lengths[x] = graph.node("ReduceL2", [self._floats(x), last], keepdims=1)
        largest = self._floats(self._largest(weight, by_output=by_output))
        errors = graph.node(
            "Mul", [graph.node("Mul", [self._lengths[x], largest]), self._normal(outputs)]
        )
        return graph.node("CastLike", [errors, x]) if self._halves else errors

    def _largest(self, weight: ir.Value, *, by_output: bool) -> ir.Value:
        """Maximum magnitude of an output's weights [..., 1, outputs] or [outputs].

        For INT4 codes it is the maximum that their scales allow.
        """
        graph, first, stored = self._graph, _integers(self._graph, -2), weight.producer()
        if stored is not None and stored.op_type == "CastLike" and stored.inputs[0] is not None:
            stored = stored.inputs[0].producer()
        if stored is not None and stored.op_type == "DequantizeLinear" and len(stored.inputs) == 2:
            codes, scales = stored.inputs
            is_blocked = scales is not None and scales.shape is not None and len(scales.shape) > 1
            if codes is not None and codes.dtype == ir.DataType.INT4 and is_blocked:
                inputs = _integers(graph, 1) if by_output else first
                largest = graph.node("ReduceMax", [scales, inputs], keepdims=int(not by_output))
                scale = self._floats(largest)
                return graph.node("Mul", [scale, graph.constant("eight", np.float32(8))])
        inputs = _integers(graph, 1) if by_output else first
        maximum, least = (
            graph.node(f"Reduce{which}", [weight, inputs], keepdims=int(not by_output))
            for which in ("Max", "Min")
        )
        return graph.node("Max", [maximum, graph.node("Neg", [least])])

    def _normal(self, outputs: int) -> ir.Value:
        """Another slice of one table of normal numbers for each layer, [rows, outputs]."""
        if self._table is None:
            of_a_step = np.float32(1 / (127 * math.sqrt(12)))
            self._table = self._random.standard_normal(self._shape, np.float32) * of_a_step
        begin = int(self._random.integers(0, _SHIFTS))
        bounds = (_integers(self._graph, at) for at in (begin, begin + outputs, 1))
        return self._graph.node("Slice", [self._graph.constant("normal", self._table), *bounds])

    def _floats(self, value: ir.Value) -> ir.Value:
        to = int(ir.DataType.FLOAT)
        return self._graph.node("Cast", [value], to=to) if self._halves else value


def _integers(graph: GraphEditor, *numbers: int) -> ir.Value:
    return graph.constant(f"integers.{numbers}", np.array(numbers, np.int64))


def narrows(cache: KVCacheSpec | None, engine: Rounds) -> bool:
    """Whether the KV cache has a lower precision than the engine computes in."""
    if cache is None:
        return False
    if cache.dtype in ("float16", INT4):
        return not engine.halves
    return cache.dtype in ("int8", BFLOAT16)


def round_cached_rows(graph: GraphEditor, cache: KVCacheSpec) -> None:
    """Round keys and values before they are cached; those of int8 have a scale each.

    Rows of a check are fewer than INT4_RECENT, which a cache of 4 bits has in float16.
    """
    for node in graph.find("TensorScatter"):
        if node.inputs[0] is None:
            continue
        graph.cursor = node
        rows = graph.node("Cast", [node.inputs[1]], to=int(ir.DataType.FLOAT))
        if cache.dtype in _HALVES:
            held = graph.node("Cast", [rows], to=int(_HALVES[cache.dtype]))
        else:
            held = _in_steps(graph, rows, str(node.inputs[0].name), cache)
        node.replace_input_with(1, graph.node("CastLike", [held, node.inputs[0]]))


def _in_steps(graph: GraphEditor, rows: ir.Value, name: str, cache: KVCacheSpec) -> ir.Value:
    assert cache.ranges is not None
    largest = {
        graph_io.past_name(layer, part): pair
        for part, ranges in (("key", cache.ranges.keys), ("value", cache.ranges.values))
        for layer, pair in enumerate(ranges)
    }[name]
    scale = graph.constant(f"{name}.scale", np.array(largest / 127, np.float32))
    zero = graph.constant("zero_code", np.int8(0))
    codes = graph.node("QuantizeLinear", [rows, scale, zero])
    return graph.node("DequantizeLinear", [codes, scale, zero])
