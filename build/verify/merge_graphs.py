"""Merges two versions of a graph into one that reads each weight once, for the rows of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx

SECOND = ".second"  # suffix of the second graph's own values
_PRODUCTS = ("MatMul", "FusedMatMul")


@dataclass(slots=True)
class _Stretch:
    """Nodes up to a product by a stored weight, and that product; after the last one none."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    product: onnx.NodeProto | None = None
    weight: Any = None  # the product's weight and layout


def together(first: onnx.ModelProto, second: onnx.ModelProto) -> onnx.ModelProto | None:
    """Both graphs in one; None if their inputs or products differ.

    Args:
        first: inlined.
        second: the same with other nodes between its products; the rows of a product are as many.
    """
    if [*map(_typed, first.graph.input)] != [*map(_typed, second.graph.input)]:
        return None
    theirs = _renamed(second, first)
    parts = _stretches(first), _stretches(theirs)
    if [each.weight for each in parts[0]] != [each.weight for each in parts[1]]:
        return None
    nodes: list[onnx.NodeProto] = []
    keys: dict[str, Any] = {**_keys(first), **_keys(theirs)}
    same: dict[str, str] = {}
    for ours, others in zip(*parts, strict=True):
        decoded: dict[Any, str] = {}  # names of decoded weights, by their sources
        for node in ours.nodes:
            if (key := _decoding(node, keys)) is not None:
                keys[node.output[0]] = decoded.setdefault(key, node.output[0])
            nodes.append(node)
        for node in others.nodes:
            node.input[:] = [same.get(name, name) for name in node.input]
            key = _decoding(node, keys)
            if key in decoded:
                same[node.output[0]] = decoded[key]
            else:
                nodes.append(node)
        if ours.product is not None and others.product is not None:
            nodes += _product(ours.product, others.product)
    ids = {each.name for each in first.graph.initializer}
    graph = onnx.GraphProto(
        name="together",
        node=nodes,
        input=first.graph.input,
        output=[*first.graph.output, *theirs.graph.output],
        initializer=[
            *first.graph.initializer,
            *(each for each in theirs.graph.initializer if each.name not in ids),
        ],
    )
    domains = {each.domain: each for each in (*second.opset_import, *first.opset_import)}
    return onnx.ModelProto(
        ir_version=first.ir_version,
        opset_import=domains.values(),
        graph=graph,
        functions=first.functions,
    )


def _typed(value: onnx.ValueInfoProto) -> tuple[str, int]:
    return value.name, value.type.tensor_type.elem_type


def _stored(model: onnx.ModelProto) -> dict[str, bytes]:
    """Locations of external weights, by name."""
    return {
        each.name: b"".join(entry.SerializeToString() for entry in each.external_data)
        for each in model.graph.initializer
        if each.external_data
    }


def _renamed(model: onnx.ModelProto, other: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with renamed values, except for shared inputs and weights."""
    ours = _stored(other)
    shared = {value.name for value in model.graph.input}
    shared |= {name for name, place in _stored(model).items() if ours.get(name) == place}
    copy = onnx.ModelProto()
    copy.CopyFrom(model)

    def names(given: Iterable[str]) -> list[str]:
        return [name if not name or name in shared else name + SECOND for name in given]

    for node in copy.graph.node:
        node.name += SECOND
        node.input[:], node.output[:] = names(node.input), names(node.output)
    for value in (*copy.graph.initializer, *copy.graph.output):
        (value.name,) = names([value.name])
    return copy


def _keys(model: onnx.ModelProto) -> dict[str, Any]:
    """Keys of initializers: names of external ones, contents of the others."""
    found: dict[str, Any] = {}
    for each in model.graph.initializer:
        content = onnx.TensorProto()
        content.CopyFrom(each)
        content.name = ""
        found[each.name] = each.name if each.external_data else content.SerializeToString()
    return found


def _stretches(model: onnx.ModelProto) -> list[_Stretch]:
    keys, stored = _keys(model), {*_stored(model)}  # and what is made of these
    found = [_Stretch()]
    for node in model.graph.node:
        key = _decoding(node, keys)
        if key is not None:
            keys[node.output[0]] = key
            stored |= {*node.output} if stored.intersection(node.input) else set()
        if node.op_type not in _PRODUCTS or node.input[1] not in stored:
            found[-1].nodes.append(node)
            continue
        found[-1].product, found[-1].weight = node, (node.op_type, keys[node.input[1]])
        found.append(_Stretch())
    return found


def _decoding(node: onnx.NodeProto, keys: Mapping[str, Any]) -> Any:
    """Key of a node that computes from initializers alone; None for other nodes."""
    if len(node.output) != 1 or not all(name in keys for name in node.input):
        return None
    how = tuple(each.SerializeToString() for each in node.attribute)
    return (node.op_type, how, *(keys[name] for name in node.input))


def _product(first: onnx.NodeProto, second: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Both products as one, rows one after the other."""
    make, name = onnx.helper.make_node, f"{first.output[0]}.both"
    product = onnx.NodeProto()
    product.CopyFrom(first)
    product.input[0], product.output[0] = f"{name}.x", name
    return [
        make("Concat", [first.input[0], second.input[0]], [f"{name}.x"], axis=-2),
        product,
        make("Split", [name], [first.output[0], second.output[0]], axis=-2, num_outputs=2),
    ]
