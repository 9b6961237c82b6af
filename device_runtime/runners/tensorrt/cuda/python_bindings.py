"""cuda-python's bindings of the CUDA driver, with the interface of `pycuda.driver`.

`CudaDevice` is written for pycuda, which has to be compiled on a board. cuda-python has wheels for
every board, so it takes pycuda's place where that is missing. Names and arguments are pycuda's, as
far as `CudaDevice` and the benchmarks use them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_TYPES = {"P": ctypes.c_void_p, "i": ctypes.c_int32, "q": ctypes.c_int64}  # of kernel arguments


class DriverError(Exception):
    """A function of the driver failed; with its name and status."""


class DriverMemoryError(DriverError):
    """There is not enough memory."""


class PythonBindings:
    """`pycuda.driver` by the module `cuda.bindings.driver`."""

    Error, MemoryError = DriverError, DriverMemoryError

    def __init__(self, cuda: Any) -> None:
        """Take the module; nothing is called yet."""
        self._cuda = cuda
        self.device_attribute = _Attributes(cuda.CUdevice_attribute)
        self.Context = SimpleNamespace(synchronize=lambda: self.ask("cuCtxSynchronize"))

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a function of the driver; its result, or None.

        Raises:
            DriverError: the function failed.
        """
        found = self._results(name, *arguments)
        return found[0] if found else None

    def _results(self, name: str, *arguments: Any) -> list[Any]:
        try:
            status, *found = getattr(self._cuda, name)(*arguments)
        except RuntimeError as error:  # there is no driver, or it lacks the function
            raise DriverError(f"{name} failed: {error}") from None
        if int(status):
            kind = DriverMemoryError if int(status) == _OUT_OF_MEMORY else DriverError
            raise kind(f"{name} failed: {status!s}")
        return found

    def init(self) -> None:
        """Initialize the driver."""
        self.ask("cuInit", 0)

    def Device(self, index: int) -> _Device:  # noqa: N802 - pycuda's name, as the others
        """A GPU."""
        return _Device(self, self.ask("cuDeviceGet", index))

    def Stream(self, flags: int = 0) -> _Stream:  # noqa: N802
        """A stream of the current context."""
        return _Stream(self, flags)

    def Event(self) -> _Event:  # noqa: N802
        """An event that takes times."""
        return _Event(self)

    def Memcpy2D(self) -> _PlaneCopy:  # noqa: N802
        """A copy of rows with a pitch."""
        return _PlaneCopy(self, self._cuda)

    def module_from_buffer(self, text: bytes) -> _Module:
        """Compiled PTX, whose text ends with a zero."""
        held = np.frombuffer(text, np.uint8)
        return _Module(self, self.ask("cuModuleLoadData", held.ctypes.data))

    def mem_alloc(self, num_bytes: int) -> _Allocation:
        """Device memory."""
        return _Allocation(self, self.ask("cuMemAlloc", num_bytes), "cuMemFree")

    def mem_get_info(self) -> tuple[int, int]:
        """Free and total bytes of the GPU."""
        free, total = self._results("cuMemGetInfo")
        return int(free), int(total)

    def pagelocked_empty(self, num_bytes: int, dtype: Any) -> NDArray[Any]:
        """Pinned memory of the host; the array's base frees it."""
        allocation = _Allocation(self, self.ask("cuMemAllocHost", num_bytes), "cuMemFreeHost")
        allocation.__array_interface__ = {
            "data": (int(allocation), False),
            "shape": (num_bytes // np.dtype(dtype).itemsize,),
            "typestr": np.dtype(dtype).str,
            "version": 3,
        }
        return np.asarray(allocation)

    def memset_d8_async(self, address: int, value: int, count: int, stream: _Stream) -> None:
        """Fill device memory."""
        self.ask("cuMemsetD8Async", address, value, count, stream.handle)

    def memcpy_htod_async(self, address: int, host: NDArray[Any], stream: _Stream) -> None:
        """Copy to the device."""
        self.ask("cuMemcpyHtoDAsync", address, host.ctypes.data, host.nbytes, stream.handle)

    def memcpy_dtoh_async(self, host: NDArray[Any], address: int, stream: _Stream) -> None:
        """Copy from the device."""
        self.ask("cuMemcpyDtoHAsync", host.ctypes.data, address, host.nbytes, stream.handle)

    def memcpy_dtod_async(self, target: int, source: int, count: int, stream: _Stream) -> None:
        """Copy within the device."""
        self.ask("cuMemcpyDtoDAsync", target, source, count, stream.handle)


class _Attributes:
    """`pycuda.driver.device_attribute`: names without the prefix."""

    def __init__(self, names: Any) -> None:
        self._names = names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._names, f"CU_DEVICE_ATTRIBUTE_{name}")


