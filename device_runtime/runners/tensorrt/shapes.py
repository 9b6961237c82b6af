"""Shapes of the tensors of a pass, by its varying sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.device_runtime.runners.tensorrt.bound_pass import fill_mask
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import CompiledEngine
from edgellm.device_runtime.runners.tensorrt.packed_buffers import Layout, Shape

Sizes = tuple[int, int, int]
ROWS, COLUMNS, OUTPUTS = range(3)  # tokens, mask columns, and tokens with outputs
VARYING = {  # sizes of the dimensions that vary, in their order
    graph_io.INPUT_IDS: (ROWS,),
    graph_io.POSITION_IDS: (ROWS,),
    graph_io.TREE_MASK: (ROWS, COLUMNS),
    graph_io.PARENT_ROWS: (ROWS,),
    graph_io.LOGITS_INDEX: (OUTPUTS,),
    graph_io.DRAFT_HIDDEN: (ROWS,),
    graph_io.HIDDEN_TAPS: (ROWS,),
    graph_io.TOKEN_IDS: (OUTPUTS,),
    graph_io.TOP_LOGITS: (OUTPUTS,),
    graph_io.LOGITS: (OUTPUTS,),
    graph_io.CANDIDATE_IDS: (OUTPUTS,),
    graph_io.CANDIDATE_LOG_PROBS: (OUTPUTS,),
    graph_io.RECYCLED_HIDDEN: (OUTPUTS,),
}
FEATURES = (graph_io.HIDDEN_TAPS, graph_io.DRAFT_HIDDEN, graph_io.RECYCLED_HIDDEN)


class Shapes:
    """The shapes of an engine's tensors."""

    def __init__(self, engine: CompiledEngine) -> None:
        self._tensors = engine.tensors

    @property
    def outputs(self) -> list[str]:
        """Names of outputs, without caches and what states need of rows."""
        kept = graph_io.PRESENT, graph_io.STATE_ROWS
        return [
            name
            for name, info in self._tensors.items()
            if not info.is_input and not name.startswith(kept)
        ]

    @property
    def feature_inputs(self) -> list[str]:
        """The engine's inputs among `FEATURES`."""
        return [name for name in FEATURES if name in self._tensors and self._tensors[name].is_input]

    def of(self, name: str, sizes: Sizes) -> Shape:
        """The shape of a tensor."""
        varying = iter(VARYING.get(name, ()))
        dims = self._tensors[name].shape
        return tuple(sizes[next(varying)] if dim < 0 else dim for dim in dims)

    def num_bytes(self, name: str, sizes: Sizes) -> int:
        """Bytes of a tensor."""
        return math.prod(self.of(name, sizes)) * self._tensors[name].dtype.itemsize

    def inputs(self, sizes: Sizes) -> Layout:
        """The layout of inputs that the host sets in every pass."""
        return {
            name: (self.of(name, sizes), info.dtype)
            for name, info in self._tensors.items()
            if info.is_input
            and name not in FEATURES
            and (name in VARYING or name in (graph_io.WRITE_INDEX, graph_io.SEQUENCES))
        }


def asked_sizes(inputs: Mapping[str, NDArray[Any]]) -> Sizes:
    """The sizes of a pass before padding."""
    ids = inputs.get(graph_io.INPUT_IDS)
    rows = (inputs[graph_io.HIDDEN_TAPS] if ids is None else ids).shape[1]
    mask, outputs = inputs.get(graph_io.TREE_MASK), inputs.get(graph_io.LOGITS_INDEX)
    columns = rows if mask is None else mask.shape[1]
    return rows, columns, rows if outputs is None else len(outputs)


def fill(bound: Mapping[str, NDArray[Any]], inputs: Mapping[str, NDArray[Any]], rows: int) -> None:
    """Write a pass's inputs, padded with zeros."""
    for name, place in bound.items():
        if name == graph_io.TREE_MASK and graph_io.SEQUENCES not in bound:
            fill_mask(place, inputs.get(name), rows)
            continue
        array = inputs[name]
        if place.shape != array.shape:
            place[...] = 0
        place[tuple(slice(size) for size in array.shape)] = array
