"""Merges linear layers with the same input."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.weights import LinearWeight, layer_name, linear_layers
from edgellm.build.lowering.weights import constant_array


class LinearKernel(Protocol):
    """A way to compute linear layers."""

    def emit(self, graph: GraphEditor, x: ir.Value, weight: LinearWeight, name: str) -> ir.Value:
        """Nodes for x [..., in] -> [..., out]; weights are named after `name`."""
        ...


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rounding of a kernel to int8."""

    input_block: int = 0  # inputs of a row that share a scale; 0: not rounded
    weights: bool = False  # error at most that of one scale for each output


class RoundingKernel(LinearKernel, Protocol):
    """A kernel with known rounding."""

    def rounding(self, weight: LinearWeight, name: str) -> Rounding:
        """Rounding of a layer of this name."""
        ...


# Splits y [..., sum of widths]; the name is that of the layer.
Split = Callable[[GraphEditor, ir.Value, list[int], str], Sequence[ir.Value]]


def split_columns(
    graph: GraphEditor, y: ir.Value, widths: list[int], name: str
) -> Sequence[ir.Value]:
    """One Split."""
    sizes = graph.constant(f"{name}.sizes", np.array(widths, np.int64))
    return graph.nodes("Split", [y, sizes], len(widths), axis=-1)


def _stored_alike(weight: LinearWeight) -> Hashable:
    return weight.key, weight.packing


# Returns y [1, S, sum of widths] of these layers plus an addition, before their biases
Adapt = Callable[[Sequence[ir.Node], ir.Value], ir.Value]


def _as_it_is(nodes: Sequence[ir.Node], y: ir.Value) -> ir.Value:
    del nodes
    return y


def _read_by(layer: ir.Node) -> ir.Value:
    assert layer.inputs[0] is not None
    return layer.inputs[0]


def group_nodes(
    layers: Iterable[ir.Node],
    read_by: Callable[[ir.Node], ir.Value] = _read_by,
    key: Callable[[LinearWeight], Hashable] = _stored_alike,
) -> list[list[ir.Node]]:
    """Linear layers that can be merged: the same input, weights with equal keys."""
    groups: dict[tuple[ir.Value, Hashable], list[ir.Node]] = {}
    for node in layers:
        weight = LinearWeight.of(node)
        assert weight is not None
        groups.setdefault((read_by(node), key(weight)), []).append(node)
    return [*groups.values()]


def lower_linears(
    graph: GraphEditor,
    kernel: LinearKernel,
    *,
    key: Callable[[LinearWeight], Hashable] = _stored_alike,
    split: Split = split_columns,
    adapt: Adapt = _as_it_is,
) -> None:
    """Lower all linear layers to `kernel`; layers with the same input are merged.

    Args:
        graph: rewritten in place.
        kernel: computes them.
        key: of weights that can be merged.
        split: splits merged outputs.
        adapt: adds the products of adapters.
    """
    layers = [node for node, _ in linear_layers(graph.graph)]
    for nodes in group_nodes(layers, key=key):
        _emit_group(graph, kernel, split, adapt, nodes)


def _emit_group(
    graph: GraphEditor, kernel: LinearKernel, split: Split, adapt: Adapt, nodes: list[ir.Node]
) -> None:
    """Replace layers with the same input (and their biases) by one."""
    x = nodes[0].inputs[0]  # read now: lowering of another linear layer may have replaced it
    assert x is not None
    weight = LinearWeight.of(*nodes)
    assert weight is not None
    biases = [_bias_of(node) for node in nodes]
    if len({bias is None for bias in biases}) > 1:
        for node in nodes:
            _emit_group(graph, kernel, split, adapt, [node])
        return
    graph.cursor = nodes[0]
    name = "+".join(layer_name(node) for node in nodes)
    y = adapt(nodes, kernel.emit(graph, x, weight, name))
    olds = [node.outputs[0] for node in nodes]
    if biases[0] is not None:
        arrays = [bias[1] for bias in biases if bias is not None]
        y = graph.node("Add", [y, graph.weight(f"{name}.biases", lambda: np.concatenate(arrays))])
        olds = [bias[0].outputs[0] for bias in biases if bias is not None]
    news = split(graph, y, weight.widths, name) if len(nodes) > 1 else [y]
    for old, new in zip(olds, news, strict=True):
        graph.replace(old, new)


def _bias_of(node: ir.Node) -> tuple[ir.Node, np.ndarray] | None:
    """The Add that follows a layer with a constant, and the constant."""
    uses = tuple(node.outputs[0].uses())
    if len(uses) != 1 or uses[0].node.op_type != "Add":
        return None
    other = uses[0].node.inputs[1 - uses[0].idx]
    array = constant_array(other) if other is not None else None
    return None if array is None else (uses[0].node, array)
