"""Cached attention by edgellm's kernel: RoPE, KV cache append and tree mask in one operator."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.attention import CachedAttention, packed_rows
from edgellm.build.lowering.contrib_ops import CACHE_NAMES, row_tables
from edgellm.build.lowering.function_calls import find_calls, is_call, require_known
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.weights import constant_array, parameter_name
from edgellm.build.plan import Plan
from edgellm.core.errors import (
    BrokenArtifactError,
    UnsupportedModelError,
)
from edgellm.core.graph_io import (
    CROSS,
    SEQUENCES,
    TREE_MASKS,
    WINDOW_PLACES,
    page_table_name,
    past_name,
    present_name,
)
from edgellm.core.model_spec import (
    INT4,
    INT4_RECENT,
    DecoderSpec,
    KVCacheSpec,
    PageSpec,
    is_bounded,
)
from edgellm.core.onnx_functions import (
    CROSS_ATTENTION,
    VISIBLE_AROUND,
    VISIBLE_BEFORE,
    VISIBLE_BOTH_WAYS,
    VISIBLE_IN_WINDOW,
    VISIBLE_SLOTS,
)
from edgellm.device_runtime.kernels.library import DOMAIN
from edgellm.device_runtime.runners.onnxruntime_cpu.batch_packing import (
    MASK_VALUES,
    NUM_SEQUENCES,
    TABLE_PAGES,
)

# Tokens of a page: small pages waste less on short sequences; one sequence alone is 4 % slower.
_SHARED_ROWS, _ALONE_ROWS = 64, (256, 128)
_BOTH_WAYS = VISIBLE_BOTH_WAYS, VISIBLE_AROUND
_MASKS = VISIBLE_SLOTS, VISIBLE_IN_WINDOW, VISIBLE_BEFORE, *_BOTH_WAYS
_AUDIO_ROWS = 256  # of a page of audio
_HELD_PAGES = "audio_pages"  # symbol of their number
_PASS_ROWS = 256  # that windows have space for; longer chunks are no faster


def page_spec(
    graph: ir.Graph,
    plan: Plan,
    spec: DecoderSpec,
    num_trailing: int = 0,
    *,
    is_int4: bool = False,
) -> PageSpec:
    """Pages of the caches of a portable graph; raises as `lower_attention`.

    Args:
        graph: of a base or a draft.
        plan: of the engine.
        spec: of the graph's layers.
        num_trailing: tokens after the text of a draft's pass, see `DraftSpec`.
        is_int4: whether the cache has 4 bits.
    """
    layers = CachedAttention.all_of(graph, takes_sinks=True)
    rows = _SHARED_ROWS
    if plan.max_batch_size == 1:
        rows = next((each for each in _ALONE_ROWS if plan.kv_capacity % each == 0), rows)
    # An encoder's texts are one pass, whose tokens attend to later ones, too.
    windows = tuple(
        0 if _has_mask(layer, *_BOTH_WAYS) else _window(layer) or 0
        for layer in layers
        if not layer.is_shared
    )
    if is_int4:
        _require_longer_windows(windows)
        windows += (INT4_RECENT,) * len(windows)
    tree_rows = max(plan.max_verify_tree_size, plan.max_draft_tree_size)
    pass_rows = max(_PASS_ROWS, tree_rows, spec.min_chunk) + num_trailing
    pages = PageSpec(rows, windows, pass_rows)
    return pages if is_bounded(pages, plan.kv_capacity) else PageSpec(rows, windows)


def _require_longer_windows(windows: Sequence[int]) -> None:
    if short := [window for window in windows if 0 < window <= INT4_RECENT]:
        raise UnsupportedModelError(
            f"--kvCache int4 has the last {INT4_RECENT} positions in float16, and layers of this "
            f"model attend to {short[0]}",
            hint="give --kvCache float16",
        )


def lower_attention(graph: GraphEditor, cache: KVCacheSpec, capacity: int) -> None:
    """Rewrite all cached attention; int8 has a scale for each tensor, int4 in each row.

    Args:
        graph: portable.
        cache: of the engine.
        capacity: tokens of a sequence.

    Raises:
        UnsupportedModelError: a mask that is not derived from the tree's.
    """
    assert cache.pages is not None
    tables: dict[ir.Value, tuple[ir.Value, ...]] = {}
    passes = _PassInputs(graph.graph)
    written: dict[int, tuple[ir.Value, ...]] = {}  # caches with the rows of this pass
    for layer in CachedAttention.all_of(graph.graph, takes_sinks=True):
        graph.cursor = layer.call
        rotation = layer.cos, layer.sin
        if layer.cos is not None and layer.sin is not None and layer.positions is None:
            if layer.cos not in tables:
                tables[layer.cos] = row_tables(graph, layer.cos, layer.sin)[1:]
            rotation = tables[layer.cos]
        if layer.cache not in written:
            recent = passes.recent_rows(layer.cache, cache)
            written[layer.cache] = layer.past_key, layer.past_value, *recent
        caches, scales = written[layer.cache], _scales(graph, cache, layer.cache)
        head_dim = cache.heads_of(layer.cache)[1] if cache.dtype == INT4 else None
        outputs = _emit(graph, layer, caches, passes, rotation, scales, head_dim)
        if not layer.is_shared:
            written[layer.cache] = outputs[1:]
            passes.name_recent_rows(layer.cache, cache, outputs[3:])
    _bind_rope_tables(graph, capacity)
    values = {str(value.name): value for value in (*graph.graph.inputs, *graph.graph.outputs)}
    for layer, window in enumerate(cache.pages.windows):
        for name, part in itertools.product((past_name, present_name), ("key", "value")):
            value, (heads, elements) = values[name(layer, part)], cache.array_heads(layer)
            # Layers with windows have their own number of pages.
            value.shape = ir.Shape([f"pages{window or ''}", heads, cache.pages.rows, elements])
            value.type = ir.TensorType(ir.DataType.from_numpy(np.dtype(cache.array_dtype)))


def lower_audio_attention(graph: GraphEditor, cache: KVCacheSpec | None, capacity: int) -> None:
    """Rewrite attention to audio: a cache that passes do not write, in pages.

    A pass needs a place for each of its tokens among the positions of audio. Models with fewer
    positions than tokens are left to other lowerings, with rounding that depends on the tokens.

    Args:
        graph: of a speech model's decoder, after `lower_attention`.
        cache: of its own tokens; audio is stored in floats of its size, at least halves.
        capacity: tokens of a sequence.
    """
    windows: tuple[ir.Value, ir.Value] | None = None
    for call in find_calls(graph.graph, CROSS_ATTENTION):
        q, *audio = call.inputs
        _, heads, positions, width = (int(size) for size in audio[0].shape)  # type: ignore - it is static
        if positions < capacity:
            return
        graph.cursor = call
        windows = windows or _windows(graph, positions)
        is_float = cache is not None and cache.dtype == "float32"
        for value in audio:
            assert value is not None
            value.shape = ir.Shape([_HELD_PAGES, heads, _AUDIO_ROWS, width])
            value.type = ir.TensorType(ir.DataType.FLOAT if is_float else ir.DataType.FLOAT16)
        y = graph.node(
            "CachedAttention",
            [q, None, None, *audio, *windows],
            domain=DOMAIN,
            num_heads=heads,
            kv_num_heads=heads,
            bidirectional=1,
        )
        graph.replace(call.outputs[0], y)


def lower_audio_outputs(graph: GraphEditor, capacity: int) -> None:
    """Write keys and values of audio in the pages that `lower_audio_attention` reads.

    Args:
        graph: that computes them.
        capacity: tokens of a sequence of the decoder.
    """
    for value in tuple(graph.graph.outputs):
        last = value.producer()
        if not str(value.name).startswith(CROSS) or last is None:
            continue
        _, heads, positions, width = (int(size) for size in value.shape)  # type: ignore - it is static
        if positions < capacity:
            return
        graph.cursor = last  # the transposition of [1, A, heads, D]
        pages = -(-positions // _AUDIO_ROWS)
        missing = np.array([0] * 5 + [pages * _AUDIO_ROWS - positions, 0, 0])
        whole = graph.node("Pad", [last.inputs[0], graph.constant("audio_padding", missing)])
        shape = np.array([pages, _AUDIO_ROWS, heads, width])
        cut = graph.node("Reshape", [whole, graph.constant("audio_shape", shape)])
        found = graph.node("Transpose", [cut], perm=[0, 2, 1, 3])
        graph.replace(value, found)
        found.shape = ir.Shape([pages, heads, _AUDIO_ROWS, width])


def _windows(graph: GraphEditor, positions: int) -> tuple[ir.Value, ir.Value]:
    """`SEQUENCES` and page table of the windows of a pass, int64 [sequences, 3] and [..., pages].

    The tokens of a sequence count as the last positions of its window.
    """
    sequences = next(value for value in graph.graph.inputs if value.name == SEQUENCES)
    places = ir.val(WINDOW_PLACES, ir.DataType.INT64, [NUM_SEQUENCES])
    graph.graph.inputs.append(places)
    count = graph.node("Gather", [sequences, graph.constant("tokens", np.array([1]))], axis=1)
    before = graph.node("Sub", [graph.constant("audio_positions", np.array([positions])), count])
    no_mask = graph.node("Sub", [count, count])
    facts = graph.node("Concat", [before, count, no_mask], axis=1)
    pages = -(-positions // _AUDIO_ROWS)
    column = graph.node("Unsqueeze", [places, graph.constant("column", np.array([1]))])
    first = graph.node("Mul", [column, graph.constant("pages_of_window", np.array([pages]))])
    table = graph.node("Add", [first, graph.constant("audio_pages", np.arange(pages)[None])])
    return facts, table


def _bind_rope_tables(graph: GraphEditor, capacity: int) -> None:
    """Bind the length of RoPE tables, which the pages do not determine."""
    for node in graph.find("Shape"):
        if node.inputs[0] is not None and str(node.inputs[0].name).startswith(CACHE_NAMES):
            graph.cursor = node
            graph.replace(node.outputs[0], graph.constant("capacity", np.array([capacity])))


class _PassInputs:
    """Inputs of the graph for the sequences of a pass and their page tables."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self.sequences = self._add(SEQUENCES, ir.DataType.INT64, [NUM_SEQUENCES, 3])
        self.masks = self._add(TREE_MASKS, ir.DataType.BOOL, [MASK_VALUES])
        self._tables: dict[int, ir.Value] = {}

    def recent_rows(self, layer: int, cache: KVCacheSpec) -> list[ir.Value]:
        """Inputs with the recent keys and values of a layer; [] if the cache has none."""
        if cache.dtype != INT4:
            return []
        names = [past_name(cache.num_layers + layer, part) for part in ("key", "value")]
        found = [ir.val(name, ir.DataType.UINT8) for name in names]
        self._graph.inputs.extend(found)
        return found

    def name_recent_rows(self, layer: int, cache: KVCacheSpec, outputs: Sequence[ir.Value]) -> None:
        """Make these values the outputs with the recent keys and values of a layer."""
        for value, part in zip(outputs, ("key", "value"), strict=False):
            value.name = present_name(cache.num_layers + layer, part)
            self._graph.outputs.append(value)

    def table(self, window: int) -> ir.Value:
        """Page table of layers with this window, 0: without."""
        if window not in self._tables:
            name, shape = page_table_name(window), [NUM_SEQUENCES, TABLE_PAGES]
            self._tables[window] = self._add(name, ir.DataType.INT64, shape)
        return self._tables[window]

    def _add(self, name: str, dtype: ir.DataType, shape: Sequence[str | int]) -> ir.Value:
        value = ir.val(name, dtype, shape)
        self._graph.inputs.append(value)
        return value


