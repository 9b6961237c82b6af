"""Reference outputs of a portable graph for a few tokens, exact and with an engine's rounding.

The graph runs in ONNX Runtime, node by node, in float32 and without rounding of layers' inputs,
since engines round these differently. All sample passes are one pass here with a tree mask, so
weights are decoded once. A second run rounds as the engine does, or coarser: the difference is the
effect of rounding on this model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgellm.build.lowering.bind_rope import bind_frequencies
from edgellm.build.lowering.experts import ExpertLayer, all_weights
from edgellm.build.lowering.function_calls import ROWS, find_calls, is_call
from edgellm.build.lowering.linears.groups import Rounding
from edgellm.build.lowering.linears.round_int4 import load_portable, round_to_int4
from edgellm.build.lowering.linears.weights import linear_layers
from edgellm.build.lowering.weights import WeightFile
from edgellm.build.verify.check_inputs import Inputs, held_inputs, sample_passes
from edgellm.build.verify.reference_graphs import plain_versions
from edgellm.build.verify.rounding_simulation import Rounds, narrows
from edgellm.build.verify.streamed_eval import SLICE, run_in_pieces
from edgellm.core import graph_io
from edgellm.core.errors import EdgeLLMError
from edgellm.core.graph_roles import BLOCK
from edgellm.core.manifest import Bundle
from edgellm.core.model_spec import KVCacheSpec
from edgellm.core.onnx_functions import ROUTER
from edgellm.core.resources import available_memory_bytes
from edgellm.device_runtime.networks.decoder_io import parent_rows
from edgellm.device_runtime.runners.runner import Runner

Numbers = dict[str, NDArray[Any]]
_ROWS = 32  # of the cache that passes may use
_LAYER = "layer_input."  # prefix of outputs that show the inputs of norms
_NORMS = ("RMSNormalization", "LayerNormalization")
_CASTS = ("Cast", "CastLike")
_COPIES = 5  # of the largest weight as float32, in memory while it is decoded and rounded
_UNIT = 2.0**-24  # half a step of float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A graph of a bundle, as input of a build."""

    role: str
    bundle: Bundle
    path: Path
    rounded: WeightFile | None  # file of weights that the build rounds
    cache: KVCacheSpec | None  # of the engine's graph, if it has one
    capacity: int  # tokens of that cache, which RoPE may depend on
    commit: Runner | None = None  # of the engine, if its layers have states

    def load(self) -> tuple[ir.Model, dict[str, str]]:
        """The graph with the inputs of its norms as outputs; names of norms by output."""
        return self.prepared(load_portable(self.path, None))

    def prepared(self, model: ir.Model) -> tuple[ir.Model, dict[str, str]]:
        """The same for a loaded graph."""
        if self.rounded is not None:
            round_to_int4(model, self.rounded)
        bind_frequencies(model.graph, self.capacity)
        return model, _show_layers(model, self.bundle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a portable graph computes of some passes, rows one after the other."""

    source: Source
    passes: list[Inputs]
    why_not: str = ""  # why outputs are missing
    exact: Numbers = field(default_factory=dict)  # outputs and layers' inputs, float32 [..., n]
    rounded: Numbers = field(default_factory=dict)  # the same with the engine's rounding, if any
    layers: dict[str, str] = field(default_factory=dict)  # names of norms by outputs
    float_error: float = 0.0  # relative, of sums in another order
    seconds: float = 0.0
    may_reroute: bool = False  # the engine's rounding may route rows to other experts or clusters


def make_reference(
    source: Source,
    capacity: int,
    engine: Rounds,
    *,
    wanted: bool = True,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> Reference:
    """Compute the reference, if this machine's memory suffices.

    Args:
        source: the graph.
        capacity: rows of the engine's cache.
        engine: its rounding.
        wanted: False: people do not want it.
        on_progress: how many parts of the graph of how many were computed.
    """
    rows = min(capacity or _ROWS, _ROWS)
    passes = sample_passes(source.role, source.bundle, rows, rows)
    if not wanted:
        return Reference(source=source, passes=passes, why_not="--noCheck")
    portable = load_portable(source.path, None)
    routes = bool(find_calls(portable.graph, ROUTER))
    need = _COPIES * 4 * _held_at_once(portable.graph)
    if need > (available := available_memory_bytes()):
        lacking = f"that needs about {need >> 20} MiB of memory, {available >> 20} are available"
        return Reference(source=source, passes=passes, why_not=lacking)
    model, shown = source.prepared(portable)  # weights are rounded before this
    start = time.perf_counter()
    layers = list(all_weights(model.graph))
    roundings = {engine.of(weight, name) for name, weight in layers}
    sums = float_error(weight.in_features for _, weight in layers)
    # Layers of a block drafter read tokens of the block, or those of the text, too.
    rows = 1 if source.role == BLOCK else sum(map(_rows, passes)) or 1
    rounds = engine.halves or narrows(source.cache, engine) or bool(roundings - {Rounding()})
    versions = plain_versions(model, source.bundle, source.cache, engine, rows, rounds=rounds)
    try:
        found = run_in_pieces(versions, _inputs(source, passes, versions[0]), on_progress)
    except EdgeLLMError as error:
        return Reference(source=source, passes=passes, why_not=str(error))
    exact, *rounded = map(as_floats, found)
    seconds = time.perf_counter() - start
    return Reference(
        source=source,
        passes=passes,
        why_not="",
        exact=exact,
        rounded=rounded[0] if rounded else {},
        layers=shown,
        float_error=sums,
        seconds=seconds,
        may_reroute=bool(rounded) and routes,
    )


def float_error(widths: Iterable[int]) -> float:
    """Relative error of float rows after sums of `widths` products."""
    return _UNIT * sum(widths)


def _held_at_once(graph: ir.Graph) -> int:
    """Number of values of the largest weight, or of a slice of it."""
    experts = [math.prod(layer.gate.shape[1:]) for layer in ExpertLayer.all_of(graph)]
    largest = max((weight.count for _, weight in linear_layers(graph)), default=0)
    return max([min(largest, SLICE), *experts])


def _inputs(source: Source, passes: Sequence[Inputs], model: ir.Model) -> dict[str, NDArray[Any]]:
    """Inputs of all passes as one."""
    inputs, rows = joined(passes), sum(map(_rows, passes))
    for value in model.graph.inputs:
        if str(value.name).startswith(graph_io.STATE):
            inputs[str(value.name)] = np.zeros(value.shape.numpy(), np.float32)  # type: ignore[union-attr]
        if str(value.name).startswith(graph_io.PAST):
            assert value.shape is not None
            heads, width = int(value.shape[1]), int(value.shape[3])  # type: ignore[arg-type]
            inputs[str(value.name)] = np.zeros((1, heads, rows, width), np.float32)
    if source.commit is not None:
        inputs[graph_io.PARENT_ROWS] = parent_rows(rows, inputs[graph_io.TREE_MASK])
    return {**inputs, **held_inputs(source.role, source.bundle)}


# ------------------------------------------------------------------------------------ numbers
def _rows(inputs: Inputs) -> int:
    """Tokens of a pass, or an encoder's positions of a window of audio."""
    if graph_io.INPUT_FEATURES in inputs:
        return inputs[graph_io.INPUT_FEATURES].shape[-1] // 2
    if graph_io.ENCODER_HIDDEN in inputs:
        return inputs[graph_io.ENCODER_HIDDEN].shape[1]
    return inputs[graph_io.INPUT_IDS].shape[1] if graph_io.INPUT_IDS in inputs else 0


def joined(passes: Sequence[Inputs]) -> dict[str, NDArray[Any]]:
    """Passes one after the other as a single one, whose tree mask says what rows see."""
    if len(passes) == 1 and graph_io.INPUT_IDS not in passes[0]:
        return dict(passes[0])
    ids = [each[graph_io.INPUT_IDS] for each in passes]
    rows = [each.shape[1] for each in ids]
    mask, wanted = np.tri(sum(rows), dtype=np.bool_), []
    for inputs, count, end in zip(passes, rows, np.cumsum(rows), strict=True):
        wanted.append(inputs[graph_io.LOGITS_INDEX] + end - count)
        if graph_io.TREE_MASK in inputs:
            mask[end - count : end, end - count : end] = inputs[graph_io.TREE_MASK]
    merged = {
        name: np.concatenate([each[name] for each in passes], axis=1)
        for name in (graph_io.INPUT_IDS, graph_io.POSITION_IDS, graph_io.DRAFT_HIDDEN)
        if name in passes[0]
    }
    return {
        **passes[0], **merged, graph_io.WRITE_INDEX: np.array([0]),
        graph_io.LOGITS_INDEX: np.concatenate(wanted), graph_io.TREE_MASK: mask,
    }  # fmt: skip


def as_floats(outputs: Mapping[str, NDArray[Any]], num_positions: int | None = None) -> Numbers:
    """Floats of the outputs; candidates in the order of their ids, so small errors keep it.

    `num_positions`: of audio, whose keys and values an engine may have in pages.
    """
    found = {
        name: np.asarray(array, np.float32)
        for name, array in outputs.items()
        if array.dtype in (np.float32, np.float16)
    }
    if graph_io.CANDIDATE_IDS in outputs:
        ids = outputs[graph_io.CANDIDATE_IDS]
        order = np.argsort(ids, axis=-1, kind="stable")
        scores = found[graph_io.CANDIDATE_LOG_PROBS]
        found[graph_io.CANDIDATE_LOG_PROBS] = np.take_along_axis(scores, order, -1)
    for name in found:
        if name.startswith(graph_io.CROSS):  # a head alone may be small, and its relative error not
            rows = np.moveaxis(found[name], 1, 2)  # [pages, positions, heads, D]
            found[name] = rows.reshape(1, -1, rows.shape[2] * rows.shape[3])[:, :num_positions]
    # Caches and states are compared through later tokens; links are reordered with candidates.
    inner = graph_io.PRESENT, graph_io.STATE_ROWS, graph_io.CANDIDATE_LINKS
    return {name: each for name, each in found.items() if not name.startswith(inner)}


# -------------------------------------------------------------------------------------- graphs
def _is_looked_up(node: ir.Node | None) -> bool:
    """Whether a node looks up a table, or casts such a result."""
    if node is not None and node.op_type in _CASTS and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node is not None and (node.op_type == "Gather" or is_call(node, *ROWS))


def _show_layers(model: ir.Model, bundle: Bundle) -> dict[str, str]:
    dtype, shown = ir.DataType[{"float16": "FLOAT16", "float32": "FLOAT"}[bundle.dtype]], {}
    for node in model.graph:
        value = node.inputs[0] if node.op_type in _NORMS else None
        made_by = value.producer() if value is not None else None
        if value is None or made_by is None or value in model.graph.outputs:
            continue
        if _is_looked_up(made_by):  # lowerings choose the type of this table
            continue
        value.name, value.type = f"{_LAYER}{len(shown)}", ir.TensorType(dtype)
        model.graph.outputs.append(value)
        name = str(node.name).removesuffix(f".{node.op_type}")
        shown[value.name] = name[max(name.find("model."), 0) :]
    return shown
