"""States of recurrent layers on the GPU, passed as a table of addresses or as tensors.

With edgellm's kernels TensorRT gets only the table, see `kernels/triton/recurrent.py`. Each
sequence and each checkpoint has its own place, with a table of its own at the end. A pass reads the
table of its sequence from a fixed address. What a pass stores of its rows is shared: the next pass
overwrites it.

Where TensorRT's operators compute, an engine has the states as inputs and what it stores as
outputs, all at fixed addresses. So the states of the current sequence are there, not in its place.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.errors import BrokenArtifactError
from edgellm.core.model_spec import DecoderSpec, RecurrentSpec
from edgellm.device_runtime.arrays import I64
from edgellm.device_runtime.kernels.triton.catalog import (
    ADVANCE_STATE,
    ADVANCE_WINDOW,
    CHANNELS,
    VALUES,
    Variant,
)
from edgellm.device_runtime.runners.outputs import Outputs
from edgellm.device_runtime.runners.state_store import StateMemory
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import Buffer, CompiledEngine, Device
from edgellm.device_runtime.runners.tensorrt.packed_buffers import (
    Block,
    Layout,
    Tensors,
    aligned,
    packed_bytes,
)

_MAGIC = 0x656467656C6C6D  # as in the kernels
_HEADER, _PARTS = 2, 4  # entries of the header, and of each state
CHUNK_ROWS = 256  # of a prompt; the time of linear attention grows with their square
_WINDOW, _MATRIX = "window", "matrix"  # parts of states
_COUNT_BYTES = 16  # of a number of rows, since kernels take aligned pointers


def table_entries(num_states: int) -> int:
    """Number of entries of the table of states."""
    return _HEADER + _PARTS * num_states


def chunk_rows(spec: RecurrentSpec, max_rows: int) -> int:
    """Maximum rows of a prefill pass."""
    has_matrices = any(name.endswith(f".{_MATRIX}") for name in spec.states)
    return min(max_rows, CHUNK_ROWS) if has_matrices else max_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """States of one kind and shape, which one launch advances.

    Attributes:
        kernel: that advances them.
        grid: of one state.
        sizes: arguments of the kernel.
        entries: of the states in the table.
    """

    kernel: Variant
    grid: tuple[int, ...]
    sizes: tuple[int, ...]
    entries: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """Tensors of recurrent layers, by the parts of the table."""

    rows: int  # that a pass can store
    states: tuple[Layout, ...]  # one tensor each, in the order of the spec
    stored: tuple[Layout, ...]  # of the rows of a pass, for each state
    groups: tuple[_Group, ...]

    @classmethod
    def of(cls, spec: RecurrentSpec, rows: int) -> StateLayout:
        """The layout for passes of at most `rows`."""
        states, stored, groups = [], [], dict[tuple, list[int]]()
        for entry, (name, (_, *dims)) in enumerate(spec.states.items()):
            state, parts, group = _of(name, tuple(dims), spec, rows)
            states.append({name: state})
            stored.append({f"{name}.{at}": part for at, part in enumerate(parts)})
            groups.setdefault(group, []).append(entry)
        found = tuple(
            _Group(kernel=kernel, grid=grid, sizes=sizes, entries=tuple(entries))
            for (kernel, grid, sizes), entries in groups.items()
        )
        return cls(rows=rows, states=tuple(states), stored=tuple(stored), groups=found)

    @property
    def state_layout(self) -> Layout:
        """All states."""
        return dict(itertools.chain(*(each.items() for each in self.states)))

    @property
    def stored_layout(self) -> Layout:
        """All that a pass stores."""
        return dict(itertools.chain(*(each.items() for each in self.stored)))

    @property
    def num_bytes(self) -> int:
        """Bytes of what a pass stores, and of four states.

        They are those of a sequence, a checkpoint, zeros, and the tensors of TensorRT-RTX.
        """
        return packed_bytes(self.stored_layout) + 4 * packed_bytes(self.state_layout)


def _of(
    name: str, dims: tuple[int, ...], spec: RecurrentSpec, rows: int
) -> tuple[tuple, list[tuple], tuple]:
    """State, stored rows and group of one state."""
    prefix, _, part = name.rpartition(".")
    of_rows = graph_io.STATE_ROWS + prefix.removeprefix(graph_io.STATE)
    if part == _WINDOW:
        before, width = dims
        group = ADVANCE_WINDOW, (-(-width // CHANNELS),), (width, before + 1)
        return (dims, np.float16), [((rows, width), np.float16)], group
    heads, key_dim, value_dim = dims
    keys = spec.rows[f"{of_rows}.key"]
    group = ADVANCE_STATE, (heads, -(-value_dim // VALUES)), (keys // key_dim, *dims)
    parts = [
        ((rows, keys), np.float16),
        ((rows, heads * value_dim), np.float32),
        ((2, rows, heads), np.float32),
    ]
    return (dims, np.float32), parts, group


class _Place:
    """Memory of the states of one sequence or checkpoint, with their table."""

    def __init__(self, buffer: Buffer, table_at: int, unused: list[Buffer]) -> None:
        self.address, self.table = buffer.address, buffer.address + table_at
        weakref.finalize(self, unused.append, buffer).atexit = False


class DeviceStates:
    """See `StateStore`: kernels advance the states in place."""

    def __init__(
        self, *, device: Device, spec: RecurrentSpec, rows: int, engine: CompiledEngine
    ) -> None:
        """Allocate.

        Args:
            device: that computes.
            spec: of the states.
            rows: maximum rows of a pass, padding included.
            engine: that takes the table or the states.

        Raises:
            BrokenArtifactError: the engine is for other states.
            LimitError: the device has too little memory.
        """
        entries = _require_states(engine, spec)
        self._device, self._layout = device, StateLayout.of(spec, rows)
        self._shapes = [tuple(shape) for shape in spec.states.values()]
        self._state_bytes, self._table_bytes = packed_bytes(self._layout.state_layout), 8 * entries
        self._stored = Tensors(device, self._layout.stored_layout)
        self._constants = self._upload_constants()
        self._unused: list[Buffer] = []  # places that nothing refers to
        self._host = device.pinned(self._state_bytes)
        self._table_host = device.pinned(self._table_bytes)
        self._zeros = device.allocate(self._state_bytes)
        self._block = Block(device, packed_bytes(_path(rows)))
        self._is_moving = False  # the former path is still in use
        self._table = device.allocate(self._table_bytes)
        self.addresses = {graph_io.STATE_TABLE: self._table.address}
        self._tensors: _Place | None = None  # where an engine has states as inputs
        self._current = self.new()
        if graph_io.STATE_TABLE in engine.tensors:
            self._bind(self._current)
        else:
            self._tensors = self.new()
            self.addresses = self._tensor_addresses(spec, self._tensors.address)

    def _tensor_addresses(self, spec: RecurrentSpec, end: int) -> dict[str, int]:
        """Of the states, from an address on, and of what a pass stores of its rows, in order."""
        found = {}
        for name, size in zip(spec.states, map(packed_bytes, self._layout.states), strict=True):
            found[name], end = end, end + size
        stored = (name for each in self._layout.stored for name in each)
        return found | {name: self._stored[at] for name, at in zip(spec.rows, stored, strict=True)}

    def _upload_constants(self) -> Mapping[str, int]:
        """Rows of a chain and numbers of rows, so that prompts and single tokens upload nothing."""
        rows = self._layout.rows
        layout: dict[str, tuple[tuple[int, ...], type]] = {
            "chain": ((rows,), np.int32),
            "counts": ((rows + 1, _COUNT_BYTES // 4), np.int32),
        }
        groups = self._layout.groups
        layout |= {str(at): ((len(g.entries),), np.int32) for at, g in enumerate(groups)}
        self._constant_block = block = Block(self._device, packed_bytes(layout))
        packed = block.pack(layout)
        packed.arrays["chain"][:] = np.arange(rows)
        packed.arrays["counts"][:] = np.arange(rows + 1)[:, None]
        for at, group in enumerate(groups):
            packed.arrays[str(at)][:] = group.entries
        block.upload(packed)
        self._device.synchronize()
        return packed.addresses

    @property
    def num_bytes(self) -> int:
        """See `StateStore`."""
        return self._state_bytes

    def _take(self) -> _Place:
        """A place with any states."""
        table_at = aligned(self._state_bytes)
        if self._unused:
            return _Place(self._unused.pop(), table_at, self._unused)
        buffer = self._device.allocate(table_at + self._table_bytes)
        place = _Place(buffer, table_at, self._unused)
        table = self._table_host.view(np.int64)
        table[:] = 0
        table[:_HEADER] = self._layout.rows, self._layout.rows ^ _MAGIC
        by_state = table[_HEADER:].reshape(-1, _PARTS)
        end = place.address
        for entry, (state, stored) in enumerate(
            zip(self._layout.states, self._layout.stored, strict=True)
        ):
            by_state[entry, : 1 + len(stored)] = end, *(self._stored[name] for name in stored)
            end += packed_bytes(state)
        self._device.upload(place.table, self._table_host)
        self._device.synchronize()
        return place

    def new(self) -> _Place:
        """See `StateStore`."""
        place = self._take()
        self.replace(place, None)
        return place

    def copy(self, place: _Place) -> _Place:
        """See `StateStore`."""
        new = self._take()
        self.replace(new, place)
        return new

    def replace(self, place: _Place, source: _Place | None) -> None:
        """See `StateStore`; asynchronous."""
        address = self._zeros.address if source is None else self._here(source).address
        self._device.copy(self._here(place).address, address, self._state_bytes)

    def read(self, place: _Place) -> tuple[NDArray[np.float32], ...]:
        """See `StateStore`."""
        self._device.download(self._host, self._here(place).address)
        self._device.synchronize()
        return tuple(
            tensor.astype(np.float32).reshape(shape)
            for tensor, shape in zip(self._on_host(), self._shapes, strict=True)
        )

    def write(self, place: _Place, states: Sequence[NDArray]) -> None:
        """See `StateStore`."""
        self._device.synchronize()  # an earlier copy may still read the host's memory
        for tensor, state in zip(self._on_host(), states, strict=True):
            tensor[...] = state.reshape(tensor.shape)
        self._device.upload(self._here(place).address, self._host)
        self._device.synchronize()

    def _on_host(self) -> list[NDArray]:
        """The states in the host's memory."""
        found, end = [], 0
        for state in self._layout.states:
            ((shape, dtype),) = state.values()
            size = math.prod(shape) * np.dtype(dtype).itemsize
            found.append(self._host[end : end + size].view(dtype).reshape(shape))
            end += aligned(size)
        return found

    def enter(self, memories: Sequence[StateMemory]) -> list[tuple[Mapping[str, NDArray], int]]:
        """See `StateStore`: passes have one sequence, and states are no inputs."""
        (memory,) = memories
        if memory.place is not self._current:
            self._bind(memory.place)
        return [({}, 0)]

    def _bind(self, place: _Place) -> None:
        """Let later passes read a place."""
        if self._tensors is None:
            self._device.copy(self._table.address, place.table, self._table_bytes)
        else:
            at = self._tensors.address
            self._device.copy(self._current.address, at, self._state_bytes)
            self._device.copy(at, place.address, self._state_bytes)
        self._current = place

    def _here(self, place: _Place) -> _Place:
        """Where the states of a place are."""
        return place if self._tensors is None or place is not self._current else self._tensors

    def advance(self, memory: StateMemory, outputs: Outputs, count: int) -> None:
        """See `StateStore`; asynchronous, a launch for each kind and shape of states."""
        del outputs  # the pass has stored what is needed
        path, outcome = self._path(memory.accepted[:count])
        for at, group in enumerate(self._layout.groups):
            x, y, z, *_ = *group.grid, len(group.entries), 1
            table = self._here(memory.place).table
            given = path, outcome, table, self._constants[str(at)], *group.sizes
            self._device.launch(group.kernel, (x, y, z), given)

    def _path(self, rows: I64) -> tuple[int, int]:
        """Addresses of accepted rows and of their number."""
        if np.array_equal(rows, np.arange(len(rows))):
            counts = self._constants["counts"] + _COUNT_BYTES * len(rows)
            return self._constants["chain"], counts
        if self._is_moving:
            self._device.synchronize()
        packed = self._block.pack(_path(len(rows)))
        packed.arrays["path"][:], packed.arrays["outcome"][:] = rows, len(rows)
        self._block.upload(packed)
        self._is_moving = True
        return packed.addresses["path"], packed.addresses["outcome"]

    def on_synchronized(self) -> None:
        """Called after a synchronization of the device."""
        self._is_moving = False

    def release(self, memory: StateMemory) -> None:
        """Does nothing: a place is reused when nothing refers to it."""


