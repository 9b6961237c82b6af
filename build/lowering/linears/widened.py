"""Weights whose codes take more bits in engines than in the bundle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

from edgellm.build.lowering.embeddings import BlockTable
from edgellm.build.lowering.experts import ExpertLayer
from edgellm.build.lowering.linears.block_factors import Joined, stored_tensor
from edgellm.build.lowering.linears.weights import kind_of, linear_layers

_BITS = {"int4": 4, "int8": 8}


def notes_of_widened(models: Iterable[ir.Model], *, few_bits: bool = False) -> Iterator[str]:
    """A note for each width of an engine's codes with fewer bits in portable graphs.

    `few_bits`: kernels multiply codes of 2 to 6 bits, but none that stand for a table's values.
    """
    stored = {name: codes for model in models for name, codes in _packed(model.graph)}
    for kind, bits in _BITS.items():
        found = [
            codes
            for codes in stored.values()
            if kind_of(codes) == kind
            and codes.form.bits < bits
            and (codes.form.by_table or not few_bits)
        ]
        if not found:
            continue
        fewer = sorted({codes.form.bits for codes in found})
        more = sum(int(codes.size) * (bits - codes.form.bits) // 8 for codes in found)
        yield (
            f"{len(found)} weights of {' and '.join(map(str, fewer))} bits take {bits} bits in the "
            f"engine, {more / 1e6:.1f} MB more than in the bundle: no kernel multiplies fewer"
        )


def _packed(graph: ir.Graph) -> Iterator[tuple[str, Joined]]:
    """Codes in planes of all weights, by their names."""
    for _, weight in linear_layers(graph):
        yield from _joined(weight.parts[0].parameter, weight.parts[0].stored[0])
    for layer in ExpertLayer.all_of(graph):
        for stack in layer.stacks:
            yield from _joined(stack.parameter, stored_tensor(stack.values[0], stack.call))
    for node in graph:
        if (table := BlockTable.of(node)) is not None:
            yield from _joined(table.name, table.codes)


def _joined(name: str, codes: ir.TensorProtocol) -> Iterator[tuple[str, Joined]]:
    if isinstance(codes, Joined):
        yield name, codes
