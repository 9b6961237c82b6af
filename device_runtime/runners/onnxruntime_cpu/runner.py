"""Runners of ONNX Runtime graphs on the CPU, with IO binding and KV caches written in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.model_spec import KVCacheSpec
from edgellm.device_runtime.runners.kv_cache import KVCache
from edgellm.device_runtime.runners.onnxruntime_cpu.batch_packing import joined, share
from edgellm.device_runtime.runners.onnxruntime_cpu.block_kv_cache import BlockPool, in_pages
from edgellm.device_runtime.runners.onnxruntime_cpu.bound_pass import (
    BoundPass,
    Ports,
    Scratch,
    ports_of,
)
from edgellm.device_runtime.runners.onnxruntime_cpu.contiguous_kv_cache import ContiguousKVCache
from edgellm.device_runtime.runners.onnxruntime_graphs import KEPT_ROWS, Held, dtype_of
from edgellm.device_runtime.runners.onnxruntime_import import ort
from edgellm.device_runtime.runners.outputs import FetchedOutputs, Outputs
from edgellm.device_runtime.runners.runner import Inputs, Runner
from edgellm.device_runtime.runners.slot_kv_cache import SlotPool


@dataclass(frozen=True, slots=True)
class LoadedGraph:
    """An ONNX Runtime session and its maximum tokens of a pass; 0: unlimited."""

    session: ort.InferenceSession
    max_rows: int = 0


_MAX_PASSES = 256  # cached bindings of passes of different sizes
_KNOWN_SIZES = 4096  # sizes of passes that were run once


def open_runner(
    graphs: Sequence[LoadedGraph],
    kv: KVCacheSpec | None = None,
    capacity: int = 0,
    num_sequences: int = 1,
) -> OnnxRuntimeRunner:
    """A runner of graphs in ascending order of `max_rows`.

    Args:
        graphs: of one role.
        kv: their KV cache, if any.
        capacity: maximum positions of a sequence.
        num_sequences: the cache holds this number of sequences of full capacity.
    """
    if kv is None or kv.pages is None:
        return OnnxRuntimeRunner(
            graphs=graphs, kv=kv, capacity=capacity, num_sequences=num_sequences
        )
    return BlockKVRunner(graphs, BlockPool(kv, capacity, num_sequences), num_sequences)


class OnnxRuntimeRunner(Runner):
    """Runs graphs with a contiguous KV cache, or without one."""

    def __init__(
        self,
        *,
        graphs: Sequence[LoadedGraph],
        kv: KVCacheSpec | None = None,
        capacity: int = 0,
        num_sequences: int = 1,
    ) -> None:
        """Allocate the cache; `graphs` are in ascending order of `max_rows`."""
        has_batch_axis = graphs[0].session.get_inputs()[0].shape[:1] == [graph_io.ANSWERS]
        self.max_batch_size = num_sequences if has_batch_axis else 1
        self._memory: ContiguousKVCache | BlockPool | None = None  # bound by passes
        if kv is not None:
            self._memory = ContiguousKVCache(kv, capacity)
            self.kv_pool = SlotPool(self._memory, 1, capacity)
        self._graphs, self._held, self._scratch = graphs, Held(), Scratch()
        self._images: dict[str, NDArray[Any]] = {}
        self._bound: dict[tuple[object, ...], BoundPass] = {}
        self._known: set[tuple[object, ...]] = set()
        self._opened: dict[ort.InferenceSession, Ports] = {}
        self._latest: FetchedOutputs | None = None

    def hold(self, inputs: Inputs) -> None:
        """See `Runner`."""
        self._images = {name: np.asarray(array, np.float32) for name, array in inputs.items()}
        self._held.replace(self._images)

    def hold_window(self, cross: Inputs, place: int) -> None:
        """See `Runner`; it holds one window."""
        assert place == 0
        self.hold(cross)

    def run(self, inputs: Inputs) -> FetchedOutputs:
        """See `Runner`; all passes share the memory of outputs."""
        if self.kv_pool is not None:
            _check_positions(inputs)
        return self._run(inputs)

    def _run(self, inputs: Inputs) -> FetchedOutputs:
        """Run one pass with inputs by the graph's names."""
        if self._latest is not None:
            self._latest.expire()
        top_k = inputs[graph_io.TOP_K][0] if graph_io.TOP_K in inputs else 0
        key = (top_k, *[array.shape for array in inputs.values()])
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bind(key, inputs)
        bound.run(inputs, self._held)
        self._latest = FetchedOutputs(bound.outputs, bound.fetch)
        return self._latest

    def _bind(self, key: tuple[object, ...], inputs: Inputs) -> BoundPass:
        """A cached pass for repeated sizes; for new sizes one that shares a binding."""
        session = self._graph(inputs)
        if session not in self._opened:
            self._opened[session] = ports_of(session, self._new_binding(session))
        ports = self._opened[session]
        if key in self._known:
            binding = self._new_binding(session)
            bound = BoundPass(
                session=session, ports=ports, binding=binding, scratch=self._scratch, inputs=inputs
            )
            if len(self._bound) == _MAX_PASSES:
                del self._bound[next(iter(self._bound))]
            self._bound[key] = bound
            return bound
        bound = BoundPass(
            session=session,
            ports=ports,
            binding=ports.binding,
            scratch=self._scratch,
            inputs=inputs,
        )
        if bound.largest <= KEPT_ROWS:
            if len(self._known) == _KNOWN_SIZES:
                self._known.clear()
            self._known.add(key)
        return bound

    def _new_binding(self, session: ort.InferenceSession) -> ort.IOBinding:
        binding = session.io_binding()
        if self._memory is not None:
            self._memory.bind(binding)
        return binding

    def _graph(self, inputs: Inputs) -> ort.InferenceSession:
        """The first graph that takes this number of tokens."""
        rows = inputs[graph_io.INPUT_IDS].shape[1] if graph_io.INPUT_IDS in inputs else 0
        return next((g for g in self._graphs if rows <= g.max_rows), self._graphs[-1]).session