def _require_states(engine: CompiledEngine, spec: RecurrentSpec) -> int:
    """Entries of the table; raises `BrokenArtifactError` if an engine is for other states."""
    entries, tensors = table_entries(len(spec.states)), engine.tensors
    again = "build the engine again"
    if graph_io.STATE_TABLE not in tensors:
        states = {n: each.shape for n, each in tensors.items() if n.startswith(graph_io.STATE)}
        if states != {name: tuple(shape) for name, shape in spec.states.items()}:
            raise BrokenArtifactError("the engine has other states than its manifest", hint=again)
    elif (found := tensors[graph_io.STATE_TABLE].shape) != (entries,):
        raise BrokenArtifactError(
            f"the engine's table of states has {found[0]} entries, one of {len(spec.states)} "
            f"states has {entries}",
            hint=again,
        )
    return entries


def _path(count: int) -> Layout:
    """Accepted rows, as kernels take them."""
    return {"path": ((count,), np.int32), "outcome": ((1,), np.int32)}


def open_states(
    engine: CompiledEngine, device: Device, spec: DecoderSpec | None, rows: int
) -> DeviceStates | None:
    """The states of a network, if it has any; see `DeviceStates`, which raises."""
    if spec is None or spec.recurrent is None:
        return None
    return DeviceStates(device=device, spec=spec.recurrent, rows=rows, engine=engine)