def _emit(
    graph: GraphEditor,
    layer: CachedAttention,
    caches: tuple[ir.Value, ...],
    passes: _PassInputs,
    tables: tuple[ir.Value | None, ...],
    scales: Sequence[ir.Value | None],
    head_dim: int | None,
) -> tuple[ir.Value, ...]:
    """The outputs; a layer that shares the cache of an earlier one writes nothing.

    `head_dim`: None if the shape of the cache determines it.
    """
    window, both_ways = _window(layer), _has_mask(layer, *_BOTH_WAYS)
    packed = None if layer.is_shared else packed_rows(layer.q, layer.k, layer.v)
    rows = (layer.q, None, None) if layer.is_shared else (layer.q, layer.k, layer.v)
    given = {"scale": layer.scale, "softcap": layer.softcap, "local_window_size": window}
    given |= {"head_dim": head_dim}
    given |= {"rotary_interleaved": 1} if layer.interleaved else {}
    given |= {"bidirectional": 1} if both_ways else {}
    given |= {"causal": 1} if _has_mask(layer, VISIBLE_BEFORE) else {}
    recent = caches[2:]
    if recent:
        recent, scales = (passes.table(INT4_RECENT), *recent), [None, None]
    outputs = graph.nodes(
        "CachedAttention",
        [
            *((packed, None, None) if packed is not None else rows),
            *caches[:2], passes.sequences, passes.table(0 if both_ways else window or 0), *tables,
            layer.positions, passes.masks,
            *([None, None, _sinks(graph, layer), *scales] if scales or layer.sinks else []),
            *recent,
        ],
        1 if layer.is_shared else 1 + len(caches),
        domain=DOMAIN,
        num_heads=layer.num_heads,
        kv_num_heads=layer.kv_num_heads,
        **{name: value for name, value in given.items() if value is not None},
    )  # fmt: skip
    for old, new in zip(layer.outputs, outputs[:3], strict=not layer.is_shared):
        graph.replace(old, new)
    return tuple(outputs)


