"""Cached attention as three plugin nodes with edgellm's kernels in TensorRT.

`store_rows` rotates and appends, `attend` computes shares of the live context, `finish` joins
them, or attends a prompt (`kernels/triton/attention.py`). A graph then has no cache: it takes a
table of addresses (`contract.CACHE_TABLE`), so neither capacity nor codes of the cache are part of
its inputs, and nothing is copied. The nodes are quickly deployable plugins, see `plugins.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, MutableSequence, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.attention import CachedAttention
from edgellm.build.lowering.contrib_ops import CACHE_NAMES
from edgellm.build.lowering.function_calls import is_call, require_known
from edgellm.build.lowering.graph import GraphEditor
from edgellm.core import graph_io, onnx_functions
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.kernels.triton import prebuilt
from edgellm.device_runtime.kernels.triton.catalog import (
    HEAD_DIM_STEP,
    TILES,
    Variant,
    attend,
    finish,
    keep_rows,
    store_rows,
    tile,
)
from edgellm.device_runtime.runners.tensorrt.kernel_cache import table_entries
from edgellm.device_runtime.runners.tensorrt.library.attention_nodes import (
    ATTEND,
    FINISH,
    GIVEN,
    NAMESPACE,
    PARTIAL_ROWS,
    STORE_ROWS,
)
from edgellm.device_runtime.runners.tensorrt.ragged_batch import SHAPE

MASK_COLUMNS = "mask_columns"  # symbol of the widest mask of a pass
_F16, _F32 = ir.DataType.FLOAT16, ir.DataType.FLOAT


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Parameters that select the kernels' variants for a graph."""

    sm: int  # compute capability of the GPU, 110 for 11.0
    codes: str  # of the cache: fp16, int8 or fp8
    sequences: int = 1  # maximum batch size
    head_rows: int = 1  # maximum tokens of a pass that get logits

    @property
    def many(self) -> bool:
        """Whether passes may have several sequences."""
        return self.sequences > 1

    def variants(self, layer: CachedAttention) -> tuple[Variant, ...]:
        """Those of a layer, and of the rows that are moved after a tree."""
        size, codes = layer.head_dim, self.codes
        return (
            store_rows(size, codes, many=self.many),
            attend(size, codes),
            finish(size, codes),
            keep_rows(size, codes),
        )


def why_not(graph: ir.Graph, dtype: ir.DataType, kernels: Kernels, driver_ptx: int | None) -> str:
    """Why the kernels do not support a portable graph; "" if they do.

    Args:
        graph: with cached attention.
        dtype: of activations.
        kernels: requested.
        driver_ptx: see `prebuilt.find`.
    """
    if dtype != _F16:
        return "the kernels compute in float16, the bundle in float32"
    for layer in CachedAttention.all_of(graph, takes_sinks=True):
        if not tile(layer.head_dim):
            return (
                f"there are kernels for heads of a multiple of {HEAD_DIM_STEP} up to {TILES[-1]} "
                f"numbers, not of {layer.head_dim}"
            )
        seen = layer.visible.producer()
        if not is_call(seen, onnx_functions.VISIBLE_SLOTS, onnx_functions.VISIBLE_IN_WINDOW):
            return "the graph has a mask that is not made of the tree's"
        if fault := missing(kernels.variants(layer), kernels.sm, driver_ptx):
            return fault
    return ""


def missing(variants: Iterable[Variant], sm: int, driver_ptx: int | None) -> str:
    """Why a GPU or its driver has no PTX of some kernels, with a hint; "" if it has."""
    try:
        for variant in variants:
            prebuilt.find(variant, sm, driver_ptx)
    except EdgeLLMError as error:
        return f"{error} ({error.hint})"
    return ""


def lower_attention(graph: GraphEditor, kernels: Kernels, capacity: int) -> None:
    """Rewrite all cached attention of a graph that `why_not` accepts.

    Args:
        graph: before functions are inlined.
        kernels: for its layers.
        capacity: tokens of the longest cache, and length of RoPE tables.
    """
    _bind_rope_tables(graph, capacity)
    layers = CachedAttention.all_of(graph.graph, takes_sinks=True)
    entries = table_entries(len({layer.cache for layer in layers}))
    table = ir.val(graph_io.CACHE_TABLE, ir.DataType.INT64, [entries])
    graph.graph.inputs.append(table)
    sequences = _take_sequences(graph.graph) if kernels.many else None
    for layer in layers:
        graph.cursor = layer.call
        y = _emit(graph, layer, (sequences or layer.write_index, table), kernels)
        graph.replace(layer.outputs[0], y)
    _drop_caches(graph.graph.outputs)
    for layer in layers:
        graph.graph.remove(layer.call, safe=True)
    _drop_caches(graph.graph.inputs)


def _take_sequences(graph: ir.Graph) -> ir.Value:
    """Replace WRITE_INDEX by the input with the sequences of the pass.

    Columns of the mask are each sequence's own.
    """
    index, mask = (
        next(value for value in graph.inputs if value.name == name)
        for name in (graph_io.WRITE_INDEX, graph_io.TREE_MASK)
    )
    sequences = ir.val(graph_io.SEQUENCES, ir.DataType.INT64, SHAPE)
    graph.inputs[graph.inputs.index(index)] = sequences
    assert mask.shape is not None
    mask.shape = ir.Shape([mask.shape[0], MASK_COLUMNS])
    return sequences


