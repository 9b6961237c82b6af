"""pycuda and cuda-python as `cuda.py` knows them, without a GPU: they watch contexts and threads.

Each call needs a context that is current in its thread, as the driver does; a context left
on a thread's stack would have ended the process. Work needs a stream: the legacy one has no order
with a non-blocking stream.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

# Calls that fail while a graph is recorded, and invalidate it.
_NOT_CAPTURED = {"free", "mem_alloc", "module", "pin", "stream", "synchronize", "synchronize all"}
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_INVALIDATED = 901  # CUDA_ERROR_STREAM_CAPTURE_INVALIDATED


class DriverError(Exception):
    """pycuda's `driver.Error`."""


class FakeDriver:
    """`pycuda.driver`."""

    Error = DriverError
    MemoryError = type("MemoryError", (DriverError,), {})
    device_attribute = SimpleNamespace(INTEGRATED="integrated")

    def __init__(self, *, integrated: bool = False, free_bytes: int = 1 << 30) -> None:
        self._here = threading.local()
        self.left: list[str] = []  # threads with a context on their stack, when they were asked
        self.calls: list[tuple[str, str]] = []  # name and thread
        self.alive = 0  # allocations
        self.attached = 0  # pycuda's primary contexts that were not detached
        self.retained = 0  # references of the primary context
        self.first_arguments: list[int] = []  # of launches by cuda-python
        self.pinned: list[Any] = []  # memory that cuda-python gave by its address
        self.capture_is_valid: bool | None = None  # None: no graph is recorded
        self.integrated, self._free = integrated, free_bytes
        self.Context = SimpleNamespace(synchronize=lambda: self.use("synchronize all"))

    @property
    def stack(self) -> list[int]:
        if not hasattr(self._here, "stack"):
            self._here.stack = []
        return self._here.stack

    def use(self, name: str) -> None:
        """Record a call into the driver."""
        assert self.stack, f"{name} without a context in {threading.current_thread().name}"
        self.calls.append((name, threading.current_thread().name))
        if name in _NOT_CAPTURED and self.capture_is_valid:
            self.capture_is_valid = False
            raise DriverError(f"{name}: operation not permitted when stream is capturing")

    def init(self) -> None:
        pass

    def Device(self, index: int) -> Any:  # noqa: N802
        assert index == 0
        context = SimpleNamespace(
            push=lambda: self.stack.append(1), pop=self.stack_pop, detach=self._detach
        )
        return SimpleNamespace(
            retain_primary_context=lambda: self._attach(context),
            name=lambda: "a GPU",
            compute_capability=lambda: (11, 0),
            get_attribute=lambda what: int(self.integrated and what == "integrated"),
        )

    def _attach(self, context: Any) -> Any:
        self.attached, self.retained = self.attached + 1, self.retained + 1
        return context

    def _detach(self) -> None:
        self.attached -= 1
        self.release()
        self.stack.append(1)  # pycuda pushes the context, and does not pop it

    def release(self) -> None:
        """Drop a reference of the primary context; the last would destroy it."""
        assert not self.stack, "a context is released that is current"
        self.retained -= 1
        assert self.retained, "objects of TensorRT outlive their context"

    def warn_if_attached(self) -> None:
        """What pycuda's destructor does after the driver's end."""
        if self.attached or self.stack:
            sys.stderr.write("PyCUDA WARNING: a clean-up operation failed\n")

    def stack_pop(self) -> None:
        self.stack.pop()

    def Stream(self, flags: int = 0) -> Any:  # noqa: N802
        self.use("stream")
        return SimpleNamespace(handle=7, flags=flags, synchronize=lambda: self.use("synchronize"))

    def use_on(self, stream: Any, name: str) -> None:
        """Record work on a stream, which must have no order with the legacy stream."""
        assert getattr(stream, "flags", None) == _NON_BLOCKING, f"{name} on {stream}"
        self.use(name)

    def Event(self) -> Any:  # noqa: N802
        self.use("event")
        return SimpleNamespace(
            record=lambda stream: self.use_on(stream, f"mark in {stream.handle}"),
            time_till=lambda _: self.use("time between marks") or 2.5,
        )

    def module_from_buffer(self, ptx: bytes) -> Any:
        self.use("module")
        assert ptx.endswith(b"\0")
        call = lambda _, __, stream, *_a, **_k: self.use_on(stream, "launch")  # noqa: E731
        kernel = SimpleNamespace(prepare=lambda _: None, prepared_async_call=call)
        return SimpleNamespace(get_function=lambda _: kernel)

    def _allocation(self, name: str) -> _Allocation:
        self.use(name)
        self.alive += 1
        return _Allocation(self)

    def mem_alloc(self, size: int) -> _Allocation:
        if size > self._free:
            raise self.MemoryError("out of memory")
        return self._allocation("mem_alloc")

    def memset_d8_async(self, _at: int, _value: int, _count: int, stream: Any = None) -> None:
        self.use_on(stream, "memset")

    def mem_get_info(self) -> tuple[int, int]:
        self.use("mem_get_info")
        return self._free, 1 << 40

    def pagelocked_empty(self, size: int, dtype: Any) -> np.ndarray:
        assert dtype == np.uint8
        assert size <= 1 << 16
        return np.asarray(self._allocation("pin"))

    def memcpy_htod_async(self, _to: int, _from: Any, stream: Any = None) -> None:
        self.use_on(stream, "upload")

    def memcpy_dtod_async(self, _to: int, _from: int, _size: int, stream: Any = None) -> None:
        self.use_on(stream, "copy")

    def memcpy_dtoh_async(self, _to: Any, _from: int, stream: Any = None) -> None:
        self.use_on(stream, "download")

    def Memcpy2D(self) -> Any:  # noqa: N802 - pycuda's name
        return _PlaneCopy(self)


