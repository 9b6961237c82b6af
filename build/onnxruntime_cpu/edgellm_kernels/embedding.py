"""Embeddings with lookups in packed weights."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.groups import LinearKernel
from edgellm.build.lowering.linears.weights import LinearWeight, WeightPart, layer_name
from edgellm.build.onnxruntime_cpu.edgellm_kernels.linears import OwnLinears, packed_weight
from edgellm.build.onnxruntime_cpu.edgellm_kernels.pack_weights import form_of
from edgellm.device_runtime.kernels.library import DOMAIN
from edgellm.device_runtime.kernels.pack import PackedForm


def lower_embeddings(graph: GraphEditor, kernel: OwnLinears) -> None:
    """Rewrite all lookups in packed tables, see `packed_table`."""
    for gather in graph.find("Gather"):
        if (found := packed_table(gather, kernel)) is None:
            continue
        form, name, weight = found
        graph.cursor = gather
        rows = graph.node(
            "LookUp", [gather.inputs[1], packed_weight(graph, form, name, weight)], domain=DOMAIN
        )
        graph.replace(gather.outputs[0], rows)
        graph.graph.remove(gather, safe=True)


def packed_table(
    gather: ir.Node, kernel: OwnLinears
) -> tuple[PackedForm, str, LinearWeight] | None:
    """Packed form and name of a lookup's table; None: not packed.

    A tied head shares its weight, except in INT4, which costs more accuracy as an embedding than as
    a head. Such tables become int8 in blocks of 32, as do all others if layers of their width are
    rounded.
    """
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
