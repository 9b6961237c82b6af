"""Runners of ONNX Runtime graphs on the CPU, with IO binding and KV caches written in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.model_spec import KVCacheSpec
from edgellm.device_runtime.runners import Cache, FetchedOutputs, Outputs
from edgellm.device_runtime.runners.onnxruntime_cpu.batch_packing import joined, share
from edgellm.device_runtime.runners.onnxruntime_cpu.block_kv_cache import BlockKVCache, BlockPool
from edgellm.device_runtime.runners.onnxruntime_cpu.bound_pass import (
    BoundPass,
    Ports,
    Scratch,
    ports_of,
)
from edgellm.device_runtime.runners.onnxruntime_cpu.cache import ContiguousKVCache
from edgellm.device_runtime.runners.onnxruntime_graphs import KEPT_ROWS, Held


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
        return OnnxRuntimeRunner(graphs, kv, capacity, num_sequences)
    return BlockKVRunner(graphs, BlockPool(kv, capacity, num_sequences))


class OnnxRuntimeRunner:
    """See `runners.Runner`: graphs that share one KV cache."""

    def __init__(
        self,
        graphs: Sequence[LoadedGraph],
        kv: KVCacheSpec | None = None,
        capacity: int = 0,
        num_sequences: int = 1,
    ) -> None:
        """Allocate the cache; `graphs` are in ascending order of `max_rows`."""
        has_batch_axis = graphs[0].session.get_inputs()[0].shape[:1] == [graph_io.ANSWERS]
        self.max_sequences = num_sequences if has_batch_axis else 1  # see `runners.LimitsBatch`
        own = ContiguousKVCache(kv, capacity) if kv is not None else None
        self.cache: Cache | None = own
        self._caches: ContiguousKVCache | BlockPool | None = own  # bound by passes
        self._graphs, self._held, self._scratch = graphs, Held(), Scratch()
        self._images: dict[str, NDArray[Any]] = {}
        self._bound: dict[tuple[object, ...], BoundPass] = {}
        self._known: set[tuple[object, ...]] = set()
        self._opened: dict[ort.InferenceSession, Ports] = {}
        self._latest: FetchedOutputs | None = None

    def hold(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        """See `runners.Runner`."""
        self._images = {name: np.asarray(array, np.float32) for name, array in inputs.items()}
        self._held.replace(self._images)

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> FetchedOutputs:
        """See `runners.Runner`; all passes share the memory of outputs."""
        if self.cache is not None:
            _check_positions(inputs)
        return self._run(inputs)

    def _run(self, inputs: Mapping[str, NDArray[Any]]) -> FetchedOutputs:
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

    def _bind(self, key: tuple[object, ...], inputs: Mapping[str, NDArray[Any]]) -> BoundPass:
        """A cached pass for repeated sizes; for new sizes one that shares a binding."""
        session = self._graph(inputs)
        if session not in self._opened:
            self._opened[session] = ports_of(session, self._new_binding(session))
        ports = self._opened[session]
        if key in self._known:
            binding = self._new_binding(session)
            bound = BoundPass(session, ports, binding, self._scratch, inputs)
            if len(self._bound) == _MAX_PASSES:
                del self._bound[next(iter(self._bound))]
            self._bound[key] = bound
            return bound
        bound = BoundPass(session, ports, ports.binding, self._scratch, inputs)
        if bound.largest <= KEPT_ROWS:
            if len(self._known) == _KNOWN_SIZES:
                self._known.clear()
            self._known.add(key)
        return bound

    def _new_binding(self, session: ort.InferenceSession) -> ort.IOBinding:
        binding = session.io_binding()
        if self._caches is not None:
            self._caches.bind(binding)
        return binding

    def _graph(self, inputs: Mapping[str, NDArray[Any]]) -> ort.InferenceSession:
        """The first graph that takes this number of tokens."""
        rows = inputs[graph_io.INPUT_IDS].shape[1] if graph_io.INPUT_IDS in inputs else 0
        return next((g for g in self._graphs if rows <= g.max_rows), self._graphs[-1]).session


class BlockKVRunner(OnnxRuntimeRunner):
    """See `runners.SharedRunner`: graphs with edgellm's kernels and a KV cache in blocks."""

    def __init__(self, graphs: Sequence[LoadedGraph], pages: BlockPool) -> None:
        """Args: `graphs`, in ascending order of `max_rows`, and the blocks."""
        super().__init__(graphs)
        self._caches = self._pages = pages
        self._own = self.cache = pages.new_cache()
        self._adapters: dict[str, NDArray[Any]] = {}
        layers = _adapted_layers(graphs[0].session)
        if layers:
            none = np.zeros((1, layers, 3), np.int64)
            self.hold_adapters(np.zeros(1, np.float32), none)

    def hold(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        """See `runners.Runner`."""
        super().hold(inputs)
        self._held.replace({**self._images, **self._adapters})

    def hold_adapters(self, weights: NDArray[np.float32], table: NDArray[np.int64]) -> None:
        """See `runners.TakesAdapters`."""
        self._adapters = {graph_io.ADAPTER_WEIGHTS: weights, graph_io.ADAPTER_TABLE: table}
        self._held.replace({**self._images, **self._adapters})

    def _run(self, inputs: Mapping[str, NDArray[Any]]) -> FetchedOutputs:
        if self._adapters and graph_io.ADAPTER_ROWS not in inputs:
            none = np.zeros(inputs[graph_io.INPUT_IDS].shape[1], np.int64)
            inputs = {**inputs, graph_io.ADAPTER_ROWS: none}
        return super()._run(inputs)

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> FetchedOutputs:
        """See `runners.Runner`: runs the sequence of `cache`."""
        self._own.reserve(int(inputs[graph_io.WRITE_INDEX][0]), inputs[graph_io.INPUT_IDS].shape[1])
        return self._run(joined([(self._own, inputs)]))

    @property
    def num_sequences(self) -> int:
        """See `runners.SharedRunner`."""
        return self._pages.num_sequences

    @property
    def page_rows(self) -> int:
        """See `runners.SharedRunner`."""
        return self._pages.page_rows

    @property
    def free_rows(self) -> int:
        """See `runners.SharedRunner`."""
        return self._pages.free_rows

    def free_rows_without(self, caches: Sequence[Cache]) -> int:
        """See `runners.SharedRunner`."""
        return self._pages.free_rows_without([_paged(cache) for cache in caches])

    @property
    def pass_rows(self) -> int:
        """See `runners.SharedRunner`."""
        return self._pages.pass_rows

    def new_cache(self) -> BlockKVCache:
        """See `runners.SharedRunner`."""
        return self._pages.new_cache()

    def reserve(self, cache: Cache, write_index: int, rows: int) -> None:
        """See `runners.SharedRunner`."""
        assert isinstance(cache, BlockKVCache)
        cache.reserve(write_index, rows)

    def least_rows(self, cache: Cache) -> int:
        """See `runners.SharedRunner`."""
        return _paged(cache).least_rows

    def write_rows(self, cache: Cache, rows: NDArray[Any], least_rows: int) -> None:
        """See `runners.SharedRunner`."""
        _paged(cache).write_rows(rows, least_rows)

    def fork(self, cache: Cache) -> BlockKVCache:
        """See `runners.SharedRunner`."""
        return _paged(cache).fork()

    def release(self, cache: Cache) -> None:
        """See `runners.SharedRunner`."""
        _paged(cache).release()

    def run_many(self, parts: Sequence[tuple[Cache, Mapping[str, NDArray[Any]]]]) -> list[Outputs]:
        """See `runners.SharedRunner`."""
        found = self._run(joined(parts))
        return [found] if len(parts) == 1 else share(found, [inputs for _, inputs in parts])


def _adapted_layers(session: ort.InferenceSession) -> int:
    """The number of layers with LoRA."""
    tables = (each.shape for each in session.get_inputs() if each.name == graph_io.ADAPTER_TABLE)
    return next((int(shape[1]) for shape in tables), 0)


def _paged(cache: Cache) -> BlockKVCache:
    assert isinstance(cache, BlockKVCache)
    return cache


def _check_positions(inputs: Mapping[str, NDArray[Any]]) -> None:
    """Check positions, since GroupQueryAttention ignores them while the cache is empty."""
    positions = inputs[graph_io.POSITION_IDS]
    if inputs[graph_io.WRITE_INDEX][0] or len(positions) > 1:
        return
    if not np.array_equal(positions[0], np.arange(positions.shape[1])):
        raise ValueError("the first tokens of a cache must have the positions 0, 1, 2, ...")