def _sinks(graph: GraphEditor, layer: CachedAttention) -> ir.Value | None:
    """Float32 [num_heads]."""
    if layer.sinks is None:
        return None
    array = constant_array(layer.sinks)
    if array is None:
        raise BrokenArtifactError(
            f"{layer.call.name}: the sinks are not a stored weight", hint="export the bundle again"
        )
    floats = array.astype(np.float32)
    return graph.weight(f"{parameter_name(layer.sinks)}.sinks", lambda: floats)


def _window(layer: CachedAttention) -> int | None:
    """Window of a layer, besides the tree mask; None: all positions."""
    call = layer.visible.producer()
    if call is None or not is_call(call, *_MASKS):
        raise UnsupportedModelError(
            f"{layer.call.name}: edgellm's kernels do not know this mask",
            hint="give --kernels onnxruntime",
        )
    require_known(call, "window")
    window = call.attributes.get("window")
    return None if window is None else window.as_int()


def _has_mask(layer: CachedAttention, *names: str) -> bool:
    """Whether one of these functions makes the mask of a layer."""
    return is_call(layer.visible.producer(), *names)


def _scales(graph: GraphEditor, cache: KVCacheSpec, index: int) -> list[ir.Value]:
    """Scales of a layer's int8 keys and values, float32 [1] each."""
    if cache.dtype != "int8":
        return []
    assert cache.ranges is not None
    return [
        graph.constant(f"layer{index}.{part}_scale", np.array([ranges[index] / 127], np.float32))
        for part, ranges in (("k", cache.ranges.keys), ("v", cache.ranges.values))
    ]
