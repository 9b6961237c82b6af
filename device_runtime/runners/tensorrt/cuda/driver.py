"""Everything that edgellm asks of CUDA, through pycuda; graphs, which it lacks, by cuda-python.

Both are handles of the driver's own: a stream of the one is a stream of the other. Without pycuda
cuda-python does all (`python_bindings.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import logging
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core.commands.extras import install
from edgellm.core.errors import (
    EdgeLLMError,
    LimitError,
)
from edgellm.core.resources import available_memory_bytes
from edgellm.device_runtime.kernels.triton.catalog import Variant
from edgellm.device_runtime.runners.tensorrt import kv_append
from edgellm.device_runtime.runners.tensorrt.cuda import gather, kv_compaction
from edgellm.device_runtime.runners.tensorrt.cuda.kernels import LoadedKernels
from edgellm.device_runtime.runners.tensorrt.cuda.kv_compaction import WORD_BYTES
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import ALIGNMENT, NewRows, Planes
from edgellm.device_runtime.runners.tensorrt.cuda.python_bindings import (
    DriverError,
    PythonBindings,
)

_log = logging.getLogger(__name__)
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING, for which pycuda has no name
_THREADS = 32  # of a block; a row of a cache has 8 to 32 words
_GATHERING_THREADS = 256  # one of features has hundreds
_HINT = (
    "pip install cuda-python, before CUDA 13 (JetPack 6) 'cuda-python<13'; "
    f"{install('tensorrt')} adds pycuda, which needs the CUDA toolkit's headers"
)


@functools.cache
def open_device() -> CudaDevice:
    """The first GPU; all engines of a process share its stream.

    Raises:
        EdgeLLMError: cuda-python or the driver is missing; says which.
    """
    driver, graphs = import_bindings()
    try:
        driver.init()
        device = CudaDevice(driver, graphs, driver.Device(0))
    except driver.Error as error:
        raise EdgeLLMError(
            f"the NVIDIA driver does not work: {error}", hint="edgellm-doctor says more"
        ) from None
    atexit.register(device.close)
    return device


def import_bindings() -> tuple[Any, Any]:
    """`pycuda.driver`, or what takes its place, and `cuda.bindings.driver`.

    Raises:
        EdgeLLMError: cuda-python is missing, or does not load.
    """
    graphs = _import_cuda_python()
    try:
        return importlib.import_module("pycuda.driver"), graphs
    except ImportError as error:
        if not isinstance(error, ModuleNotFoundError):
            _log.warning("pycuda does not load (%s): cuda-python takes its place", error)
        return PythonBindings(graphs), graphs


def _import_cuda_python() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        with contextlib.suppress(ImportError):
            return importlib.import_module("cuda.cuda")  # before cuda-python 12.6
        raise EdgeLLMError(f"cuda-python is not usable here: {error}", hint=_HINT) from None


def _stopped(error: Exception) -> EdgeLLMError:
    return EdgeLLMError(f"the GPU stopped working: {error}", hint="edgellm-doctor says more")


class _Memory:
    """See `device.Buffer`."""

    def __init__(self, allocation: Any, num_bytes: int) -> None:
        self._allocation, self.address, self.num_bytes = allocation, int(allocation), num_bytes


class _Thread(threading.local):
    """Whether the context is current in a thread."""

    is_current = False


class CudaDevice:
    """See `device.Device`; the GPU's primary context, which TensorRT takes too.

    pycuda keeps a stack of contexts for each thread and ends the process if one is left on it, so
    each call pushes the context, in whatever thread it comes, and pops it.
    """

    def __init__(self, driver: Any, graphs: Any, gpu: Any) -> None:
        """Make a stream in the primary context."""
        self._driver, self._graphs, self._gpu = driver, graphs, gpu
        self._context, self._thread = gpu.retain_primary_context(), _Thread()
        self._opener = threading.get_ident()
        self._is_capturing, self._is_closed = False, False
        self._refusals: set[str] = set()  # reasons for which work was not recorded, logged once
        self._unused: deque[Any] = deque()  # allocations and graphs to be freed
        try:
            with self.current():
                self._open()
        except EdgeLLMError:
            self.close()  # pycuda's destructor would warn
            raise

    def _open(self) -> None:
        # The legacy stream waits for no work of this stream, and this one for none of its.
        self._stream = self._driver.Stream(_NON_BLOCKING)
        self._move_rows = self._kernel(kv_compaction.PTX, kv_compaction.KERNEL, "PPiiqi")
        self._append_rows = self._kernel(kv_append.PTX, kv_append.KERNEL, "PPPiiqqi")
        self._gather_rows = self._kernel(gather.PTX, gather.KERNEL, "PPPi")
        self._indices: gather.Indices | None = None
        self._kernels: LoadedKernels | None = None

    @contextmanager
    def current(self) -> Iterator[None]:
        """See `device.Device`."""
        if self._thread.is_current:
            yield
            return
        try:
            self._context.push()
            self._thread.is_current = True
            try:
                yield
            finally:
                self._thread.is_current = False
                self._context.pop()
        except self._driver.Error as error:
            raise _stopped(error) from None

    def close(self) -> None:
        """Detach pycuda from the context, which warns that it cannot when it is destroyed.

        The driver keeps the primary context: objects of TensorRT may be destroyed after this.
        """
        self._is_closed = True
        with contextlib.suppress(DriverError, self._driver.Error):
            bindings = PythonBindings(self._graphs)
            bindings.Device(0).retain_primary_context()
            self._context.detach()
            is_pycuda = not isinstance(self._driver, PythonBindings)
            if is_pycuda and threading.get_ident() == self._opener:
                bindings.ask("cuCtxPopCurrent")  # pycuda pushes the context to release it

    def _free(self, allocation: Any) -> None:
        if not (self._is_closed or sys.is_finalizing()):  # then the driver frees what there is
            self._unused.append(allocation)
            self._free_unused()

    def _free_unused(self) -> None:
        """Free memory without an owner; during a capture this would invalidate the graph."""
        # Another thread may take it; a GPU that stopped fails at its next work, too.
        with contextlib.suppress(IndexError, EdgeLLMError, self._driver.Error):
            while self._unused and not self._is_capturing:
                with self.current():
                    self._unused.popleft().free()

    def _freed_with(self, owner: Any, allocation: Any) -> None:
        """In whatever thread the owner goes."""
        weakref.finalize(owner, self._free, allocation).atexit = False

    def _kernel(self, ptx: str, name: str, arguments: str) -> Any:
        kernel = self._driver.module_from_buffer(ptx.encode() + b"\0").get_function(name)
        kernel.prepare(arguments)
        return kernel

    @property
    def stream(self) -> int:
        """See `device.Device`."""
        return int(self._stream.handle)

    @property
    def name(self) -> str:
        """The GPU's."""
        return self._gpu.name()

    def allocate(self, num_bytes: int) -> _Memory:
        """See `device.Device`."""
        size = max(num_bytes, ALIGNMENT)
        with self.current():
            try:
                allocation = self._driver.mem_alloc(size)
            except self._driver.MemoryError:
                raise LimitError(
                    f"the GPU has {self.free_bytes() / 1e6:.0f} MB left, "
                    f"{size / 1e6:.0f} are needed",
                    hint="close other programs, or build with a smaller --maxKVCacheCapacity or "
                    "--maxInputLen, or quantize the model",
                ) from None
            self._driver.memset_d8_async(int(allocation), 0, size, self._stream)
            self.synchronize()
        memory = _Memory(allocation, size)
        self._freed_with(memory, allocation)
        return memory

    def free_bytes(self) -> int:
        """See `device.Device`."""
        with self.current():
            free = int(self._driver.mem_get_info()[0])
            is_integrated = self._gpu.get_attribute(self._driver.device_attribute.INTEGRATED)
        # The driver of a board leaves out the system's cache of files.
        return max(free, available_memory_bytes()) if is_integrated else free

    def pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        """See `device.Device`."""
        with self.current():
            host = self._driver.pagelocked_empty(max(num_bytes, 1), np.uint8)
        self._freed_with(host, host.base)
        return host[:num_bytes]

    def upload(self, address: int, host: NDArray[Any]) -> None:
        """See `device.Device`."""
        with self.current():
            self._driver.memcpy_htod_async(address, host, self._stream)

    def download(self, host: NDArray[Any], address: int) -> None:
        """See `device.Device`."""
        with self.current():
            self._driver.memcpy_dtoh_async(host, address, self._stream)

    def move_rows(self, planes: Planes, rows_address: int, count: int, first: int) -> None:
        """See `device.Device`."""
        words = planes.row_bytes // WORD_BYTES
        with self.current():
            self._move_rows.prepared_async_call(
                (planes.count, 1), (_THREADS, 1, 1), self._stream,
                planes.address, rows_address, count, first, planes.rows * words, words,
            )  # fmt: skip

    def append_rows(self, planes: Planes, rows: NewRows, count: int) -> None:
        """See `device.Device`."""
        words = planes.row_bytes // WORD_BYTES
        with self.current():
            self._append_rows.prepared_async_call(
                (planes.count, 1), (_THREADS, 1, 1), self._stream,
                planes.address, rows.address, rows.write_index_address, count, rows.planes,
                rows.stride, planes.rows * words, words,
            )  # fmt: skip

    def gather_rows(
        self, target: int, source: int, rows: NDArray[np.int64], row_bytes: int
    ) -> None:
        """See `device.Device`."""
        with self.current():
            if gather.is_run(rows):
                start = source + int(rows[0]) * row_bytes if len(rows) else source
                self.copy(target, start, len(rows) * row_bytes)
                return
            self._indices = self._indices or gather.Indices(self)
            at = self._indices.upload(rows)
            self.gather_rows_at(target, source, at, len(rows), row_bytes)

    def gather_rows_at(
        self, target: int, source: int, rows_address: int, count: int, row_bytes: int
    ) -> None:
        """See `device.Device`."""
        with self.current():
            self._gather_rows.prepared_async_call(
                (count, 1), (_GATHERING_THREADS, 1, 1), self._stream,
                target, source, rows_address, row_bytes // WORD_BYTES,
            )  # fmt: skip

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """See `device.Device`."""
        with self.current():
            self._driver.memcpy_dtod_async(target, source, num_bytes, self._stream)

    def launch(self, kernel: Variant, grid: tuple[int, int, int], arguments: Sequence[int]) -> None:
        """See `device.Device`."""
        with self.current():
            self._kernels = self._kernels or LoadedKernels(self._driver, self._gpu)
            function, compiled = self._kernels.find(kernel)
            function.prepared_async_call(
                grid,
                (compiled.threads, 1, 1),
                self._stream,
                *arguments,
                shared_size=compiled.shared_bytes,
            )

    def save_rows(self, planes: Planes, length: int, first: int = 0) -> NDArray[np.uint8]:
        """See `device.Device`."""
        host = np.empty((planes.count, length * planes.row_bytes), np.uint8)
        copy = self._planewise(planes, host.shape[1])
        copy.set_src_device(planes.address + first * planes.row_bytes)
        copy.set_dst_host(host)
        copy.src_pitch, copy.dst_pitch = planes.rows * planes.row_bytes, host.shape[1]
        self._copy(copy)
        return host

    def load_rows(self, planes: Planes, rows: NDArray[np.uint8], first: int = 0) -> None:
        """See `device.Device`."""
        copy = self._planewise(planes, rows.shape[1])
        copy.set_src_host(rows)
        copy.set_dst_device(planes.address + first * planes.row_bytes)
        copy.src_pitch, copy.dst_pitch = rows.shape[1], planes.rows * planes.row_bytes
        self._copy(copy)

    def copy_rows(self, planes: Planes, source: int, target: int, count: int) -> None:
        """See `device.Device`."""
        with self.current():
            copy = self._planewise(planes, count * planes.row_bytes)
            copy.set_src_device(planes.address + source * planes.row_bytes)
            copy.set_dst_device(planes.address + target * planes.row_bytes)
            copy.src_pitch = copy.dst_pitch = planes.rows * planes.row_bytes
            copy(self._stream)

    def _copy(self, copy: Any) -> None:
        with self.current():
            copy(self._stream)
            self.synchronize()

    def _planewise(self, planes: Planes, num_bytes: int) -> Any:
        copy = self._driver.Memcpy2D()
        copy.width_in_bytes, copy.height = num_bytes, planes.count
        return copy

    def synchronize(self) -> None:
        """See `device.Device`; errors of earlier work come up here."""
        with self.current():
            self._stream.synchronize()
        if self._indices is not None:
            self._indices.waited()

    def synchronize_all(self) -> None:
        """See `device.Device`."""
        with self.current():
            self._driver.Context.synchronize()

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """See `device.Device`."""
        try:
            with self.current(), self._recording():
                return self._capture(enqueue)
        except (EdgeLLMError, self._driver.Error) as error:
            if str(error) not in self._refusals:
                self._refusals.add(str(error))
                _log.warning("%s; such passes are enqueued piece by piece, which is slower", error)
            return enqueue
        finally:
            self._free_unused()

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """No memory is freed meanwhile, neither by finalizers nor by the garbage collector."""
        is_collecting = gc.isenabled()
        gc.disable()  # TensorRT's own objects free memory, too
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False
            if is_collecting:
                gc.enable()

    def _capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        graphs, stream = self._graphs, self._graphs.CUstream(self.stream)
        mode = graphs.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._ask("cuStreamBeginCapture", stream, mode)
        try:
            enqueue()
        finally:
            ended = graphs.cuStreamEndCapture(stream)
        graph = _result("cuStreamEndCapture", ended)
        try:
            executable = self._ask("cuGraphInstantiate", graph, 0)
        finally:
            self._ask("cuGraphDestroy", graph)

        def replay() -> None:
            with self.current():
                self._ask("cuGraphLaunch", executable, stream)

        destroy = functools.partial(self._ask, "cuGraphExecDestroy", executable)
        self._freed_with(replay, SimpleNamespace(free=destroy))
        return replay

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Call a function of cuda-python that graphs need; see `_result`."""
        try:
            return _result(name, getattr(self._graphs, name)(*arguments))
        except RuntimeError as error:  # the driver lacks it
            raise _no_graph(name, error) from None


def _result(name: str, answer: tuple[Any, ...]) -> Any:
    """What a function of cuda-python gave, or None; raises `EdgeLLMError` for an error code."""
    status, *found = answer
    if int(status) != 0:
        raise _no_graph(name, status)
    return found[0] if found else None


def _no_graph(name: str, reason: object) -> EdgeLLMError:
    return EdgeLLMError(
        f"a pass cannot be run as a CUDA graph: {name} gives {reason}",
        hint="report it with edgellm-doctor's output",
    )
