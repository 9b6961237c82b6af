"""Time of the parts of a round: forward passes by the host's clock, kernels by GPU events."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

from numpy.typing import NDArray

from edgellm.core.manifest import Engine
from edgellm.device_runtime.kernels.triton.catalog import Variant
from edgellm.device_runtime.runners import Backend
from edgellm.device_runtime.runners.kv_cache import KVCache, KVPool
from edgellm.device_runtime.runners.runner import Runner
from edgellm.device_runtime.runners.tensorrt.cuda import driver as cuda
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import Device, Planes

PASSES, COMPACTION, COPIES = "passes", "compaction", "copies"
_COPIED_BYTES, _COPIES = 256 << 20, 20


class Events(Protocol):
    """Events in a GPU's stream."""

    def record(self, event: Any) -> Any:
        """Record an event after all queued work; `event` is one to reuse, or None."""
        ...

    def between_ms(self, first: Any, last: Any) -> float:
        """Return the time between two finished events."""
        ...


class CudaEvents:
    """See `Events`; those of the library that the runtime's memory and stream are from."""

    def __init__(self, device: cuda.CudaDevice) -> None:
        self._device = device

    def record(self, event: Any) -> Any:
        with self._device.current():
            event = self._device._driver.Event() if event is None else event
            event.record(self._device._stream)
        return event

    def between_ms(self, first: Any, last: Any) -> float:
        with self._device.current():
            return first.time_till(last)


class TimedDevice:
    """A `Device` that times forward passes, compaction and copies in its stream.

    A forward pass is a replayed graph, or the work between an upload and the next download. It
    begins when it is queued, so a launch that the GPU waits for counts.
    """

    def __init__(self, device: Device, events: Events) -> None:
        self._device, self._events = device, events
        self.spent_ms: Counter[str] = Counter()
        self._first: Any = None  # event before the queued work
        self._waiting: list[tuple[str, Any, Any]] = []
        self._unused: list[Any] = []
        self._is_recording = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def upload(self, address: int, host: NDArray[Any]) -> None:
        self._begin()
        self._device.upload(address, host)

    def download(self, host: NDArray[Any], address: int) -> None:
        kind = COPIES if self._first is None else PASSES
        self._begin()
        self._device.download(host, address)
        self._end(kind)

    def move_rows(self, planes: Planes, rows_address: int, count: int, first: int) -> None:
        self._begin()
        self._device.move_rows(planes, rows_address, count, first)
        self._end(COMPACTION)

    def launch(self, kernel: Variant, grid: tuple[int, int, int], arguments: Sequence[int]) -> None:
        is_compaction = kernel.kernel.name == "keep_rows"
        if is_compaction:
            self._begin()
        self._device.launch(kernel, grid, arguments)
        if is_compaction:
            self._end(COMPACTION)

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        self._is_recording = True  # events would become part of the graph
        try:
            replay = self._device.capture(enqueue)
        finally:
            self._is_recording = False

        def timed() -> None:
            self._begin()
            replay()
            self._end(PASSES)

        return timed

    def synchronize(self) -> None:
        self._device.synchronize()
        if self._first is not None:  # an upload without a download yet
            self._unused.append(self._first)
            self._first = None
        for kind, first, last in self._waiting:
            self.spent_ms[kind] += self._events.between_ms(first, last)
            self._unused += first, last
        self._waiting.clear()

    def _record(self) -> Any:
        return self._events.record(self._unused.pop() if self._unused else None)

    def _begin(self) -> None:
        if self._first is None and not self._is_recording:
            self._first = self._record()

    def _end(self, kind: str) -> None:
        if not self._is_recording:
            self._waiting.append((kind, self._first, self._record()))
            self._first = None


@dataclass
class Spent:
    """Host time of an engine's forward passes."""

    spent_ms: float = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.spent_ms += (time.perf_counter() - start) * 1e3

        return timed


class TimedRunner:
    """A runner that times forward passes and compactions."""

    def __init__(self, runner: Runner, clock: Spent) -> None:
        self._runner = runner
        self.run, self.run_batch = clock.timed(runner.run), clock.timed(runner.run_batch)
        self.kv_pool = _TimedPool(runner.kv_pool, clock) if runner.kv_pool is not None else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class _TimedPool:
    def __init__(self, pool: KVPool, clock: Spent) -> None:
        self._pool, self._clock = pool, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def new_cache(self) -> KVCache:
        cache: Any = self._pool.new_cache()
        cache.compact = self._clock.timed(cache.compact)
        return cache


@dataclass
class Clocks:
    """The clocks of an engine, first the base's, then the draft's."""

    engines: list[Spent] = field(default_factory=list)
    devices: list[TimedDevice] = field(default_factory=list)  # empty without events

    def reset(self) -> None:
        for engine in self.engines:
            engine.spent_ms = 0.0
        for device in self.devices:
            device.synchronize()
            device.spent_ms.clear()

    def passes_ms(self, which: int) -> float:
        """Return host time of the base (0) or of the draft (1)."""
        return self.engines[which].spent_ms if which < len(self.engines) else 0.0

    def kernels_ms(self) -> dict[str, float]:
        """Return GPU time by part; empty without a GPU."""
        for device in self.devices:
            device.synchronize()
        named = zip(("base", "draft"), self.devices, strict=False)
        found = {name: device.spent_ms[PASSES] for name, device in named}
        if found:
            found[COMPACTION] = sum(device.spent_ms[COMPACTION] for device in self.devices)
        return found


@contextmanager
def timed_engines(backend: Backend) -> Iterator[Clocks]:
    """Time all engines of a backend that are opened in this context."""
    clocks = Clocks()

    def open_engine(folder: Path, engine: Engine) -> dict[str, TimedRunner]:
        clocks.engines.append(clock := Spent())
        return {
            role: TimedRunner(runner, clock) for role, runner in open_whole(folder, engine).items()
        }

    def open_device() -> TimedDevice:
        device = open_cuda()
        clocks.devices.append(TimedDevice(device, CudaEvents(device)))
        return clocks.devices[-1]

    open_cuda, open_whole = cuda.open_device, backend.open_engine
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(backend, "open_engine", open_engine))
        stack.enter_context(mock.patch.object(cuda, "open_device", open_device))
        yield clocks


def peak_bandwidth(clock_khz: int, bus_bits: int) -> float:
    """Return GB/s of a memory with two transfers a clock."""
    return 2 * clock_khz * 1e3 * bus_bits / 8 / 1e9


def measured_bandwidths() -> dict[str, float]:
    """Return GB/s of the first GPU's memory, by its attributes and by a copy."""
    device = cuda.open_device()
    with device.current():
        return _bandwidths(device)


def _bandwidths(device: cuda.CudaDevice) -> dict[str, float]:
    gpu, attributes = device._gpu, device._driver.device_attribute
    clock, bus = (
        gpu.get_attribute(attribute)
        for attribute in (attributes.MEMORY_CLOCK_RATE, attributes.GLOBAL_MEMORY_BUS_WIDTH)
    )
    source, target = (device.allocate(_COPIED_BYTES) for _ in range(2))
    events, first, last = CudaEvents(device), None, None
    for count in (1, _COPIES):  # the first is not counted
        first = events.record(first)
        for _ in range(count):
            device.copy(target.address, source.address, _COPIED_BYTES)
        last = events.record(last)
        device.synchronize()
    copied = 2 * _COPIES * _COPIED_BYTES / (events.between_ms(first, last) * 1e-3) / 1e9
    return {"attributes": peak_bandwidth(clock, bus), "copy": copied}