class _Device:
    """`pycuda.driver.Device`."""

    def __init__(self, driver: PythonBindings, handle: Any) -> None:
        self._driver, self._handle = driver, handle

    def name(self) -> str:
        text = self._driver.ask("cuDeviceGetName", 256, self._handle)
        return text.split(b"\0")[0].decode(errors="replace")

    def get_attribute(self, attribute: Any) -> int:
        return int(self._driver.ask("cuDeviceGetAttribute", attribute, self._handle))

    def compute_capability(self) -> tuple[int, int]:
        names = self._driver.device_attribute
        major, minor = names.COMPUTE_CAPABILITY_MAJOR, names.COMPUTE_CAPABILITY_MINOR
        return self.get_attribute(major), self.get_attribute(minor)

    def retain_primary_context(self) -> _Context:
        return _Context(self._driver, self._handle)


class _Context:
    """`pycuda.driver.Context`, the primary one."""

    def __init__(self, driver: PythonBindings, device: Any) -> None:
        self._driver, self._device = driver, device
        self._handle = driver.ask("cuDevicePrimaryCtxRetain", device)

    def push(self) -> None:
        self._driver.ask("cuCtxPushCurrent", self._handle)

    def pop(self) -> None:
        self._driver.ask("cuCtxPopCurrent")

    def detach(self) -> None:
        self._driver.ask("cuDevicePrimaryCtxRelease", self._device)


class _Stream:
    """`pycuda.driver.Stream`."""

    def __init__(self, driver: PythonBindings, flags: int) -> None:
        self._driver, self.handle = driver, driver.ask("cuStreamCreate", flags)

    def synchronize(self) -> None:
        self._driver.ask("cuStreamSynchronize", self.handle)


class _Event:
    """`pycuda.driver.Event`."""

    def __init__(self, driver: PythonBindings) -> None:
        self._driver, self._handle = driver, driver.ask("cuEventCreate", 0)

    def record(self, stream: _Stream) -> None:
        self._driver.ask("cuEventRecord", self._handle, stream.handle)

    def time_till(self, other: _Event) -> float:
        return float(self._driver.ask("cuEventElapsedTime", self._handle, other._handle))


class _Module:
    """`pycuda.driver.Module`."""

    def __init__(self, driver: PythonBindings, handle: Any) -> None:
        self._driver, self._handle = driver, handle

    def get_function(self, name: str) -> _Function:
        found = self._driver.ask("cuModuleGetFunction", self._handle, name.encode())
        return _Function(self._driver, found)


class _Function:
    """`pycuda.driver.Function`, prepared."""

    def __init__(self, driver: PythonBindings, handle: Any) -> None:
        self._driver, self._handle = driver, handle
        self._types: list[Any] = []

    def prepare(self, codes: str) -> None:
        self._types = [_TYPES[code] for code in codes]

    def prepared_async_call(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        stream: _Stream,
        *arguments: int,
        shared_size: int = 0,
    ) -> None:
        values = [kind(value) for kind, value in zip(self._types, arguments, strict=True)]
        places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(each) for each in values))
        sizes = (*(*grid, 1)[:3], *block, shared_size)
        at = ctypes.addressof(places)
        self._driver.ask("cuLaunchKernel", self._handle, *sizes, stream.handle, at, 0)


class _Allocation:
    """Device memory, or pinned memory of the host."""

    __array_interface__: dict[str, Any]

    def __init__(self, driver: PythonBindings, handle: Any, frees: str) -> None:
        self._driver, self._handle, self._frees = driver, handle, frees

    def __int__(self) -> int:
        return int(self._handle)

    def free(self) -> None:
        self._driver.ask(self._frees, self._handle)


class _PlaneCopy:
    """`pycuda.driver.Memcpy2D`; pitches and the width are bytes."""

    src_pitch = dst_pitch = width_in_bytes = height = 0

    def __init__(self, driver: PythonBindings, cuda: Any) -> None:
        self._driver, self._kinds, self._copy = driver, cuda.CUmemorytype, cuda.CUDA_MEMCPY2D()

    def set_src_device(self, address: int) -> None:
        self._copy.srcMemoryType = self._kinds.CU_MEMORYTYPE_DEVICE
        self._copy.srcDevice = address

    def set_dst_device(self, address: int) -> None:
        self._copy.dstMemoryType = self._kinds.CU_MEMORYTYPE_DEVICE
        self._copy.dstDevice = address

    def set_src_host(self, host: NDArray[Any]) -> None:
        self._copy.srcMemoryType = self._kinds.CU_MEMORYTYPE_HOST
        self._copy.srcHost = host.ctypes.data

    def set_dst_host(self, host: NDArray[Any]) -> None:
        self._copy.dstMemoryType = self._kinds.CU_MEMORYTYPE_HOST
        self._copy.dstHost = host.ctypes.data

    def __call__(self, stream: _Stream) -> None:
        copy = self._copy
        copy.srcPitch, copy.dstPitch = self.src_pitch, self.dst_pitch
        copy.WidthInBytes, copy.Height = self.width_in_bytes, self.height
        self._driver.ask("cuMemcpy2DAsync", copy, stream.handle)
