"""Linear layers that LoRA adapters change while an engine runs: what they add is an input."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from edgellm import contract
from edgellm.build.lowering.calls import is_call
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linear_weights import layer_name, linear_layers
from edgellm.contract import ROUND_INPUT, ROUND_INPUT_FP4, SMOOTH_INPUT
from edgellm.device_runtime.adapted_layers import AdaptedLayer, write_layers
from edgellm.device_runtime.kernels.library import DOMAIN
from edgellm.device_runtime.kernels.pack import STRIP

_LOW_RANK = "LowRank"  # behind products that are ONNX Runtime's
_ROWS, _OWN = 6, 10  # places of QuantLinear's inputs: the first of adapters', and what these read
_MARK = "AdaptedInput"  # stands where a layer's own input is read, until the layer is lowered
_IN_A_LAYER = re.compile(r"layers\.\d+\.(?=model\.layers\.\d+\.)")


@dataclass(frozen=True, slots=True)
class _Mark:
    place: int  # of the layer in the table
    width: int
    node: ir.Node


def write_adapted_layers(portable: Path, engine: Path) -> None:
    """Write what adapters of an engine of this decoder may change into its folder."""
    write_layers(engine, [layer for _, layer in _layers(ir.load(portable).graph)])


def _layers(graph: ir.Graph) -> Iterator[tuple[ir.Node, AdaptedLayer]]:
    """The linear layers whose rows are those of a pass: not the head."""
    for node, weight in linear_layers(graph):
        name, count = _IN_A_LAYER.subn("", layer_name(node))
        if count == 1:
            yield node, AdaptedLayer(name, weight.in_features, sum(weight.widths))


class Marks:
    """Where the layers of a graph read what their adapters read, too."""

    def __init__(self, graph: GraphEditor) -> None:
        """Mark them, before inputs are smoothed or rounded."""
        self._graph, self._marks = graph, dict[str, _Mark]()
        for place, (node, layer) in enumerate(list(_layers(graph.graph))):
            graph.cursor = node
            mark = graph.node(_MARK, [_own_input(node)], domain=DOMAIN).producer()
            assert mark is not None
            self._marks[layer_name(node)] = _Mark(place, layer.out_features, mark)

    def attach(self, products: Sequence[ir.Node], gated: Sequence[ir.Node]) -> None:
        """Let products of weights add what adapters do; `gated` are those of gates and ups."""
        inputs = _inputs(self._graph.graph, len(self._marks))
        for node in products:
            names = _names(node)
            if marks := [self._marks.pop(name) for name in names if name in self._marks]:
                assert len(marks) == len(names)
                self._attach(node, marks, inputs, is_gated=node in gated)
        assert not self._marks

    def _attach(
        self,
        product: ir.Node,
        marks: Sequence[_Mark],
        inputs: Mapping[str, ir.Value],
        *,
        is_gated: bool,
    ) -> None:
        graph = self._graph
        widths = [mark.width for mark in marks]
        begins = [0, STRIP] if is_gated else np.cumsum([0, *widths[:-1]]).tolist()
        places = [
            (mark.place, mark.width, begin) for mark, begin in zip(marks, begins, strict=True)
        ]
        own = marks[0].node.inputs[0]
        given = [
            inputs[contract.ADAPTER_ROWS],
            graph.constant(f"adapted.{marks[0].place}", np.array(places, np.int64)),
            inputs[contract.ADAPTER_WEIGHTS],
            inputs[contract.ADAPTER_TABLE],
        ]
        if product.op_type == "MatMul":
            y = product.outputs[0]
            users = tuple(y.uses())
            graph.cursor = _behind(graph.graph, product)
            found = graph.node(_LOW_RANK, [own, y, *given], domain=DOMAIN)
            for user, index in users:
                user.replace_input_with(index, found)
        else:
            others = [] if own is product.inputs[0] else [own]
            product.resize_inputs(_OWN + len(others))
            for place, value in enumerate([*given, *others], _ROWS):
                product.replace_input_with(place, value)
        for mark in marks:
            graph.graph.remove(mark.node, safe=True)


def _own_input(layer: ir.Node) -> ir.Value:
    """What a layer reads before it is smoothed, rounded or put in another order."""
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


def _names(product: ir.Node) -> list[str]:
    """The layers whose weights, side by side, a product has."""
    weight = product.inputs[1]
    return str(weight.name).rpartition(".")[0].split("+") if weight is not None else []


def _behind(graph: ir.Graph, node: ir.Node) -> ir.Node:
    nodes = list(graph)
    return nodes[nodes.index(node) + 1]


def _inputs(graph: ir.Graph, layers: int) -> dict[str, ir.Value]:
    """The graph's new inputs."""
    ids = next(value for value in graph.inputs if value.name == contract.INPUT_IDS)
    assert ids.shape is not None
    for name, dtype, shape in (
        (contract.ADAPTER_WEIGHTS, ir.DataType.FLOAT, ["adapter_values"]),
        (contract.ADAPTER_TABLE, ir.DataType.INT64, ["adapters", layers, 3]),
        (contract.ADAPTER_ROWS, ir.DataType.INT64, [ids.shape[1]]),
    ):
        graph.inputs.append(ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype)))
    return {str(value.name): value for value in graph.inputs[-3:]}
