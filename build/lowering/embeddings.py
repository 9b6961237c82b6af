"""Block-quantized embeddings: rows are dequantized after the lookup, or the whole table is."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.function_calls import ROWS, find_calls, is_call, require_known
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.block_factors import stored_tensor

_WIDENED_AT_ONCE = 1 << 22  # values


def table_of(node: ir.Node) -> ir.Value | None:
    """The table of a lookup, or its codes if block-quantized; None for other nodes."""
    if node.op_type == "Gather":
        return node.inputs[0]
    return node.inputs[1] if is_call(node, *ROWS) else None


def look_up_blocks(graph: GraphEditor) -> None:
    """Look up codes and scales, then dequantize to float32: a pass has few tokens."""
    for call in find_calls(graph.graph, *ROWS):
        require_known(call, "block_size")
        graph.cursor = call
        ids, codes, *factors = call.inputs
        block = call.attributes["block_size"].as_int()
        values = graph.node("Gather", [_table(graph, codes, call), ids], axis=0)
        found = [_looked_up(graph, each, ids, call) for each in factors]
        rows = graph.node("DequantizeLinear", [values, found[0]], axis=-1, block_size=block)
        if len(found) > 1:
            rows = _with_minima(graph, rows, found[1], _shape(codes, call)[1], block)
        graph.replace(call.outputs[0], rows)


def widen_tables(graph: GraphEditor, dtype: ir.DataType) -> None:
    """Dequantize tables to floats of this type; a tied head may share them."""
    for call in find_calls(graph.graph, *ROWS):
        require_known(call, "block_size")
        graph.cursor = call
        ids, codes, *_ = call.inputs
        assert codes is not None
        table = graph.weight(f"{codes.name}.{dtype.name.lower()}", lambda c=call: _dense(c, dtype))
        rows = graph.node("Gather", [table, ids], axis=0)
        for user, _ in tuple(call.outputs[0].uses()):
            if user.op_type == "Cast" and user.attributes["to"].as_int() == int(dtype):
                graph.replace(user.outputs[0], rows)
        graph.replace(call.outputs[0], rows)


def _tensor(value: ir.Value | None, call: ir.Node) -> ir.TensorProtocol:
    assert value is not None
    return stored_tensor(value, call)


def _shape(value: ir.Value | None, call: ir.Node) -> tuple[int, ...]:
    return tuple(_tensor(value, call).shape.numpy())


def _table(graph: GraphEditor, value: ir.Value | None, call: ir.Node) -> ir.Value:
    assert value is not None
    return graph.weight(f"{value.name}.table", _tensor(value, call).numpy)


def _looked_up(
    graph: GraphEditor, value: ir.Value | None, ids: ir.Value | None, call: ir.Node
) -> ir.Value:
    """Scales or minima of some rows, float32 [..., blocks]."""
    rows = graph.node("Gather", [_table(graph, value, call), ids], axis=0)
    if _tensor(value, call).dtype == ir.DataType.FLOAT:
        return rows
    return graph.node("Cast", [rows], to=int(ir.DataType.FLOAT))


def _with_minima(
    graph: GraphEditor, rows: ir.Value, minima: ir.Value, width: int, block: int
) -> ir.Value:
    """Rows [1, S, width] and minima [1, S, width / block]."""
    apart = graph.constant(f"apart.{width}", np.array([0, 0, width // block, block], np.int64))
    whole = graph.constant(f"whole.{width}", np.array([0, 0, width], np.int64))
    last = graph.constant("last_axis", np.array([-1], np.int64))
    grouped = graph.node("Reshape", [rows, apart])
    added = graph.node("Add", [grouped, graph.node("Unsqueeze", [minima, last])])
    return graph.node("Reshape", [added, whole])


def _dense(call: ir.Node, dtype: ir.DataType) -> np.ndarray:
    """The whole table as floats, computed some rows at a time."""
    codes, *factors = (_tensor(value, call).numpy() for value in call.inputs[1:])
    block = call.attributes["block_size"].as_int()
    table = np.empty(codes.shape, dtype.numpy())
    step = max(1, _WIDENED_AT_ONCE // codes.shape[1])
    for begin in range(0, len(codes), step):
        part = slice(begin, begin + step)
        spread = [np.repeat(each[part].astype(np.float32), block, 1) for each in factors]
        rows = codes[part].astype(np.float32) * spread[0]
        table[part] = rows + spread[1] if len(spread) > 1 else rows
    return table
