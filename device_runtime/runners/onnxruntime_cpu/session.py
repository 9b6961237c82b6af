"""Passes over ONNX Runtime graphs with IO binding: the KV cache is written in place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort

from edgellm import contract
from edgellm.contract import DecoderSpec, KVCacheSpec
from edgellm.device_runtime.runners.onnxruntime_graphs import run_arrays
from edgellm.device_runtime.runners.onnxruntime_images import KEPT_ROWS, Shown
from edgellm.device_runtime.session import (
    F32,
    I64,
    Bool,
    DraftResult,
    HostResult,
    ImageRows,
    require_room,
)


@dataclass(frozen=True, slots=True)
class LoadedGraph:
    """One ONNX Runtime session and the most rows it is meant for."""

    session: ort.InferenceSession
    max_rows: int


class _Cache:
    """Keys and values of all layers in one array [2 * layers, 1, num_kv_heads, C, head_dim]."""

    def __init__(self, spec: KVCacheSpec, capacity: int) -> None:
        self.capacity = capacity
        names = [(layer, part) for layer in range(spec.num_layers) for part in ("key", "value")]
        shape = (len(names), 1, spec.num_kv_heads, capacity, spec.head_dim)
        # ONNX Runtime does not keep the array alive that it is given.
        self._rows = np.zeros(shape, spec.dtype)
        self.values = {
            name: ort.OrtValue.ortvalue_from_numpy(rows)
            for name, rows in zip(names, self._rows, strict=True)
        }

    def compact(self, length: int, rows: I64) -> None:
        if rows[-1] + 1 > len(rows):  # otherwise they stand where they belong
            # The right side is a copy, so that overlapping rows are safe.
            self._rows[..., length : length + len(rows), :] = self._rows[..., length + rows, :]

    def read_rows(self, length: int) -> np.ndarray:
        return self._rows[..., :length, :].copy()

    def write_rows(self, rows: np.ndarray) -> None:
        self._rows[..., : rows.shape[-2], :] = rows


class _Scratch:
    """Output memory that all passes of a session share: results live until the next one."""

    def __init__(self) -> None:
        self._blocks: dict[str, np.ndarray] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        size = math.prod(shape)
        block = self._blocks.get(name)
        if block is None or block.size < size:
            block = self._blocks[name] = np.empty(size, dtype)
        return block[:size].reshape(shape)


class _BoundPass:
    """Buffers and IO binding of one graph for fixed sizes; nothing is allocated per pass."""

    def __init__(
        self,
        session: ort.InferenceSession,
        cache: _Cache,
        shown: Shown,
        inputs: Mapping[str, np.ndarray],
        outputs: Mapping[str, np.ndarray],
    ) -> None:
        """Bind what the graph has of `inputs` and `outputs`."""
        self._session = session
        self._shown, self._version = shown, 0
        self._binding = session.io_binding()
        self._values: list[ort.OrtValue] = []
        self.inputs, self.outputs = inputs, outputs
        rows = inputs[contract.POSITION_IDS].shape[1]
        self._offsets = np.arange(rows)
        mask = inputs[contract.TREE_MASK]
        self._causal = np.tri(rows, mask.shape[1], mask.shape[1] - rows, dtype=np.bool_)
        self._is_causal = False
        taken = {value.name for value in session.get_inputs()}
        given = {value.name for value in session.get_outputs()}
        for name, array in inputs.items():
            if name in taken:
                self._binding.bind_ortvalue_input(name, self._value(array))
        for name, array in outputs.items():
            if name in given:
                self._binding.bind_ortvalue_output(name, self._value(array))
        for (layer, part), value in cache.values.items():
            self._binding.bind_ortvalue_input(contract.past_name(layer, part), value)
            self._binding.bind_ortvalue_output(contract.present_name(layer, part), value)

    def _value(self, array: np.ndarray) -> ort.OrtValue:
        self._values.append(ort.OrtValue.ortvalue_from_numpy(array))
        return self._values[-1]

    def place(self, write_index: int, position_ids: I64 | None, tree_mask: Bool | None) -> None:
        """Say where the rows stand and what they see."""
        positions = self.inputs[contract.POSITION_IDS]
        rows = self._offsets + write_index if position_ids is None else position_ids
        if write_index == 0 and len(positions) == 1 and not np.array_equal(rows, self._offsets):
            # GroupQueryAttention ignores explicit positions while the cache is empty.
            raise ValueError("the first rows of a cache must have the positions 0, 1, 2, ...")
        self._shown.place(rows, positions)
        self.inputs[contract.WRITE_INDEX][0] = write_index
        if tree_mask is not None or not self._is_causal:
            self.inputs[contract.TREE_MASK][:] = self._causal if tree_mask is None else tree_mask
            self._is_causal = tree_mask is None

    def run(self) -> None:
        """Compute the outputs."""
        if self._version != self._shown.version:
            for name, value in self._shown.values.items():
                self._binding.bind_ortvalue_input(name, value)
            self._version = self._shown.version
        self._session.run_with_iobinding(self._binding)


def _row_inputs(
    rows: int, columns: int, output_rows: int, position_axes: int
) -> dict[str, np.ndarray]:
    """Fresh inputs of a pass."""
    return {
        contract.INPUT_IDS: np.zeros((1, rows), np.int64),
        contract.POSITION_IDS: np.zeros((position_axes, rows), np.int64),
        contract.WRITE_INDEX: np.zeros(1, np.int64),
        contract.TREE_MASK: np.zeros((rows, columns), np.bool_),
        contract.LOGITS_INDEX: np.zeros(output_rows, np.int64),
    }


class OnnxRuntimeSession:
    """Graphs of one engine that share one KV cache."""

    def __init__(
        self, graphs: Sequence[LoadedGraph], spec: DecoderSpec, capacity: int, num_taps: int = 0
    ) -> None:
        """Allocate the cache; `graphs` ascend by `max_rows`."""
        self.capacity = capacity
        self._graphs = graphs
        self._vocab_size, self._tap_width = spec.vocab_size, num_taps * spec.hidden_size
        self._axes, self._shown = spec.position_axes, Shown(spec)
        self._cache = _Cache(spec.kv, capacity)
        self._scratch = _Scratch()
        self._passes: dict[tuple[int, int], _BoundPass] = {}  # by rows and head rows

    def run(
        self,
        token_ids: I64,
        write_index: int,
        logits_index: I64,
        *,
        position_ids: I64 | None = None,
        tree_mask: Bool | None = None,
    ) -> HostResult:
        """See `edgellm.device_runtime.session.Session.run`."""
        rows = len(token_ids)
        require_room(self.capacity, write_index, rows)
        bound = self._passes.get((rows, len(logits_index))) or self._bind(rows, len(logits_index))
        bound.place(write_index, position_ids, tree_mask)
        bound.inputs[contract.INPUT_IDS][0] = token_ids
        bound.inputs[contract.LOGITS_INDEX][:] = logits_index
        bound.run()
        logits = bound.outputs[contract.LOGITS][0]
        return HostResult(logits.argmax(axis=-1), logits, bound.outputs[contract.HIDDEN_TAPS][0])

    def set_images(self, images: ImageRows) -> None:
        """See `edgellm.device_runtime.session.Session.set_images`."""
        self._shown.put(images)

    def compact(self, length: int, rows: I64) -> None:
        """See `edgellm.device_runtime.session.Session.compact`."""
        self._cache.compact(length, rows)

    def read_rows(self, length: int) -> np.ndarray:
        """See `edgellm.device_runtime.session.Session.read_rows`."""
        return self._cache.read_rows(length)

    def write_rows(self, rows: np.ndarray) -> None:
        """See `edgellm.device_runtime.session.Session.write_rows`."""
        self._cache.write_rows(rows)

    def _bind(self, rows: int, head_rows: int) -> _BoundPass:
        """Bind the first graph that takes so many rows; bindings of large passes are not kept."""
        graph = next((g for g in self._graphs if rows <= g.max_rows), self._graphs[-1])
        shapes = {
            contract.LOGITS: (1, head_rows, self._vocab_size),
            contract.HIDDEN_TAPS: (1, rows, self._tap_width),
        }
        outputs = {
            name: self._scratch.take(name, shape, np.float32) for name, shape in shapes.items()
        }
        inputs = _row_inputs(rows, rows, head_rows, self._axes)
        bound = _BoundPass(graph.session, self._cache, self._shown, inputs, outputs)
        if rows <= KEPT_ROWS:
            self._passes[rows, head_rows] = bound
        return bound


class OnnxRuntimeDraftSession:
    """A draft's graphs with their KV cache."""

    def __init__(
        self,
        graph: ort.InferenceSession,
        fuse: ort.InferenceSession | None,
        spec: DecoderSpec,
        capacity: int,
    ) -> None:
        """Allocate the cache; without `fuse` the features are the hidden rows."""
        self.capacity = capacity
        self._graph, self._fuse = graph, fuse
        self._hidden_size = spec.hidden_size
        self._axes, self._shown = spec.position_axes, Shown(spec)
        self._cache = _Cache(spec.kv, capacity)
        self._scratch = _Scratch()
        self._passes: dict[tuple[int, int, int, int], _BoundPass] = {}

    def set_images(self, images: ImageRows) -> None:
        """See `edgellm.device_runtime.session.Session.set_images`."""
        self._shown.put(images)

    def read_rows(self, length: int) -> np.ndarray:
        """See `edgellm.device_runtime.session.Session.read_rows`."""
        return self._cache.read_rows(length)

    def write_rows(self, rows: np.ndarray) -> None:
        """See `edgellm.device_runtime.session.Session.write_rows`."""
        self._cache.write_rows(rows)

    def fuse(self, taps: F32) -> F32:
        """See `edgellm.device_runtime.session.DraftSession.fuse`."""
        if self._fuse is None:
            return taps
        return run_arrays(self._fuse, {contract.HIDDEN_TAPS: taps[None]})[contract.DRAFT_HIDDEN][0]

    def run(
        self,
        token_ids: I64,
        hidden: F32,
        write_index: int,
        output_rows: I64,
        *,
        top_k: int,
        position_ids: I64 | None = None,
        tree_mask: Bool | None = None,
    ) -> DraftResult:
        """See `edgellm.device_runtime.session.DraftSession.run`."""
        rows = len(token_ids)
        require_room(self.capacity, write_index, rows)
        columns = rows if tree_mask is None else tree_mask.shape[1]
        sizes = rows, columns, len(output_rows), top_k
        bound = self._passes.get(sizes) or self._bind(*sizes)
        bound.place(write_index, position_ids, tree_mask)
        bound.inputs[contract.INPUT_IDS][0] = token_ids
        bound.inputs[contract.DRAFT_HIDDEN][0] = hidden
        bound.inputs[contract.LOGITS_INDEX][:] = output_rows
        bound.run()
        names = contract.CANDIDATE_IDS, contract.CANDIDATE_LOG_PROBS, contract.RECYCLED_HIDDEN
        return DraftResult(*(bound.outputs[name][0] for name in names))

    def _bind(self, rows: int, columns: int, output_rows: int, top_k: int) -> _BoundPass:
        inputs = _row_inputs(rows, columns, output_rows, self._axes)
        inputs[contract.DRAFT_HIDDEN] = np.zeros((1, rows, self._hidden_size), np.float32)
        inputs[contract.TOP_K] = np.array([top_k], np.int64)
        wide, hidden = (1, output_rows, top_k), (1, output_rows, self._hidden_size)
        outputs = {
            contract.CANDIDATE_IDS: self._scratch.take("ids", wide, np.int64),
            contract.CANDIDATE_LOG_PROBS: self._scratch.take("log_probs", wide, np.float32),
            contract.RECYCLED_HIDDEN: self._scratch.take("hidden", hidden, np.float32),
        }
        bound = _BoundPass(self._graph, self._cache, self._shown, inputs, outputs)
        if rows <= KEPT_ROWS:
            self._passes[rows, columns, output_rows, top_k] = bound
        return bound