class _PlaneCopy:
    """`pycuda.driver.Memcpy2D`; the driver records its arguments."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver
        self.set_src_device = lambda address: setattr(self, "source", address)
        self.set_dst_device = lambda address: setattr(self, "target", address)
        self.set_src_host = lambda _: setattr(self, "source", "host")
        self.set_dst_host = lambda _: setattr(self, "target", "host")

    def __call__(self, stream: Any = None, *, aligned: bool = False) -> None:
        del aligned
        names = "source", "target", "src_pitch", "dst_pitch", "width_in_bytes", "height"
        sizes = [getattr(self, name) for name in names]
        self._driver.use_on(stream, f"planes {sizes}")


class _Allocation:
    """Memory of the device or of the host; as the latter the base of an array."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver, self._memory = driver, np.zeros(1 << 16, np.uint8)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._memory.__array_interface__

    def __int__(self) -> int:
        return 1 << 20

    def free(self) -> None:
        self._driver.use("free")
        self._driver.alive -= 1


def fake_graphs(driver: FakeDriver, *, fails_at: str = "") -> Any:
    """`cuda.bindings.driver` as far as graphs need it; the function `fails_at` gives an error."""

    def function(name: str, *found: Any) -> Any:
        def call(*_: Any) -> tuple[Any, ...]:
            driver.use(name)
            status = 1 if name == fails_at else 0
            if name == "cuStreamBeginCapture" and not status:
                driver.capture_is_valid = True
            if name == "cuStreamEndCapture":
                status = status if driver.capture_is_valid else _INVALIDATED
                driver.capture_is_valid = None
            return (status, *found)

        return call

    mode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=0)
    names = {
        "cuStreamBeginCapture": (),
        "cuStreamEndCapture": (1,),
        "cuGraphInstantiate": (2,),
        "cuGraphDestroy": (),
        "cuGraphExecDestroy": (),
        "cuGraphLaunch": (),
    }
    functions = {name: function(name, *found) for name, found in names.items()}
    return SimpleNamespace(CUstream=lambda handle: handle, CUstreamCaptureMode=mode, **functions)


def fake_bindings(driver: FakeDriver, *, fails_at: str = "") -> Any:
    """`cuda.bindings.driver`, over the same driver: calls have the names of pycuda's."""
    calls = {name: _call(driver, name, works) for name, works in _CALLS.items()}
    attributes = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_INTEGRATED="integrated",
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
    )
    kinds = SimpleNamespace(CU_MEMORYTYPE_DEVICE="device", CU_MEMORYTYPE_HOST="host")
    return SimpleNamespace(
        **vars(fake_graphs(driver, fails_at=fails_at)),
        **calls,
        CUdevice_attribute=attributes,
        CUmemorytype=kinds,
        CUDA_MEMCPY2D=SimpleNamespace,
    )


def _call(driver: FakeDriver, name: str, works: Callable[..., Any]) -> Callable[..., Any]:
    """A function of cuda-python: a status first, and no exceptions."""

    def call(*arguments: Any) -> tuple[Any, ...]:
        try:
            found = works(driver, *arguments)
        except driver.MemoryError:
            return (2, None)
        except DriverError:
            return (_INVALIDATED, None)
        return (0,) if found is None else (0, *found)

    call.__name__ = name
    return call


