"""Passes of fixed sizes over an ONNX Runtime graph, with preallocated buffers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.device_runtime.runners.onnxruntime_cpu.batch_packing import NOT_ROWS
from edgellm.device_runtime.runners.onnxruntime_graphs import Held, dtype_of
from edgellm.device_runtime.runners.onnxruntime_import import ort


def _is_bound(name: str) -> bool:
    """Whether an array is bound without a copy: recurrent states are large."""
    return name.startswith(graph_io.STATES)


class Scratch:
    """Output memory that all passes of a runner share: results are valid until the next pass."""

    def __init__(self) -> None:
        self._blocks: dict[str, np.ndarray] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        """The memory of an output of the next pass."""
        size = math.prod(shape)
        block = self._blocks.get(name)
        if block is None or block.size < size:
            block = self._blocks[name] = np.empty(size, dtype)
        return block[:size].reshape(shape)


class _Port(NamedTuple):
    """An input or output."""

    name: str
    dtype: type
    shape: Sequence[Any]  # sizes, and symbols by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Inputs and outputs of a session (slow to query), and a binding for rare sizes."""

    inputs: tuple[_Port, ...]
    outputs: tuple[_Port, ...]  # without caches and `lent`
    order: tuple[str, ...]  # names of all outputs
    lent: frozenset[str]  # inputs and outputs that are bound without a copy
    binding: ort.IOBinding


def ports_of(session: ort.InferenceSession, binding: ort.IOBinding) -> Ports:
    """The ports of a session; `binding` has its caches bound."""

    def of(values: Sequence[ort.NodeArg], taken: tuple[str, ...]) -> tuple[_Port, ...]:
        return tuple(
            _Port(value.name, dtype_of(value.type), value.shape)
            for value in values
            if not value.name.startswith(taken)
        )

    inputs, outputs = session.get_inputs(), session.get_outputs()
    return Ports(
        inputs=of(inputs, (graph_io.PAST, *graph_io.STATES)),
        outputs=of(outputs, (graph_io.PRESENT, graph_io.NEXT_STATE)),
        order=tuple(value.name for value in outputs),
        lent=frozenset(value.name for value in (*inputs, *outputs) if _is_bound(value.name)),
        binding=binding,
    )


class BoundPass:
    """Buffers and IO binding of one graph for fixed sizes; nothing is allocated per pass."""

    def __init__(
        self,
        *,
        session: ort.InferenceSession,
        ports: Ports,
        binding: ort.IOBinding,
        scratch: Scratch,
        inputs: Mapping[str, NDArray[Any]],
    ) -> None:
        self._session, self._binding, self._version = session, binding, 0
        self._values: list[ort.OrtValue] = []
        self._ports = ports
        sizes = self._bind_inputs(inputs)
        # The largest of the sizes that depend on the number of tokens.
        self.largest = max((s for n, s in sizes.items() if n not in NOT_ROWS), default=0)
        self.outputs: dict[str, NDArray[Any] | None] = {}  # None: ONNX Runtime allocates it
        for port in ports.outputs:
            self._bind_output(port, sizes, scratch)

    def _bind_inputs(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, int]:
        """Allocate and bind the graph's inputs; returns the sizes of its symbols."""
        sizes = {}
        if graph_io.TOP_K in inputs:
            sizes[graph_io.CANDIDATES] = count = int(inputs[graph_io.TOP_K][0])
            sizes[graph_io.LINKED] = min(count, graph_io.MAX_LINKED)
        given = dict(inputs)
        if graph_io.INPUT_IDS in inputs and graph_io.TREE_MASK not in inputs:
            given[graph_io.TREE_MASK] = np.tri(inputs[graph_io.INPUT_IDS].shape[1], dtype=np.bool_)
        self._inputs: dict[str, NDArray[Any]] = {}
        for name, dtype, dims in self._ports.inputs:
            if name in given:
                array = np.array(given[name], dtype, order="C")
                sizes |= {
                    symbol: size
                    for symbol, size in zip(dims, array.shape, strict=True)
                    if isinstance(symbol, str)
                }
                self._inputs[name] = array
                self._binding.bind_ortvalue_input(name, self._value(array))
        return sizes

    def _bind_output(self, output: _Port, sizes: dict[str, int], scratch: Scratch) -> None:
        dims = [sizes.get(dim, dim) for dim in output.shape]
        shape = tuple(dim for dim in dims if isinstance(dim, int))
        if not dims or len(shape) < len(dims):
            self.outputs[output.name] = None
            self._binding.bind_output(output.name, "cpu")
            return
        array = scratch.take(output.name, shape, output.dtype)
        self.outputs[output.name] = array
        self._binding.bind_ortvalue_output(output.name, self._value(array))

    def _value(self, array: np.ndarray) -> ort.OrtValue:
        self._values.append(ort.OrtValue.ortvalue_from_numpy(array))
        return self._values[-1]

    def run(self, inputs: Mapping[str, NDArray[Any]], held: Held) -> None:
        """Run the pass."""
        for name, array in inputs.items():
            if name in self._inputs:
                self._inputs[name][...] = array
        lent = [*self._lend(inputs)] if self._ports.lent else ()
        self._version = held.bind(self._binding, self._version)
        self._session.run_with_iobinding(self._binding)
        del lent

    def _lend(self, inputs: Mapping[str, NDArray[Any]]) -> Iterator[ort.OrtValue]:
        """Bind inputs and outputs without a copy; the values must outlive the pass."""
        for name in self._ports.lent & inputs.keys():
            value = ort.OrtValue.ortvalue_from_numpy(inputs[name])
            if name.startswith(graph_io.NEXT_STATE):
                self._binding.bind_ortvalue_output(name, value)
            else:
                self._binding.bind_ortvalue_input(name, value)
            yield value

    def fetch(self, name: str) -> NDArray[Any]:
        """An output by name, floats as float32."""
        array = self.outputs[name]
        if array is None:
            array = self._binding.get_outputs()[self._ports.order.index(name)].numpy()
        return array.astype(np.float32) if array.dtype == np.float16 else array
