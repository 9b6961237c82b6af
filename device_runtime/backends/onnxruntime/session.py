"""Passes over ONNX Runtime graphs with IO binding: the KV cache is written in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort

from edgellm import contract
from edgellm.contract import BrokenArtifactError, DecoderSpec, LimitError
from edgellm.device_runtime.session import F32, I64, Bool, PassResult

_KEPT_ROWS = 128  # bindings of larger passes (prefills) are not kept


@dataclass(frozen=True, slots=True)
class LoadedGraph:
    """One ONNX Runtime session and the most rows it is meant for."""

    session: ort.InferenceSession
    max_rows: int


def load_graph(path: Path, *, threads: int = 0, optimize: bool = True) -> ort.InferenceSession:
    """Load a graph on the CPU; `threads` 0 takes all cores.

    Raises:
        BrokenArtifactError: ONNX Runtime does not take the file.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - the classes are private to the extension module
        raise BrokenArtifactError(
            f"ONNX Runtime {ort.__version__} cannot load {path}: {str(error).splitlines()[0]}",
            hint="build the engine again on this machine",
        ) from None


class OnnxRuntimeSession:
    """Graphs of one engine that share one KV cache."""

    def __init__(self, graphs: Sequence[LoadedGraph], spec: DecoderSpec, capacity: int) -> None:
        """Allocate the cache; `graphs` ascend by `max_rows`."""
        self.capacity = capacity
        self._graphs = graphs
        self._vocab_size = spec.vocab_size
        kv = spec.kv
        shape = (1, kv.num_kv_heads, capacity, kv.head_dim)
        names = [(layer, part) for layer in range(kv.num_layers) for part in ("key", "value")]
        # ONNX Runtime does not keep the arrays alive that it is given.
        self._arrays = {name: np.zeros(shape, kv.dtype) for name in names}
        self._cache = {
            name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in self._arrays.items()
        }
        self._passes: dict[tuple[int, int], _BoundPass] = {}  # by rows and head rows

    def run(
        self,
        token_ids: I64,
        write_index: int,
        logits_index: I64,
        *,
        position_ids: I64 | None = None,
        tree_mask: Bool | None = None,
    ) -> PassResult:
        """See `edgellm.device_runtime.session.Session.run`."""
        rows = len(token_ids)
        if write_index + rows > self.capacity:
            raise LimitError(
                f"{write_index} + {rows} rows exceed the KV capacity of {self.capacity}"
            )
        bound = self._passes.get((rows, len(logits_index))) or self._bind(rows, len(logits_index))
        if position_ids is None:
            np.add(bound.offsets, write_index, out=bound.position_ids[0])
        elif write_index == 0 and not np.array_equal(position_ids, bound.offsets):
            # GroupQueryAttention ignores explicit positions while the cache is empty.
            raise ValueError("the first rows of a cache must have the positions 0, 1, 2, ...")
        else:
            bound.position_ids[0] = position_ids
        bound.input_ids[0] = token_ids
        bound.write_index[0] = write_index
        bound.logits_index[:] = logits_index
        if tree_mask is None:
            bound.reset_mask()
        else:
            bound.set_mask(tree_mask)
        bound.run()
        return PassResult(bound.logits[0].argmax(axis=-1), bound.logits[0])

    def _bind(self, rows: int, head_rows: int) -> _BoundPass:
        """Bind the first graph that takes so many rows; bindings of large passes are not kept."""
        graph = next((g for g in self._graphs if rows <= g.max_rows), self._graphs[-1])
        bound = _BoundPass(graph.session, self._cache, rows, head_rows, self._vocab_size)
        if rows <= _KEPT_ROWS:
            self._passes[rows, head_rows] = bound
        return bound


class _BoundPass:
    """Buffers and IO binding of one graph for a number of rows; nothing is allocated per pass."""

    def __init__(
        self,
        session: ort.InferenceSession,
        cache: dict[tuple[int, str], ort.OrtValue],
        rows: int,
        head_rows: int,
        vocab_size: int,
    ) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._values: list[ort.OrtValue] = []
        self.input_ids = np.zeros((1, rows), np.int64)
        self.position_ids = np.zeros((1, rows), np.int64)
        self.offsets = np.arange(rows)
        self.write_index = np.zeros(1, np.int64)
        self.tree_mask = np.tri(rows, dtype=np.bool_)
        self.logits_index = np.zeros(head_rows, np.int64)
        self.logits: F32 = np.empty((1, head_rows, vocab_size), np.float32)
        self._is_causal = True
        taken = {value.name for value in session.get_inputs()}
        for name, array in (
            (contract.INPUT_IDS, self.input_ids),
            (contract.POSITION_IDS, self.position_ids),
            (contract.WRITE_INDEX, self.write_index),
            (contract.TREE_MASK, self.tree_mask),
            (contract.LOGITS_INDEX, self.logits_index),
        ):
            if name in taken:
                self._binding.bind_ortvalue_input(name, self._value(array))
        self._binding.bind_ortvalue_output(contract.LOGITS, self._value(self.logits))
        for (layer, part), value in cache.items():
            self._binding.bind_ortvalue_input(contract.past_name(layer, part), value)
            self._binding.bind_ortvalue_output(contract.present_name(layer, part), value)

    def _value(self, array: np.ndarray) -> ort.OrtValue:
        self._values.append(ort.OrtValue.ortvalue_from_numpy(array))
        return self._values[-1]

    def set_mask(self, mask: Bool) -> None:
        """Use a tree mask [S, S]."""
        self.tree_mask[:] = mask
        self._is_causal = False

    def reset_mask(self) -> None:
        """Go back to the causal mask."""
        if not self._is_causal:
            self.tree_mask[:] = np.tri(len(self.tree_mask), dtype=np.bool_)
            self._is_causal = True

    def run(self) -> None:
        """Compute `logits`."""
        self._session.run_with_iobinding(self._binding)
