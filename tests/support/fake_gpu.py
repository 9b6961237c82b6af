"""A fake GPU: computes with ONNX Runtime on the CPU, and fails where a real one would.

Work stays in the stream until a caller synchronizes, as on a GPU: early reads are stale,
and early frees are errors. Engines are lowered ONNX graphs with the profiles that
they would be compiled for.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from fake_planes import FakePlanes, GpuMisuseError
from kernel_graphs import open_graph
from kernel_references import REFERENCES, TYPES
from numpy.typing import NDArray

from edgellm.build.tensorrt.profiles import Pass
from edgellm.core.errors import (
    EdgeLLMError,
    LimitError,
)
from edgellm.device_runtime.kernels.triton.catalog import Variant, variants
from edgellm.device_runtime.runners.tensorrt.cuda.gather import is_run
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import ALIGNMENT, TensorInfo
from edgellm.device_runtime.runners.tensorrt.cuda.weight_table import open_weights


@dataclass
class FakeBuffer:
    address: int
    num_bytes: int
    memory: NDArray[np.uint8] = field(repr=False)


class FakeDevice(FakePlanes):
    """See `device.Device`."""

    _streams = itertools.count(7)

    def __init__(self, memory_bytes: int = 1 << 30, sm: int = 110) -> None:
        self.sm = sm
        self._free, self.stream = memory_bytes, next(self._streams)
        self._next = 1 << 20
        self._blocks: dict[int, NDArray[np.uint8]] = {}  # by address, while their buffer lives
        self._pinned: list[tuple[int, int]] = []
        self._keep: list[NDArray] = []
        self._queue: list[Callable[[], None]] = []
        self._capturing: list[Callable[[], None]] | None = None
        self.allocations = self.contexts = 0
        self.captures = self.launches = self.passes = self.waits = 0
        self.bytes_up = self.bytes_down = self.kernels = 0  # kernels: our own, outside of graphs

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()  # `fake_cuda.py` watches contexts

    def allocate(self, num_bytes: int) -> FakeBuffer:
        self._refuse_in_capture("allocate")
        if num_bytes > self._free:
            raise LimitError("the GPU is full")
        self._free -= num_bytes
        self.allocations += 1
        size = -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT
        address, self._next = self._next, self._next + size + ALIGNMENT
        buffer = FakeBuffer(address, size, np.zeros(size, np.uint8))
        self._blocks[address] = buffer.memory
        weakref.finalize(buffer, self._release, address, num_bytes)
        return buffer

    def _release(self, address: int, num_bytes: int) -> None:
        del self._blocks[address]
        self._free += num_bytes

    def free_bytes(self) -> int:
        return self._free

    def at(self, address: int, num_bytes: int) -> NDArray[np.uint8]:
        """Allocated device memory at an address."""
        for start, block in self._blocks.items():
            if start <= address and address + num_bytes <= start + len(block):
                return block[address - start : address - start + num_bytes]
        raise GpuMisuseError(f"{num_bytes} bytes at {address} are not allocated")

    def memory(self, address: int, count: int, dtype: Any) -> NDArray[Any]:
        """Numbers at an address."""
        return self.at(int(address), int(count) * np.dtype(dtype).itemsize).view(dtype)

    def pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        self._refuse_in_capture("pin")
        array = np.full(num_bytes, 0xA5, np.uint8)
        start = array.__array_interface__["data"][0]
        self._pinned.append((start, start + num_bytes))
        self._keep.append(array)
        return array

    def _require_pinned(self, host: NDArray[Any]) -> None:
        if not host.flags.c_contiguous:
            raise GpuMisuseError("a copy of what is not contiguous")
        start = host.__array_interface__["data"][0]
        if not any(low <= start and start + host.nbytes <= high for low, high in self._pinned):
            raise GpuMisuseError("an asynchronous copy needs pinned memory")

    def upload(self, address: int, host: NDArray[Any]) -> None:
        self._require_pinned(host)
        self.at(address, host.nbytes)
        flat = host.reshape(-1).view(np.uint8)

        def copy() -> None:
            self.bytes_up += len(flat)
            self.at(address, len(flat))[:] = flat

        self._ask(copy)

    def download(self, host: NDArray[Any], address: int) -> None:
        self._require_pinned(host)
        self.at(address, host.nbytes)
        flat = host.reshape(-1).view(np.uint8)

        def copy() -> None:
            self.bytes_down += len(flat)
            flat[:] = self.at(address, len(flat))

        self._ask(copy)

    def gather_rows(
        self, target: int, source: int, rows: NDArray[np.int64], row_bytes: int
    ) -> None:
        if row_bytes % 16 or target % 16 or source % 16 or (rows < 0).any():
            raise GpuMisuseError("the kernel moves words of 16 bytes")
        kept, end = rows.copy(), int(rows.max()) + 1
        # Raised at once: an abandoned output leaves copies in the stream, for which the
        # driver waits before it frees.
        matrix = self.at(source, end * row_bytes).reshape(end, row_bytes)
        out = self.at(target, len(rows) * row_bytes)
        if not is_run(rows):
            self.bytes_up += 4 * len(rows)

        def gather() -> None:
            out[:] = matrix[kept].reshape(-1)

        self._ask_kernel(gather)

    def gather_rows_at(
        self, target: int, source: int, rows_address: int, count: int, row_bytes: int
    ) -> None:
        if row_bytes % 16 or target % 16 or source % 16:
            raise GpuMisuseError("the kernel moves words of 16 bytes")
        rows, out = self.at(rows_address, 4 * count), self.at(target, count * row_bytes)

        def gather() -> None:
            for place, row in enumerate(rows.view(np.int32).tolist()):
                found = self.at(source + row * row_bytes, row_bytes)
                out[place * row_bytes : (place + 1) * row_bytes] = found

        self._ask_kernel(gather)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        out, found = self.at(target, num_bytes), self.at(source, num_bytes)
        self._ask(lambda: np.copyto(out, found))

    def launch(self, kernel: Variant, grid: tuple[int, int, int], arguments: Sequence[int]) -> None:
        if kernel.name not in {each.name for each in variants(self.sm)}:
            raise EdgeLLMError(f"no kernel {kernel.name} was compiled for this GPU")
        kinds = [*kernel.kernel.signature.values()]
        given = [
            self._from(value).view(TYPES[kind]) if kind in TYPES else value
            for kind, value in zip(kinds, arguments, strict=True)
        ]
        run = REFERENCES[kernel.kernel.name]
        constants = {**kernel.constants, "grid": grid, "memory": self.memory}
        self._ask_kernel(lambda: run(*given, constants=constants))

    def _from(self, address: int) -> NDArray[np.uint8]:
        """All memory of an allocation after an address, in whole words."""
        for start, block in self._blocks.items():
            if start <= address < start + len(block):
                return block[address - start :]
        raise GpuMisuseError(f"{address} is not allocated")

    def _ask_kernel(self, work: Callable[[], None]) -> None:
        self.kernels += not self.is_capturing
        self._ask(work)

    def synchronize(self) -> None:
        self._refuse_in_capture("wait")
        self.waits += 1
        queue, self._queue = self._queue, []
        for work in queue:
            work()

    def synchronize_all(self) -> None:
        self.synchronize()

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        self._refuse_in_capture("capture")
        self._capturing = []
        try:
            enqueue()
        finally:
            recorded, self._capturing = self._capturing, None
        self.captures += 1

        def replay() -> None:
            self.launches += 1
            self._queue += recorded

        return replay

    def _ask(self, work: Callable[[], None]) -> None:
        (self._queue if self._capturing is None else self._capturing).append(work)

    def ask_pass(self, work: Callable[[], None]) -> None:
        def counted() -> None:
            self.passes += 1
            work()

        self._ask(counted)

    @property
    def is_capturing(self) -> bool:
        return self._capturing is not None

    def _refuse_in_capture(self, what: str) -> None:
        if self._capturing is not None:
            raise GpuMisuseError(f"{what} while a graph is recorded")


_TYPES = {"int64": np.int64, "float": np.float32, "float16": np.float16, "bool": np.bool_}


class FakeEngine:
    """See `device.CompiledEngine`: a lowered graph in ONNX Runtime."""

    def __init__(self, graph: Path, passes: Sequence[Pass], device: FakeDevice) -> None:
        self.session = self._open(graph, device)
        self._device, self._passes = device, passes
        declared = {value.name: value for value in ir.load(graph).graph.inputs}
        self._symbols = {name: [*(value.shape or ())] for name, value in declared.items()}
        both = ((self.session.get_inputs(), True), (self.session.get_outputs(), False))
        self.tensors: dict[str, TensorInfo] = {
            value.name: TensorInfo(
                name=value.name,
                is_input=is_input,
                dtype=np.dtype(_TYPES[value.type[7:-1]]),
                shape=tuple(dim if isinstance(dim, int) else -1 for dim in value.shape),
            )
            for values, is_input in both
            for value in values
        }
        self.num_profiles = len(passes)
        self.weights = open_weights(self.tensors, device, graph)

    def _open(self, graph: Path, device: FakeDevice) -> Any:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        return open_graph(graph, options, device)

    def shape_range(self, name: str, profile: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        ranges = [
            (dim, dim) if isinstance(dim, int) else self._passes[profile].ranges[str(dim.value)]
            for dim in self._symbols[name]
        ]
        return tuple(low for low, _ in ranges), tuple(high for _, high in ranges)

    def scratch_bytes(self, profile: int) -> int:
        return 1000 * (profile + 1)

    def new_context(
        self, profile: int, scratch: FakeBuffer, *, is_recorded: bool = False
    ) -> FakeContext:
        if scratch.num_bytes < self.scratch_bytes(profile):
            raise GpuMisuseError("a context needs more scratch memory")
        self._device.contexts += 1
        made = self._context(profile, scratch.address)
        made.may_be_recorded = is_recorded
        return made

    def _context(self, profile: int, scratch: int) -> FakeContext:
        return FakeContext(self, self._device, profile, scratch)


class FakeContext:
    """See `device.Context`."""

    _ids = itertools.count()

    def __init__(self, engine: FakeEngine, device: FakeDevice, profile: int, scratch: int) -> None:
        self._engine, self._device, self._profile = engine, device, profile
        self._scratch, self._scratch_bytes = scratch, engine.scratch_bytes(profile)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._was_run = self._is_recorded = False
        self.may_be_recorded = False

    def set_shape(self, name: str, shape: Sequence[int]) -> None:
        if self._is_recorded:
            raise GpuMisuseError("a recorded graph holds on to the shapes of its context")
        if -1 not in self._engine.tensors[name].shape:
            raise GpuMisuseError(f"the shape of {name} does not vary")
        least, maximum = self._engine.shape_range(name, self._profile)
        fits = len(shape) == len(least) and all(
            low <= size <= high for low, size, high in zip(least, shape, maximum, strict=True)
        )
        if not fits:
            raise GpuMisuseError(f"{name} {shape} is not in the profile's {least} to {maximum}")
        self._shapes[name] = tuple(shape)
        self._was_run = False

    def output_shape(self, name: str) -> tuple[int, ...]:
        shapes = {key: self._shape(key) for key, info in self._tensors(is_input=True)}
        feeds = {
            key: np.zeros(shape, self._engine.tensors[key].dtype) for key, shape in shapes.items()
        }
        return self._engine.session.run([name], feeds)[0].shape

    def bind(self, name: str, address: int) -> None:
        if name not in self._engine.tensors:
            raise GpuMisuseError(f"the engine has no {name}")
        if address % ALIGNMENT:
            raise GpuMisuseError(f"{name} lies at no multiple of {ALIGNMENT}")
        if self._is_recorded:
            raise GpuMisuseError("a recorded graph holds on to the addresses of its context")
        self._addresses[name] = address

    def is_capturable(self) -> bool:
        return True

    def enqueue(self) -> None:
        missing = [name for name in self._engine.tensors if name not in self._addresses]
        if missing:
            raise GpuMisuseError(f"no address was set for {missing[0]}")
        shapes = {name: self._shape(name) for name, _ in self._tensors(is_input=True)}
        addresses = dict(self._addresses)
        if self._device.is_capturing:
            if not self._was_run:
                raise GpuMisuseError("recorded before it ran with these shapes")
            if not self.may_be_recorded:
                raise GpuMisuseError("recorded with kernels that TensorRT-RTX would replace")
            self._is_recorded = True
        self._was_run = True
        self._device.ask_pass(lambda: self._compute(shapes, addresses))

    def _tensors(self, *, is_input: bool) -> list[tuple[str, TensorInfo]]:
        items = self._engine.tensors.items()
        return [(name, info) for name, info in items if info.is_input == is_input]

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = self._engine.tensors[name].shape
        if -1 not in shape:
            return shape
        if name not in self._shapes:
            raise GpuMisuseError(f"no shape was set for {name}")
        return self._shapes[name]

    def _compute(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        self._device.at(self._scratch, self._scratch_bytes)
        feeds = {}
        for name, shape in shapes.items():
            dtype = self._engine.tensors[name].dtype
            size = int(np.prod(shape)) * dtype.itemsize
            feeds[name] = self._device.at(addresses[name], size).view(dtype).reshape(shape).copy()
        names = [name for name, _ in self._tensors(is_input=False)]
        for name, array in zip(names, self._engine.session.run(names, feeds), strict=True):
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self._device.at(addresses[name], len(flat))[:] = flat
