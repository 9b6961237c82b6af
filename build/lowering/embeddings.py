"""Block-quantized embeddings: rows are dequantized after the lookup, or the whole table is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.function_calls import ROWS, find_calls, is_call, require_known
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.block_factors import Factors, Joined, stored_tensor
from edgellm.core.onnx_functions import FUNCTIONS_OF_ROWS

_WIDENED_AT_ONCE = 1 << 22  # values
_SMALLEST_TABLE = 1 << 20  # bytes of one that is mapped by rows
_LOOKUPS = ("Gather", 0), ("LookUp", 1)  # operators and their inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """A block-quantized embedding and its lookup.

    Attributes:
        call: the lookup.
        name: of the codes or their first plane.
        codes: int8 or uint8 [rows, in].
        factors: scales, and minima if any, [rows, blocks] each.
        block_size: inputs that share a scale.
    """

    call: ir.Node
    name: str
    codes: ir.TensorProtocol
    factors: tuple[ir.TensorProtocol, ...]
    block_size: int

    @classmethod
    def of(cls, call: ir.Node) -> BlockTable | None:
        """The table of a lookup; None for other nodes."""
        if not is_call(call, *ROWS):
            return None
        require_known(call, "block_size")
        form = FUNCTIONS_OF_ROWS[call.op_type]
        first, *others = (
            stored_tensor(value, call) for value in call.inputs[1:] if value is not None
        )
        name, codes = str(first.name), first
        if form is not None:
            high = len(form.planes) - 1
            codes = Joined(planes=[first, *others[:high]], form=form, name=name)
            others = others[high:]
        return cls(
            call=call,
            name=name,
            codes=codes,
            factors=tuple(others),
            block_size=call.attributes["block_size"].as_int(),
        )

    @property
    def stored_factors(self) -> list[ir.TensorProtocol]:
        """Tensors of the factors in the bundle."""
        pairs = ((e.codes, e.scales) if isinstance(e, Factors) else (e,) for e in self.factors)
        return [tensor for pair in pairs for tensor in pair]

    @property
    def value(self) -> ir.Value:
        """The codes, or their first plane."""
        codes = self.call.inputs[1]
        assert codes is not None
        return codes

    @property
    def ids(self) -> ir.Value:
        """Numbers of the rows."""
        ids = self.call.inputs[0]
        assert ids is not None
        return ids


def table_of(node: ir.Node) -> tuple[str, ir.TensorProtocol] | None:
    """Name and tensor of a lookup's table, or of its codes if quantized; None for other nodes."""
    if node.op_type == "Gather":
        value = node.inputs[0]
        stored = value.const_value if value is not None else None
        return None if value is None or stored is None else (str(value.name), stored)
    table = BlockTable.of(node)
    return None if table is None else (table.name, table.codes)


def lookup_ranges(graph: ir.Graph) -> list[tuple[int, int]]:
    """Offset and bytes in the weight file of each table that a graph only looks up rows in."""
    found = []
    for value in graph.initializers.values():
        tensor, uses = value.const_value, tuple(value.uses())
        if not isinstance(tensor, ir.ExternalTensor) or tensor.nbytes < _SMALLEST_TABLE:
            continue
        if uses and all((use.node.op_type, use.idx) in _LOOKUPS for use in uses):
            found.append((tensor.offset or 0, tensor.nbytes))
    return found


def look_up_blocks(graph: GraphEditor) -> None:
    """Look up codes and scales, then dequantize to float32: a pass has few tokens."""
    for call in find_calls(graph.graph, *ROWS):
        table = BlockTable.of(call)
        assert table is not None
        graph.cursor = call
        codes = graph.weight(f"{table.name}.table", table.codes.numpy)
        values = graph.node("Gather", [codes, table.ids], axis=0)
        scales, *minima = looked_up_factors(graph, table)
        block = table.block_size
        rows = graph.node("DequantizeLinear", [values, scales], axis=-1, block_size=block)
        if minima:
            width = tuple(map(int, table.codes.shape.numpy()))[1]
            rows = _with_minima(graph, rows, minima[0], width, block)
        graph.replace(call.outputs[0], rows)


def widen_tables(graph: GraphEditor, dtype: ir.DataType) -> None:
    """Dequantize tables to floats of this type; a tied head may share them."""
    for call in find_calls(graph.graph, *ROWS):
        table = BlockTable.of(call)
        assert table is not None
        graph.cursor = call
        floats = graph.weight(
            f"{table.name}.{dtype.name.lower()}", lambda table=table: _dense(table, dtype)
        )
        rows = graph.node("Gather", [floats, table.ids], axis=0)
        for user, _ in tuple(call.outputs[0].uses()):
            if user.op_type == "Cast" and user.attributes["to"].as_int() == int(dtype):
                graph.replace(user.outputs[0], rows)
        graph.replace(call.outputs[0], rows)


def looked_up_factors(graph: GraphEditor, table: BlockTable) -> list[ir.Value]:
    """Scales, and minima if any, of the rows of a pass: float32 [..., blocks] each."""
    return [_looked_up(graph, each, table) for each in table.factors]


def _looked_up(graph: GraphEditor, stored: ir.TensorProtocol, table: BlockTable) -> ir.Value:
    if isinstance(stored, Factors):  # codes and their scales take a quarter of their product
        codes, scales = (_looked_up(graph, each, table) for each in (stored.codes, stored.scales))
        return graph.node("DequantizeLinear", [codes, scales], axis=-1, block_size=stored.shared)
    rows = graph.node(
        "Gather", [graph.weight(f"{stored.name}.table", stored.numpy), table.ids], axis=0
    )
    if stored.dtype not in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
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


def _dense(table: BlockTable, dtype: ir.DataType) -> np.ndarray:
    """The whole table as floats, computed some rows at a time."""
    codes, *factors = (each.numpy() for each in (table.codes, *table.factors))
    floats = np.empty(codes.shape, dtype.numpy())
    step = max(1, _WIDENED_AT_ONCE // codes.shape[1])
    for begin in range(0, len(codes), step):
        part = slice(begin, begin + step)
        spread = [np.repeat(each[part].astype(np.float32), table.block_size, 1) for each in factors]
        rows = codes[part].astype(np.float32) * spread[0]
        floats[part] = rows + spread[1] if len(spread) > 1 else rows
    return floats
