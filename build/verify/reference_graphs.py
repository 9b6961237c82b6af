"""Converts a portable graph to plain ONNX: exact, and with an engine's rounding."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from edgellm.build.lowering.experts import all_weights, expand_rounded
from edgellm.build.lowering.function_calls import find_calls, inline
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.groups import Rounding
from edgellm.build.lowering.linears.rounded_inputs import lower_inputs
from edgellm.build.verify.rounding_simulation import (
    Rounds,
    narrows,
    round_cached_rows,
    round_layers,
    round_tables,
)
from edgellm.build.verify.streamed_eval import CONTRIB, read_as_stored, slice_layers
from edgellm.core import graph_io, onnx_functions
from edgellm.core.manifest import Bundle
from edgellm.core.model_spec import KVCacheSpec

_CASTS = ("Cast", "CastLike")


def plain_versions(
    model: ir.Model,
    bundle: Bundle,
    cache: KVCacheSpec | None,
    engine: Rounds,
    rows: int,
    *,
    rounds: bool,
) -> list[ir.Model]:
    """The graph in float32, and a second version with the engine's rounding.

    Args:
        model: a portable graph; modified in place.
        bundle: that it is of.
        cache: of the engine's graph, if it has one.
        engine: its rounding; with halves the second version computes in float16.
        rows: of all passes together.
        rounds: False: only the first version is made.
    """
    rounds_cache = narrows(cache, engine)
    tables = {
        str(node.inputs[0].name): engine.table_block(node)
        for node in model.graph
        if node.op_type == "Gather" and node.inputs[0] is not None
    }
    graph, layers = _opened(model, engine, closed=() if rounds_cache else _closed(model))
    is_half = bundle.dtype == "float16" and engine.halves
    second = graph.copy_of(model) if rounds and is_half else None
    if bundle.dtype == "float16":
        _in_float32(graph, model)
    read_as_stored(graph)
    if rounds and not is_half:
        second = graph.copy_of(model)
    versions = [_finished(model)]
    if second is not None:
        copy, graph = second
        if cache is not None and rounds_cache:
            round_cached_rows(graph, cache)
        if engine.kernels:
            round_layers(graph, layers, rows, halves=is_half)
        round_tables(graph, tables)
        versions.append(_finished(copy))
    return versions


def _opened(
    model: ir.Model, engine: Rounds, closed: tuple[str, ...]
) -> tuple[GraphEditor, dict[str, tuple[int, Rounding]]]:
    """Inline all calls but those of `closed`; returns outputs and rounding by names of weights."""
    graph = GraphEditor(model.graph)
    lower_inputs(graph)
    layers = {
        weight.parts[0].parameter: (sum(weight.widths), engine.of(weight, name))
        for name, weight in all_weights(model.graph)
    }
    for part, (whole, outputs) in slice_layers(graph).items():
        if whole in layers:
            layers[part] = outputs or layers[whole][0], layers[whole][1]
    defined = {name for _, name, _ in model.functions}
    for call in find_calls(model.graph, onnx_functions.QUANTIZED_LINEAR):
        if onnx_functions.QUANTIZED_LINEAR not in defined:  # the build rounded it
            _expand_rounded(graph, call)
    if onnx_functions.QUANTIZED_EXPERTS not in defined:
        expand_rounded(graph)
    inline(model, keep=closed)
    return graph, layers


def _closed(model: ir.Model) -> tuple[str, ...]:
    """Attention functions without nested calls: ONNX Runtime inlines these faster."""
    names = (
        onnx_functions.ATTENTION,
        onnx_functions.UNROTATED_ATTENTION,
        onnx_functions.SINK_ATTENTION,
    )
    functions = [each for each in model.functions.values() if each.name in names]
    return tuple(each.name for each in functions if not any(node.domain for node in each))


def _finished(model: ir.Model) -> ir.Model:
    model.graph.opset_imports.setdefault(CONTRIB, 1)
    model.graph.outputs[:] = [
        value for value in model.graph.outputs if not str(value.name).startswith(graph_io.PRESENT)
    ]
    RemoveUnusedNodesPass()(model)
    return model


def _expand_rounded(graph: GraphEditor, call: ir.Node) -> None:
    x, *stored = call.inputs
    graph.cursor = call
    block = call.attributes["block_size"].as_int()
    weight = graph.node("DequantizeLinear", stored, axis=0, block_size=block)
    y = graph.node("MatMul", [x, graph.node("CastLike", [weight, x])])
    graph.replace(call.outputs[0], y)


def _in_float32(graph: GraphEditor, model: ir.Model) -> None:
    """Convert float16 to float32 in place; tables stay, and values looked up in them are cast."""
    half, float32 = ir.DataType.FLOAT16, ir.TensorType(ir.DataType.FLOAT)
    for value in (*graph.graph.inputs, *graph.graph.outputs):
        if value.dtype == half:
            value.type = float32
    cast: dict[ir.Value, ir.Value] = {}

    def as_float32(value: ir.Value) -> ir.Value:
        if value not in cast:
            cast[value] = graph.node("Cast", [value], to=int(ir.DataType.FLOAT))
        return cast[value]

    for node in (each for function in model.functions.values() for each in function):
        _widen(node)
    nodes = tuple(graph.graph)
    for node, following in zip(nodes, (*nodes[1:], None), strict=True):
        graph.cursor = node
        for output in node.outputs:
            if not output.is_graph_output():
                output.type = None
        _widen(node)
        for index, value in enumerate(node.inputs if node.op_type not in _CASTS else ()):
            tensor = value.const_value if value is not None else None
            if value is None or tensor is None or tensor.dtype != half:
                continue
            if node.op_type != "Gather":
                node.replace_input_with(index, as_float32(value))
                continue
            uses = tuple(node.outputs[0].uses())
            graph.cursor = following or node  # before all uses, in any order
            looked_up = as_float32(node.outputs[0])
            for user, place in uses:
                user.replace_input_with(place, looked_up)


def _widen(node: ir.Node) -> None:
    """Make a node with a float16 output attribute output float32."""
    constant = node.attributes.get("value")
    if node.op_type == "Cast" and node.attributes["to"].as_int() == int(ir.DataType.FLOAT16):
        node.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.FLOAT))
    elif constant is not None and constant.as_tensor().dtype == ir.DataType.FLOAT16:
        widened = ir.tensor(constant.as_tensor().numpy().astype(np.float32))
        node.attributes["value"] = ir.AttrTensor("value", widened)