def _drop_caches(values: MutableSequence[ir.Value]) -> None:
    for value in [each for each in values if str(each.name).startswith(CACHE_NAMES)]:
        values.remove(value)


def _bind_rope_tables(graph: GraphEditor, capacity: int) -> None:
    for node in graph.find("Shape"):
        value = node.inputs[0]
        if value is not None and str(value.name).startswith(CACHE_NAMES):
            graph.cursor = node
            graph.replace(node.outputs[0], graph.constant("capacity", np.array([capacity])))


def _emit(
    graph: GraphEditor,
    layer: CachedAttention,
    places_and_table: tuple[ir.Value, ir.Value],
    kernels: Kernels,
) -> ir.Value:
    """The nodes of a layer; y [1, S, num_heads * D].

    `places_and_table` are the write positions and the table of caches.
    """
    seen = layer.visible.producer()
    assert seen is not None
    tree, places = seen.inputs[:2]
    size, heads = layer.head_dim, layer.num_heads
    sizes = {"layer": layer.cache, "heads": heads, "kv_heads": layer.kv_num_heads, "head_dim": size}
    given = {**sizes, "codes": kernels.codes, "capability": kernels.sm}
    if kernels.many:
        given["sequences"] = kernels.sequences
    rows = [(_F16, [1, "rows", heads * size])]
    rotated = _rotation(graph, layer, places)
    (q,) = emit_node(
        graph,
        STORE_ROWS,
        [rotated.q, rotated.k, layer.v, *rotated.tables, *places_and_table],
        rows,
        **given,
        own_tables=rotated.own_tables,
    )
    rules = {"window": _window(layer), "cap_bits": _bits(layer.softcap)}
    attended = [q, tree, places, *places_and_table]
    partial: list[tuple[ir.DataType, list[int | str | None]]] = [
        (_F32, [PARTIAL_ROWS, heads, last]) for last in (size, 2)
    ]
    parts, stats = emit_node(graph, ATTEND, attended, partial, **given, **rules)
    sinks = stats  # placeholder, not read
    if layer.sinks is not None:
        sinks = graph.node("Cast", [layer.sinks], to=int(_F32))
    rules["sunk"] = int(layer.sinks is not None)
    return emit_node(graph, FINISH, [*attended, parts, stats, sinks], rows, **given, **rules)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rotated:
    """Queries and keys, and the RoPE tables that `store_rows` still applies."""

    q: ir.Value
    k: ir.Value
    tables: tuple[ir.Value | None, ...]  # cos, sin, positions
    own_tables: int = 0  # 1: they are by token


def _rotation(graph: GraphEditor, layer: CachedAttention, places: ir.Value | None) -> _Rotated:
    q, k, cos, sin, positions = layer.q, layer.k, layer.cos, layer.sin, layer.positions
    size = layer.head_dim
    if layer.scale is not None and not np.isclose(layer.scale, size**-0.5, rtol=1e-4):
        factor = np.float16(layer.scale * size**0.5)
        q = graph.node("Mul", [q, graph.constant(f"scale_{factor}", factor)])
    is_whole = not layer.interleaved and layer.rotary_embedding_dim in (0, size)
    if cos is not None and is_whole:
        own = positions is None
        return _Rotated(
            q=q, k=k, tables=(cos, sin, places if own else positions), own_tables=int(own)
        )
    if cos is not None:
        tables = [cos, sin] if positions is None else [cos, sin, positions]
        q, k = (
            graph.node(
                "RotaryEmbedding",
                [x, *tables],
                num_heads=heads,
                interleaved=layer.interleaved,
                rotary_embedding_dim=layer.rotary_embedding_dim,
            )
            for x, heads in ((q, layer.num_heads), (k, layer.kv_num_heads))
        )
    one = graph.constant(f"cos_{size}", np.ones((1, size // 2), np.float16))
    none = graph.constant(f"sin_{size}", np.zeros((1, size // 2), np.float16))
    first = graph.node("Sub", [places, places])  # shared by all layers
    return _Rotated(q=q, k=k, tables=(one, none, first))


def emit_node(
    graph: GraphEditor,
    name: str,
    inputs: Sequence[ir.Value | None],
    outputs: Sequence[tuple[ir.DataType, list[int | str | None]]],
    **given: int | str | list[int],
) -> Sequence[ir.Value]:
    """A plugin node in the parser's form, with `aot`: the kernel is in the plan."""
    found = graph.nodes(
        name,
        inputs,
        len(outputs),
        domain=NAMESPACE,
        plugin_namespace=NAMESPACE,
        plugin_version="1",
        aot=1,
        **{GIVEN: json.dumps(given)},
    )
    for value, (dtype, shape) in zip(found, outputs, strict=True):
        value.type, value.shape = ir.TensorType(dtype), ir.Shape(shape)
    return found


def _window(layer: CachedAttention) -> int:
    """Tokens that a token attends to, itself included; 0: all."""
    seen = layer.visible.producer()
    assert seen is not None
    require_known(seen, "window")
    window = seen.attributes.get("window")
    return 0 if window is None else window.as_int()


def _bits(number: float | None) -> int:
    """The bits of a float32, as an integer."""
    return int(np.float32(number or 0).view(np.int32))