class BlockKVRunner(OnnxRuntimeRunner):
    """Runs graphs with edgellm's kernels, with a KV cache in blocks."""

    def __init__(self, graphs: Sequence[LoadedGraph], pool: BlockPool, num_sequences: int) -> None:
        """Args: `graphs`, in ascending order of `max_rows`, the blocks, the maximum batch size."""
        super().__init__(graphs=graphs)
        self._pages = {
            each.name: (each.shape, dtype_of(each.type))
            for each in graphs[0].session.get_inputs()
            if each.name.startswith(graph_io.CROSS)
        }
        self.kv_pool, self.max_batch_size = pool, num_sequences
        names = {each.name for each in graphs[0].session.get_inputs()}
        self.num_windows = num_sequences if graph_io.WINDOW_PLACES in names else 1
        self._memory = self._blocks = pool
        self._adapters: dict[str, NDArray[Any]] = {}
        layers = _adapted_layers(graphs[0].session)
        if layers:
            none = np.zeros((1, layers, 3), np.int64)
            self.hold_adapters(np.zeros(1, np.float32), none)

    def hold(self, inputs: Inputs) -> None:
        """See `Runner`."""
        self._images = {
            name: in_pages(array, *self._pages[name], self.num_windows)
            if name in self._pages
            else np.asarray(array, np.float32)
            for name, array in inputs.items()
        }
        self._held.replace({**self._images, **self._adapters})

    def hold_window(self, cross: Inputs, place: int) -> None:
        """See `Runner`; passes read the memory that is written here."""
        if self.num_windows == 1:
            self.hold(cross)
            return
        for name, array in cross.items():
            pages = in_pages(array, *self._pages[name], 1)
            self._images[name][place * len(pages) : (place + 1) * len(pages)] = pages

    def hold_adapters(self, weights: NDArray[np.float32], table: NDArray[np.int64]) -> None:
        """See `Runner`."""
        self._adapters = {graph_io.ADAPTER_WEIGHTS: weights, graph_io.ADAPTER_TABLE: table}
        self._held.replace({**self._images, **self._adapters})

    def _run(self, inputs: Inputs) -> FetchedOutputs:
        if self._adapters and graph_io.ADAPTER_ROWS not in inputs:
            none = np.zeros(inputs[graph_io.INPUT_IDS].shape[1], np.int64)
            inputs = {**inputs, graph_io.ADAPTER_ROWS: none}
        if self._pages and graph_io.WINDOW_PLACES not in inputs:
            first = np.zeros(len(inputs[graph_io.SEQUENCES]), np.int64)
            inputs = {**inputs, graph_io.WINDOW_PLACES: first}
        return super()._run(inputs)

    def num_packable(self, lengths: Sequence[int]) -> int:
        """See `Runner`; the kernels compute each token alike, whatever is in its pass."""
        return max(self._blocks.num_fitting(lengths), 1)

    def run_batch(self, parts: Sequence[tuple[KVCache, Inputs]]) -> list[Outputs]:
        """See `Runner`."""
        found = self._run(joined(parts))
        return [found] if len(parts) == 1 else share(found, [inputs for _, inputs in parts])


def _adapted_layers(session: ort.InferenceSession) -> int:
    """The number of layers with LoRA."""
    tables = (each.shape for each in session.get_inputs() if each.name == graph_io.ADAPTER_TABLE)
    return next((int(shape[1]) for shape in tables), 0)


def _check_positions(inputs: Inputs) -> None:
    """Check positions, since GroupQueryAttention ignores them while the cache is empty."""
    positions = inputs[graph_io.POSITION_IDS]
    if inputs[graph_io.WRITE_INDEX][0] or len(positions) > 1:
        return
    if not np.array_equal(positions[0], np.arange(positions.shape[1])):
        raise ValueError("the first tokens of a cache must have the positions 0, 1, 2, ...")
