"""Passes over ONNX Runtime graphs with IO binding: the KV cache is written in place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgellm import contract
from edgellm.device_runtime.runners import FetchedOutputs
from edgellm.device_runtime.runners.onnxruntime_cpu.cache import HostCache
from edgellm.device_runtime.runners.onnxruntime_graphs import KEPT_ROWS, Held, dtype_of
from edgellm.manifest import KVCacheSpec


@dataclass(frozen=True, slots=True)
class LoadedGraph:
    """One ONNX Runtime session and the most rows it is meant for; 0: any number."""

    session: ort.InferenceSession
    max_rows: int = 0


class OnnxRuntimeRunner:
    """See `runners.Runner`: graphs that share one KV cache."""

    def __init__(
        self, graphs: Sequence[LoadedGraph], kv: KVCacheSpec | None = None, capacity: int = 0
    ) -> None:
        """Allocate the cache; `graphs` ascend by `max_rows`."""
        self.cache = HostCache(kv, capacity) if kv is not None else None
        self._graphs, self._held, self._scratch = graphs, Held(), _Scratch()
        self._bound: dict[tuple[object, ...], _BoundPass] = {}
        self._latest: FetchedOutputs | None = None

    def hold(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        """See `runners.Runner`."""
        self._held.replace({name: np.asarray(array, np.float32) for name, array in inputs.items()})

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> FetchedOutputs:
        """See `runners.Runner`; outputs lie in memory that all passes share."""
        if self._latest is not None:
            self._latest.expire()
        if self.cache is not None:
            _check_positions(inputs)
        key = (
            *(array.shape for array in inputs.values()),
            inputs[contract.TOP_K][0] if contract.TOP_K in inputs else 0,
        )
        bound = self._bound.get(key)
        if bound is None:
            bound = _BoundPass(self._graph(inputs), self.cache, self._scratch, inputs)
            if bound.largest <= KEPT_ROWS:
                self._bound[key] = bound
        bound.run(inputs, self._held)
        self._latest = FetchedOutputs(bound.outputs, bound.fetch)
        return self._latest

    def _graph(self, inputs: Mapping[str, NDArray[Any]]) -> ort.InferenceSession:
        """The first that takes so many rows."""
        rows = inputs[contract.INPUT_IDS].shape[1] if contract.INPUT_IDS in inputs else 0
        return next((g for g in self._graphs if rows <= g.max_rows), self._graphs[-1]).session


def _check_positions(inputs: Mapping[str, NDArray[Any]]) -> None:
    """GroupQueryAttention ignores explicit positions while the cache is empty."""
    positions = inputs[contract.POSITION_IDS]
    if inputs[contract.WRITE_INDEX][0] or len(positions) > 1:
        return
    if not np.array_equal(positions[0], np.arange(positions.shape[1])):
        raise ValueError("the first rows of a cache must have the positions 0, 1, 2, ...")


class _Scratch:
    """Output memory that all passes of a runner share: results live until the next one."""

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
        cache: HostCache | None,
        scratch: _Scratch,
        inputs: Mapping[str, NDArray[Any]],
    ) -> None:
        self._session, self._binding, self._version = session, session.io_binding(), 0
        self._values: list[ort.OrtValue] = []
        sizes = self._bind_inputs(inputs)
        self.largest = max(sizes.values(), default=0)  # of the sizes that vary
        if cache is not None:
            cache.bind(self._binding)
        self.outputs: dict[str, NDArray[Any] | None] = {}  # None: ONNX Runtime allocates it
        self._order = [output.name for output in session.get_outputs()]
        for output in session.get_outputs():
            if not output.name.startswith(contract.PRESENT):
                self._bind_output(output, sizes, scratch)

    def _bind_inputs(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, int]:
        """Make room for what the graph takes; its symbols' sizes."""
        sizes = {}
        if contract.TOP_K in inputs:
            sizes[contract.CANDIDATES] = int(inputs[contract.TOP_K][0])
        given = dict(inputs)
        if contract.INPUT_IDS in inputs and contract.TREE_MASK not in inputs:
            given[contract.TREE_MASK] = np.tri(inputs[contract.INPUT_IDS].shape[1], dtype=np.bool_)
        self._inputs: dict[str, NDArray[Any]] = {}
        for value in self._session.get_inputs():
            if value.name in given:
                array = np.array(given[value.name], dtype_of(value.type), order="C")
                sizes |= {
                    symbol: size
                    for symbol, size in zip(value.shape, array.shape, strict=True)
                    if isinstance(symbol, str)
                }
                self._inputs[value.name] = array
                self._binding.bind_ortvalue_input(value.name, self._value(array))
        return sizes

    def _bind_output(self, output: ort.NodeArg, sizes: dict[str, int], scratch: _Scratch) -> None:
        dims = [sizes.get(dim, dim) for dim in output.shape]
        shape = tuple(dim for dim in dims if isinstance(dim, int))
        if not dims or len(shape) < len(dims):
            self.outputs[output.name] = None
            self._binding.bind_output(output.name, "cpu")
            return
        array = scratch.take(output.name, shape, dtype_of(output.type))
        self.outputs[output.name] = array
        self._binding.bind_ortvalue_output(output.name, self._value(array))

    def _value(self, array: np.ndarray) -> ort.OrtValue:
        self._values.append(ort.OrtValue.ortvalue_from_numpy(array))
        return self._values[-1]

    def run(self, inputs: Mapping[str, NDArray[Any]], held: Held) -> None:
        """Compute the outputs."""
        for name, array in inputs.items():
            if name in self._inputs:
                self._inputs[name][...] = array
        self._version = held.bind(self._binding, self._version)
        self._session.run_with_iobinding(self._binding)

    def fetch(self, name: str) -> NDArray[Any]:
        """An output."""
        array = self.outputs[name]
        if array is None:
            array = self._binding.get_outputs()[self._order.index(name)].numpy()
        return array.astype(np.float32) if array.dtype == np.float16 else array
