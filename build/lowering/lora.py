"""Linear layers with LoRA adapters at run time: their inputs and added products.

On GPUs a product of weights, of concatenated layers, adds one pair of products: A and B of its
layers and of all adapters are one matrix each, and of what A gives rows keep what is theirs. For
one row a launch takes longer than the zeros that stand in B between layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.function_calls import is_call
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.groups import group_nodes
from edgellm.build.lowering.linears.weights import LinearWeight, layer_name, linear_layers
from edgellm.build.plan import GpuOptions, Plan
from edgellm.core import graph_io, onnx_functions
from edgellm.core.onnx_functions import (
    ROUND_INPUT,
    ROUND_INPUT_FP4,
    SMOOTH_INPUT,
)
from edgellm.device_runtime.adapted_layers import (
    MAX_LORA_RANK,
    MAX_LORAS,
    AdaptedLayer,
    write_layers,
)

_MARK = "AdaptedInput"  # placeholder at the layer's own input until the layer is lowered
_MAX_MERGED = 8  # layers with the same input: no network has more
_IN_A_LAYER = re.compile(r"layers\.\d+\.(?=model\.layers\.\d+\.)")


def write_adapted_layers(portable: Path, engine: Path) -> None:
    """Write the list of layers that adapters may change into the engine's folder."""
    write_layers(engine, [layer for _, layer in adapted_layers(ir.load(portable).graph)])


def adapted_layers(graph: ir.Graph) -> Iterator[tuple[ir.Node, AdaptedLayer]]:
    """The linear layers that compute all tokens of a pass: not the head."""
    for node, weight in linear_layers(graph):
        name, count = _IN_A_LAYER.subn("", layer_name(node))
        if count == 1:
            yield node, AdaptedLayer(name, weight.in_features, sum(weight.widths))


@dataclass(frozen=True, slots=True)
class Mark:
    """A layer that adapters change."""

    place: int  # in the table
    width: int
    node: ir.Node

    @property
    def own_input(self) -> ir.Value:
        """The layer's input before smoothing, rounding or reordering."""
        value = self.node.inputs[0]
        assert value is not None
        return value


class Marks:
    """Inputs of a graph's layers that their adapters read, too."""

    def __init__(self, graph: GraphEditor) -> None:
        """Mark them, before inputs are smoothed or rounded."""
        self._graph, self._marks = graph, dict[str, Mark]()
        for place, (node, layer) in enumerate(list(adapted_layers(graph.graph))):
            graph.cursor = node
            read = [_own_input(node)]
            mark = graph.node(_MARK, read, domain=onnx_functions.FUNCTIONS).producer()
            assert mark is not None
            self._marks[layer_name(node)] = Mark(place, layer.out_features, mark)

    def __len__(self) -> int:
        return len(self._marks)

    def take(self, names: Sequence[str]) -> list[Mark]:
        """Those of layers that become one, once; none where adapters change none of them."""
        found = [self._marks.pop(name) for name in names if name in self._marks]
        assert len(found) in (0, len(names))
        return found

    def drop(self, marks: Sequence[Mark]) -> None:
        """They are not read any more."""
        for mark in marks:
            self._graph.graph.remove(mark.node, safe=True)


def _own_input(layer: ir.Node) -> ir.Value:
    value = layer.inputs[0]
    while value is not None:
        node = value.producer()
        is_order = node is not None and node.op_type == "Gather" and _has_order(node)
        if node is None or not (
            is_order or is_call(node, SMOOTH_INPUT, ROUND_INPUT, ROUND_INPUT_FP4)
        ):
            return value
        value = node.inputs[0]
    raise AssertionError(f"{layer.name} reads nothing")


def _has_order(gather: ir.Node) -> bool:
    index = gather.inputs[1]
    is_last = "axis" in gather.attributes and gather.attributes["axis"].as_int() == -1
    return is_last and index is not None and index.const_value is not None


