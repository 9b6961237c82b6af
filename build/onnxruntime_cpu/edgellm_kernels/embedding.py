"""Embeddings with lookups in packed weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from edgellm.build.lowering.embeddings import BlockTable, looked_up_factors
from edgellm.build.lowering.function_calls import CODES, ROWS, find_calls, is_call
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.block_factors import Factors
from edgellm.build.lowering.linears.groups import LinearKernel
from edgellm.build.lowering.linears.weights import LinearWeight, WeightPart, kind_of, layer_name
from edgellm.build.onnxruntime_cpu.edgellm_kernels.linears import OwnLinears, packed_weight
from edgellm.build.onnxruntime_cpu.edgellm_kernels.pack_weights import (
    form_of,
    keeps_codes,
    middle_of,
)
from edgellm.core.onnx_functions import BLOCK_LINEAR, OFFSET_LINEAR
from edgellm.device_runtime.kernels.library import DOMAIN
from edgellm.device_runtime.kernels.packed_layout import PackedForm


def lower_embeddings(graph: GraphEditor, kernel: OwnLinears) -> None:
    """Rewrite all lookups in packed tables, see `packed_table`."""
    for node in (*graph.find("Gather"), *find_calls(graph.graph, *ROWS)):
        if (found := packed_table(node, kernel)) is None:
            continue
        form, name, weight = found
        graph.cursor = node
        ids, own, middle = node.inputs[1], [], 0
        if (table := BlockTable.of(node)) is not None:
            ids = table.ids
            if has_own_factors(table, form):
                own, middle = looked_up_factors(graph, table), middle_of(weight.parts[0], form)
        packed = packed_weight(graph, form, name, weight)
        rows = graph.node("LookUp", [ids, packed, *own], domain=DOMAIN, middle=middle)
        graph.replace(node.outputs[0], rows)
        graph.graph.remove(node, safe=True)


def has_own_factors(table: BlockTable, form: PackedForm) -> bool:
    """Whether packed scales and minima are rounded; lookups then read the table's own."""
    is_rounded = len(table.factors) > 1 or any(isinstance(each, Factors) for each in table.factors)
    return is_rounded and not form.has_quantized_scales


def packed_table(node: ir.Node, kernel: OwnLinears) -> tuple[PackedForm, str, LinearWeight] | None:
    """Packed form and name of a lookup's table; None: not packed.

    A tied head shares its weight, except where the build rounds it to INT4, which costs more
    accuracy as an embedding than as a head. Such tables become int8 in blocks of 32, as do all
    other floats if layers of their width are rounded.
    """
    if (table := BlockTable.of(node)) is not None:
        return _packed_blocks(table, kernel)
    return _packed_floats(node, kernel)


def _packed_blocks(
    table: BlockTable, kernel: OwnLinears
) -> tuple[PackedForm, str, LinearWeight] | None:
    """As `packed_table`; the packed codes are the table's."""
    rows, width = table.codes.shape.numpy()
    part = WeightPart(
        kind=kind_of(table.codes),
        shape=(int(width), int(rows)),
        block_size=table.block_size,
        parameter=table.name,
        stored=(table.codes, *table.factors),
        operation=OFFSET_LINEAR if len(table.factors) > 1 else BLOCK_LINEAR,
    )
    weight = LinearWeight((part,))
    heads = [layer_name(head) for head in _readers(table.value) if LinearWeight.of(head)]
    name = heads[0] if heads else table.name
    form = kernel.form(weight, name)
    if form is None or not keeps_codes(weight):
        return None
    if has_own_factors(table, form) and form.block != table.block_size:
        return None
    return form, name, weight


def _readers(codes: ir.Value) -> Iterator[ir.Node]:
    """Nodes that read codes, or the codes of this first plane."""
    for use in codes.uses():
        if is_call(use.node, *CODES):
            yield from (each.node for each in use.node.outputs[0].uses())
        else:
            yield use.node


def _packed_floats(
    gather: ir.Node, kernel: OwnLinears
) -> tuple[PackedForm, str, LinearWeight] | None:
    """As `packed_table`."""
    if gather.op_type != "Gather":
        return None
    value = gather.inputs[0]
    tensor = None if value is None else value.const_value
    if value is None or tensor is None or len(tensor.shape) != 2 or _axis(gather):
        return None
    rows, width = tensor.shape.numpy()
    part = WeightPart(
        kind="dense",
        shape=(int(width), int(rows)),
        block_size=0,
        parameter=str(value.name),
        stored=(tensor,),
    )
    weight = LinearWeight((part,))
    for use in value.uses():
        if LinearWeight.of(use.node) is None:
            continue
        name = layer_name(use.node)
        form = kernel.form(weight, name)
        if form is not None and form.kind != "int4":
            return form, name, weight
    layer = kernel.form(weight, str(value.name)) if kernel.rounds_floats else None
    is_rounded = layer is not None and layer.is_quantized
    form = form_of(weight, rounds="int8") if is_rounded else None
    return None if form is None else (form, str(value.name), weight)


def rounded_block(gather: ir.Node, kernels: Sequence[LinearKernel]) -> int:
    """Block size of an embedding that a kernel rounds to int8; 0: none does."""
    for kernel in kernels:
        found = packed_table(gather, kernel) if isinstance(kernel, OwnLinears) else None
        if found is not None and found[0].kind == "int8":
            width = found[0].in_features
            return found[0].block if width % found[0].block == 0 else width
    return 0


def _axis(gather: ir.Node) -> int:
    return gather.attributes["axis"].as_int() if "axis" in gather.attributes else 0