class _Handle(int):
    """A handle of the driver's, which is no number of another kind."""

    flags = 0


def _retain(driver: FakeDriver, _gpu: Any) -> tuple[Any]:
    driver.retained += 1
    return (_Handle(9),)


def _release(driver: FakeDriver) -> None:
    driver.release()


def _stream(driver: FakeDriver, flags: int) -> tuple[Any]:
    driver.use("stream")
    handle = _Handle(7)
    handle.flags = flags
    return (handle,)


def _launch(driver: FakeDriver, kernel: Any, *sizes: Any) -> None:
    *grid_and_block, shared_bytes, stream, places, extra = sizes
    assert isinstance(kernel, _Handle)
    assert len(grid_and_block) == 6
    assert all(isinstance(each, int) for each in (*grid_and_block, shared_bytes, places))
    assert extra == 0
    place = ctypes.c_void_p.from_address(places).value
    assert place is not None
    driver.first_arguments.append(ctypes.c_int64.from_address(place).value)
    driver.use_on(stream, "launch")


def _allocate(driver: FakeDriver, size: int) -> tuple[Any]:
    driver.mem_alloc(size)
    return (_Handle(1 << 20),)


def _pin(driver: FakeDriver, size: int) -> tuple[int]:
    assert size <= 1 << 16
    driver.pinned.append(driver._allocation("pin"))
    return (driver.pinned[-1].__array_interface__["data"][0],)


def _free(driver: FakeDriver, _at: Any) -> None:
    driver.use("free")
    driver.alive -= 1


def _copy(name: str) -> Callable[..., None]:
    def copy(driver: FakeDriver, to: int, source: int, size: int, stream: Any) -> None:
        assert all(isinstance(each, int) for each in (to, source, size))
        driver.use_on(stream, name)

    return copy


def _copy_planes(driver: FakeDriver, copy: Any, stream: Any) -> None:
    ends = [
        copy.srcDevice if copy.srcMemoryType == "device" else "host",
        copy.dstDevice if copy.dstMemoryType == "device" else "host",
    ]
    assert all(isinstance(at, int) for at in (getattr(copy, "srcHost", 0), copy.srcPitch))
    sizes = [*ends, copy.srcPitch, copy.dstPitch, copy.WidthInBytes, copy.Height]
    driver.use_on(stream, f"planes {sizes}")


def _load(driver: FakeDriver, image: int) -> tuple[Any]:
    driver.module_from_buffer(ctypes.string_at(image) + b"\0")  # ends with a zero
    return (_Handle(3),)


_CALLS: dict[str, Callable[..., Any]] = {
    "cuInit": lambda *_: None,
    "cuDeviceGet": lambda _, index: (_Handle(index),),
    "cuDeviceGetName": lambda _, size, __: (b"a GPU".ljust(size, b"\0"),),
    "cuDeviceGetAttribute": lambda driver, what, _: (
        {"integrated": int(driver.integrated), "major": 11, "minor": 0}[what],
    ),
    "cuDevicePrimaryCtxRetain": _retain,
    "cuDevicePrimaryCtxRelease": lambda driver, _: _release(driver),
    "cuCtxPushCurrent": lambda driver, _: driver.stack.append(1),
    "cuCtxPopCurrent": lambda driver: (driver.stack_pop(),),
    "cuCtxSynchronize": lambda driver: driver.use("synchronize all"),
    "cuStreamCreate": _stream,
    "cuStreamSynchronize": lambda driver, _: driver.use("synchronize"),
    "cuEventCreate": lambda driver, _: (driver.Event(),),
    "cuEventRecord": lambda driver, _, stream: driver.use_on(stream, f"mark in {int(stream)}"),
    "cuEventElapsedTime": lambda _, first, last: (first.time_till(last),),
    "cuModuleLoadData": _load,
    "cuModuleGetFunction": lambda _, __, name: (_Handle(len(name)),),
    "cuLaunchKernel": _launch,
    "cuMemAlloc": _allocate,
    "cuMemAllocHost": _pin,
    "cuMemFree": _free,
    "cuMemFreeHost": _free,
    "cuMemGetInfo": lambda driver: driver.mem_get_info(),
    "cuMemsetD8Async": lambda driver, *given: driver.memset_d8_async(*given),
    "cuMemcpyHtoDAsync": _copy("upload"),
    "cuMemcpyDtoHAsync": _copy("download"),
    "cuMemcpyDtoDAsync": _copy("copy"),
    "cuMemcpy2DAsync": _copy_planes,
}