# ------------------------------------------------------------------------------------ on GPUs
@dataclass(frozen=True, slots=True)
class Places:
    """What an engine for a GPU has room for."""

    count: int  # of adapters
    rank: int  # of each, at most

    @classmethod
    def of(cls, plan: Plan) -> Places | None:
        """None: the engine takes no adapters."""
        options = plan.options if isinstance(plan.options, GpuOptions) else GpuOptions()
        return cls(options.max_loras, plan.max_lora_rank) if plan.max_lora_rank else None

    def columns(self, layers: int) -> int:
        """Number of columns of a product of `layers` layers."""
        return self.count * self.rank * layers

    def ranges(self) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
        """Ranges of varying column counts, in passes without and with adapters."""
        symbols = {at: f"{graph_io.ADAPTER_COLUMNS}{at}" for at in range(1, _MAX_MERGED + 1)}
        all_of_them = {name: (self.columns(at), self.columns(at)) for at, name in symbols.items()}
        return dict.fromkeys(symbols.values(), (1, 1)), all_of_them

    def num_bytes(self, graph: ir.Graph, dtype: ir.DataType) -> int:
        """Approximate bytes of adapters in an engine; fewer products may be merged."""
        nodes = [node for node, _ in adapted_layers(graph)]
        weights = (LinearWeight.of(*nodes) for nodes in group_nodes(nodes, _own_input))
        numbers = sum(
            self.columns(len(weight.parts)) * (weight.in_features + sum(weight.widths))
            for weight in weights
            if weight is not None
        )
        return int(numbers * dtype.itemsize)


def engine_options(plan: Plan) -> dict[str, int]:
    """Options of an engine for a GPU, see `device_runtime.adapted_layers`."""
    places = Places.of(plan)
    return {} if places is None else {MAX_LORA_RANK: places.rank, MAX_LORAS: places.count}


# x [B, S, in] and a matrix [N, in] -> [B, S, N]
Multiply = Callable[[GraphEditor, ir.Value, ir.Value], ir.Value]


class AdapterSums:
    """Adds the products of adapters to those of weights, see `graph_io.adapter_matrix`."""

    def __init__(
        self,
        *,
        graph: GraphEditor,
        marks: Marks,
        places: Places,
        dtype: ir.DataType,
        multiply: Multiply,
        varies: bool = False,
    ) -> None:
        """See the class.

        Args:
            graph: of a decoder, with the engine's shapes.
            marks: of the graph.
            places: of the engine.
            dtype: of activations.
            multiply: by the transpose of a matrix.
            varies: whether the number of columns varies by pass.
        """
        self._graph, self._marks, self._places = graph, marks, places
        self._dtype, self._multiply, self._varies = dtype, multiply, varies
        self._masks: dict[int, ir.Value] = {}

    def __call__(self, nodes: Sequence[ir.Node], y: ir.Value) -> ir.Value:
        """Y [B, S, out] of these layers plus the products of adapters, see `lower_linears`.

        Products with other tokens' adapters are replaced by zeros, not multiplied by them: they may
        be NaN.
        """
        marks = self._marks.take([layer_name(node) for node in nodes])
        if not marks:
            return y
        own, graph, weight = marks[0].own_input, self._graph, LinearWeight.of(*nodes)
        assert weight is not None
        assert all(mark.own_input is own for mark in marks)
        layers, columns = [(mark.place, mark.width) for mark in marks], self._columns(len(marks))
        down, up = (
            graph.input(graph_io.adapter_matrix(part, layers), self._dtype, [columns, width])
            for part, width in (
                (graph_io.ADAPTER_DOWN, weight.in_features),
                (graph_io.ADAPTER_UP, sum(weight.widths)),
            )
        )
        found = self._multiply(graph, own, down)
        zero = graph.constant("adapters.zero", np.zeros((), self._dtype.numpy()))
        kept = graph.node("Where", [self._mask(len(marks)), found, zero])
        self._marks.drop(marks)
        return graph.node("Add", [y, graph.node("MatMul", [kept, up])])

    def _mask(self, layers: int) -> ir.Value:
        """Mask of the columns of a product of `layers` layers."""
        if layers not in self._masks:
            inputs = self._graph.graph.inputs
            ids = next(value for value in inputs if value.name == graph_io.INPUT_IDS)
            shape = [dim if isinstance(dim, int) else str(dim) for dim in ids.shape or ()]
            shape.append(self._columns(layers))
            name = f"{graph_io.ADAPTER_MASK}{layers}"
            self._masks[layers] = self._graph.input(name, ir.DataType.BOOL, shape)
        return self._masks[layers]

    def _columns(self, layers: int) -> int | str:
        assert layers <= _MAX_MERGED
        if self._varies:
            return f"{graph_io.ADAPTER_COLUMNS}{layers}"
        return self._places.columns(layers)
