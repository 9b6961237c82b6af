"""Checks the nodes of a graph against the operator table of a TensorRT version."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir
from onnx_ir.passes import common

from edgellm.build.tensorrt.lowering.op_table import (
    Rule,
    Version,
    first_version,
    highest_opset,
    rules,
)

_INFERENCE_OPSET = 24
_LARGEST_KEPT_BYTES = 4096  # of integers that shapes may depend on


def check_graph(model: ir.Model, version: Version, *, ahead_of_time: bool = False) -> list[str]:
    """Reasons why a TensorRT version rejects a graph; [] if it does not.

    Args:
        model: lowered. Types and ranks of values are inferred, where they are missing, in a copy.
        version: major and minor, see `op_table.rules`.
        ahead_of_time: see there.

    Returns:
        One line for each unsupported node, and for the opset.
    """
    found = []
    opset, highest = model.opset_imports[""], highest_opset(version)
    if opset > highest:
        found.append(f"opset {opset}, {highest} is the highest")
    known = rules(version, ahead_of_time=ahead_of_time)
    for node in infer_types(model).graph:
        found += [f"{name_of(node)} {node.name}: {fault}" for fault in _faults(node, known)]
    return found


def infer_types(model: ir.Model) -> ir.Model:
    """A copy of a model without its weights' data, in which values have types and shapes."""
    copy = model.clone()
    for name, value in list(copy.graph.initializers.items()):
        tensor = value.const_value
        if tensor is None:
            continue
        if tensor.nbytes <= _LARGEST_KEPT_BYTES and tensor.dtype == ir.DataType.INT64:
            value.const_value = ir.tensor(tensor.numpy())  # of a file it would not be read
        else:
            value.const_value = None
            copy.graph.inputs.append(value)
            del copy.graph.initializers[name]
    # An older opset, declared for an older TensorRT, may lack types of the graph.
    copy.opset_imports[""] = max(copy.opset_imports[""], _INFERENCE_OPSET)
    common.ShapeInferencePass()(copy)
    return copy


def name_of(node: ir.Node) -> str:
    """Name of a node's operator in the table."""
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def _faults(node: ir.Node, known: dict[str, Rule]) -> Iterator[str]:
    name = name_of(node)
    rule = known.get(name)
    if rule is None:
        since = first_version(name)
        yield f"TensorRT {since[0]}.{since[1]} is the first with it" if since else "is not known"
        return
    for index in rule.checked:
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is None:
            continue
        if value.dtype is None:
            yield f"input {index} has no type"
        elif value.dtype not in rule.dtypes:
            yield f"input {index} is {value.dtype.name}"
    first = node.inputs[0] if node.inputs else None
    if first is not None and first.shape is not None and first.shape.rank() not in rule.ranks:
        yield f"input 0 has {first.shape.rank()} dimensions"
    yield from _constants(node, rule)
    yield from _blocks(node, rule)
    for key, allowed in rule.attributes.items():
        attribute = node.attributes.get(key)
        if attribute is not None and attribute.value not in allowed:
            yield f"{key} is {attribute.value}"


def _blocks(node: ir.Node, rule: Rule) -> Iterator[str]:
    codes, size = node.inputs[0] if node.inputs else None, node.attributes.get_int("block_size", 0)
    if not rule.blocked or codes is None or codes.dtype is None:
        return
    sizes = rule.blocked.get(codes.dtype)
    if size and sizes is None:
        yield f"{codes.dtype.name} has scales of blocks"
    elif codes.dtype == ir.DataType.INT4 and not size:
        yield "INT4 has no scales of blocks"
    elif size and sizes and size not in sizes:
        yield f"{codes.dtype.name} has blocks of {size}"


def _constants(node: ir.Node, rule: Rule) -> Iterator[str]:
    for index in rule.initializers:
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is not None and value.producer() is not None:
            yield f"input {index} is computed"
    if rule.max_candidates:
        count = node.inputs[1]
        tensor = count.const_value if count is not None else None
        if tensor is None:
            yield "input 1 is computed"
        elif (asked := int(tensor.numpy().max())) >= rule.max_candidates:
            yield f"{asked} candidates, fewer than {rule.max_candidates} can be"
