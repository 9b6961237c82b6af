"""`cuda.py` on a driver that watches threads: contexts in pairs, memory, graphs that fail."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeDriver, fake_bindings, fake_graphs

from edgellm.core.errors import (
    EdgeLLMError,
    LimitError,
)
from edgellm.device_runtime import gpu, runners
from edgellm.device_runtime.gpu import compute_capability, newest_ptx
from edgellm.device_runtime.kernels.triton import catalog
from edgellm.device_runtime.runners.tensorrt.cuda import driver as cuda
from edgellm.device_runtime.runners.tensorrt.cuda import gather
from edgellm.device_runtime.runners.tensorrt.cuda.kernels import argument_codes
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import NewRows, Planes
from edgellm.device_runtime.runners.tensorrt.cuda.python_bindings import PythonBindings
from edgellm.device_runtime.runners.tensorrt.library.runtime import LoadedEngine

PLANES = Planes(address=1 << 20, count=2, rows=8, row_bytes=32)


@pytest.fixture(params=["pycuda", "cuda-python"])
def open_gpu(request) -> Callable[..., cuda.CudaDevice]:
    """A device whose driver is called through a package."""

    def made(driver: FakeDriver, fails_at: str = "") -> cuda.CudaDevice:
        if request.param == "pycuda":
            graphs = fake_graphs(driver, fails_at=fails_at)
            return cuda.CudaDevice(driver, graphs, driver.Device(0))
        bindings = fake_bindings(driver, fails_at=fails_at)
        calls = PythonBindings(bindings)
        return cuda.CudaDevice(calls, bindings, calls.Device(0))

    return made


def _work(device: cuda.CudaDevice) -> None:
    memory, host = device.allocate(64), device.pinned(64)
    device.upload(memory.address, host)
    device.move_rows(PLANES, memory.address, 1, 0)
    device.gather_rows(memory.address, memory.address, np.array([1, 2]), 16)
    device.gather_rows(memory.address, memory.address, np.array([2, 1]), 16)
    device.gather_rows_at(memory.address, memory.address, memory.address, 2, 16)
    device.copy(memory.address, memory.address, 16)
    device.launch(catalog.lay_out(64), (1, 1, 1), [memory.address] * 8)
    device.copy_rows(PLANES, 1, 5, 3)
    device.append_rows(
        PLANES,
        NewRows(address=memory.address, stride=256, planes=1, write_index_address=memory.address),
        1,
    )
    device.download(host, memory.address)
    device.capture(lambda: device.upload(memory.address, host))()
    assert device.free_bytes() > 0
    device.synchronize()


def test_contexts_are_pushed_and_popped_in_pairs_in_every_thread(open_gpu):
    driver = FakeDriver()
    device = open_gpu(driver)
    assert not driver.stack
    faults: list[BaseException] = []

    def elsewhere() -> None:
        try:
            _work(device)
            assert not driver.stack
        except BaseException as error:  # noqa: BLE001
            faults.append(error)

    thread = threading.Thread(target=elsewhere, name="engine")
    thread.start()
    thread.join()
    assert not faults
    _work(device)
    assert not driver.stack
    assert {who for _, who in driver.calls} == {"engine", "MainThread"}
    assert driver.alive == 2  # the device's own, of indices


def test_rows_of_all_planes_are_copied_on_the_stream(open_gpu):
    driver = FakeDriver()
    device = open_gpu(driver)
    device.copy_rows(PLANES, 1, 5, 3)  # of 2 planes of 8 rows of 32 bytes
    at = PLANES.address
    expected = [at + 32, at + 5 * 32, 256, 256, 96, 2]
    assert driver.calls[-1][0] == f"planes {expected}"


def test_rows_are_read_and_written_on_the_stream_and_waited_for(open_gpu):
    """A copy from pageable memory on the legacy stream may go on when its call is over."""
    driver = FakeDriver()
    device = open_gpu(driver)
    rows, at = device.save_rows(PLANES, 3, 1), PLANES.address
    device.load_rows(PLANES, rows, 1)
    names = [name for name, _ in driver.calls if name.startswith(("planes ", "synchronize"))]
    read, written = [at + 32, "host", 256, 96, 96, 2], ["host", at + 32, 96, 256, 96, 2]
    assert names == [f"planes {read}", "synchronize", f"planes {written}", "synchronize"]


def test_a_kernel_is_loaded_once_and_has_the_arguments_of_its_signature(open_gpu):
    driver = FakeDriver()
    device = open_gpu(driver)
    for _ in range(3):
        device.launch(catalog.lay_out(64), (1, 1, 1), [1 << 20] * 2 + [8, 1, 0] + [1 << 20] * 3)
    names = [name for name, _ in driver.calls]
    assert (names.count("module"), names.count("launch")) == (4, 3)  # three are hand-written
    assert argument_codes(catalog.lay_out(64).kernel) == "PPiiiPPP"
    assert driver.first_arguments in ([], [1 << 20] * 3)
    with pytest.raises(EdgeLLMError, match="no kernel lay_out-nodes96 was compiled"):
        device.launch(catalog.lay_out(96), (1, 1, 1), [])


@pytest.mark.parametrize(
    ("cuda_version", "newest"),
    [((12, 2), 82), ((12, 5), 85), ((12, 6), 85), ((12, 8), 87), ((13, 0), 90), ((13, 1), 91)],
)
def test_the_newest_ptx_of_a_driver(cuda_version, newest):
    assert newest_ptx(cuda_version) == newest


class Library:
    """`libcuda.so.1` of a machine with one GPU; one call gives a status."""

    def __init__(self, name: str = "", status: int = 0) -> None:
        self._name, self._status = name, status

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == "cuDeviceGetAttribute":
                arguments[0]._obj.value = {75: 11, 76: 0}[arguments[1]]
            return self._status if name == self._name else 0

        return call


def test_a_driver_that_fails_is_no_machine_without_a_gpu(monkeypatch):
    """The status 999: the user may not open the device; an engine for the CPU would be built."""

    def load(*given: Any) -> None:
        found = Library(*given)
        monkeypatch.setattr(
            gpu, "ctypes", SimpleNamespace(**{**vars(ctypes), "CDLL": lambda _: found})
        )

    load()
    assert compute_capability() == 110
    for name in ("cuInit", "cuDeviceGet", "cuDeviceGetAttribute"):
        load(name, 999)
        for ask in (
            compute_capability,
            lambda: runners.automatic(),
            lambda: runners.automatic("cuda"),
        ):
            with pytest.raises(EdgeLLMError, match=f"driver fails: {name} gives 999") as error:
                ask()
            assert "group" in error.value.hint
        assert runners.automatic("cpu")[0] == "onnxruntime_cpu"
    for name, status in (("cuInit", 100), ("cuInit", 34), ("cuDeviceGet", 101)):
        load(name, status)
        assert (compute_capability(), gpu.name(), gpu.memory_bytes()) == (None, "", 0)


def test_indices_wait_only_when_their_memory_is_full(open_gpu):
    driver = FakeDriver()
    device, rows = open_gpu(driver), np.arange(4000)[::-1]
    indices = gather.Indices(device)
    waits = lambda: sum(name == "synchronize" for name, _ in driver.calls)  # noqa: E731
    device._indices, before = indices, waits()
    found = [device.gather_rows(0, 0, rows, 16) for _ in range(4)]
    assert (len(found), waits()) == (4, before)
    device.gather_rows(0, 0, rows, 16)
    assert waits() == before + 1


def test_a_context_is_popped_when_something_fails(open_gpu):
    driver = FakeDriver(free_bytes=1000)
    device = open_gpu(driver)
    with pytest.raises(LimitError, match="the GPU has 0 MB left"):
        device.allocate(2000)
    with pytest.raises(KeyError), device.current(), device.current():
        raise KeyError
    assert not driver.stack


def test_memory_outlives_its_views_and_is_freed_in_any_thread(open_gpu):
    driver = FakeDriver()
    device = open_gpu(driver)
    view = device.pinned(64)[8:16]
    assert driver.alive == 1
    held = [view, device.allocate(64)]
    del view
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert driver.alive == 0


def test_memory_of_a_gpu_that_stopped_stays_allocated(open_gpu, monkeypatch):
    """Its context can no longer be pushed; attempts to free memory end all the same."""
    driver = FakeDriver()
    device = open_gpu(driver)
    held = [device.allocate(64), device.allocate(64)]

    def fails() -> None:
        raise device._driver.Error("cuCtxPushCurrent failed")

    monkeypatch.setattr(device, "_context", SimpleNamespace(push=fails))
    held.clear()
    assert (driver.alive, len(device._unused)) == (2, 2)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ModuleNotFoundError("No module named 'pycuda'"), ""),
        (ImportError("libcurand.so.10: no such file"), "pycuda does not load (libcurand.so.10"),
    ],
)
def test_a_pycuda_that_does_not_load_is_replaced(monkeypatch, caplog, error, shown):
    """One that is not installed is no news."""
    bindings = fake_bindings(FakeDriver())

    def load(name: str) -> object:
        if name == "pycuda.driver":
            raise error
        return bindings

    monkeypatch.setattr(cuda.importlib, "import_module", load)
    driver, graphs = cuda.import_bindings()
    assert isinstance(driver, PythonBindings)
    assert graphs is bindings
    assert (shown in caplog.text) if shown else not caplog.text


@pytest.mark.parametrize(
    "fails_at",
    [
        "cuStreamBeginCapture",
        "cuStreamEndCapture",
        "cuGraphInstantiate",
        "cuGraphDestroy",
        "enqueue",
        "driver",
        "wait",
    ],
)
def test_what_cannot_be_recorded_runs_all_the_same(open_gpu, caplog, fails_at):
    driver = FakeDriver()
    device, asked = open_gpu(driver, fails_at), []

    def enqueue() -> None:
        asked.append(1)
        if fails_at == "enqueue" and device._is_capturing:
            raise EdgeLLMError("TensorRT does not run the pass")
        if fails_at == "driver" and device._is_capturing:
            raise device._driver.Error("cuLaunchKernel failed")
        if fails_at == "wait":
            device.synchronize()  # no driver allows it while a graph is recorded

    for _ in range(2):
        device.capture(enqueue)()
    assert len(asked) >= 2
    assert "cuGraphLaunch" not in {name for name, _ in driver.calls}
    (record,) = caplog.records  # one warning
    assert "piece by piece" in record.message


def test_a_pass_that_cannot_be_recorded_stops_no_others(open_gpu, caplog):
    """Those of other engines, and other passes of the same engine; each reason is logged once."""
    driver = FakeDriver()
    device = open_gpu(driver)

    def refused() -> None:
        if device._is_capturing:
            raise EdgeLLMError("TensorRT does not run the pass")

    def other() -> None:
        device.copy(0, 0, 16)

    for _ in range(2):
        assert device.capture(refused) is refused
        device.capture(other)()
    assert [name for name, _ in driver.calls].count("cuGraphLaunch") == 2
    (record,) = caplog.records
    assert "TensorRT does not run the pass; such passes are enqueued piece" in record.message


def test_recorded_graphs_are_destroyed(open_gpu):
    """With their replay, or after the capture in which it goes."""
    driver = FakeDriver()
    device = open_gpu(driver)
    replays = [device.capture(lambda: None) for _ in range(2)]

    def enqueue() -> None:
        replays.clear()
        gc.collect()
        assert "cuGraphExecDestroy" not in {name for name, _ in driver.calls}

    replay = device.capture(enqueue)
    names = [name for name, _ in driver.calls]
    assert (names.count("cuGraphInstantiate"), names.count("cuGraphExecDestroy")) == (3, 2)
    replay()


def test_functions_that_a_driver_lacks_are_reported(caplog):
    """cuda-python raises a RuntimeError for them, and for a driver that is missing."""
    driver = FakeDriver()
    bindings = fake_bindings(driver)

    def lacking(*_: Any) -> None:
        raise RuntimeError("function is not found")

    calls = PythonBindings(bindings)
    device = cuda.CudaDevice(calls, bindings, calls.Device(0))
    bindings.cuGraphInstantiate = lacking
    device.capture(lambda: None)()
    assert "cuGraphInstantiate gives function is not found" in caplog.text
    bindings.cuMemAlloc = bindings.cuMemGetInfo = lacking
    with pytest.raises(EdgeLLMError, match="cuMemAlloc failed: function is not found"):
        device.allocate(64)
    with pytest.raises(EdgeLLMError, match="cuMemGetInfo failed: function is not found"):
        device.free_bytes()
    assert not driver.stack


def test_memory_is_freed_after_a_capture(open_gpu, caplog):
    """The garbage collector may run meanwhile; a driver refuses to free."""
    driver = FakeDriver()
    device = open_gpu(driver)
    cycle = SimpleNamespace(memory=device.allocate(64))
    cycle.itself, held = cycle, [device.pinned(64)]
    del cycle

    def enqueue() -> None:
        assert not gc.isenabled()
        held.clear()
        gc.collect()
        device.copy(0, 0, 16)

    device.capture(enqueue)()
    names = [name for name, _ in driver.calls]
    assert names.count("cuGraphLaunch") == 1
    assert (driver.alive, device._unused, gc.isenabled()) == (0, deque(), True)
    assert not caplog.records


@pytest.mark.parametrize(("integrated", "free"), [(True, 6 << 30), (False, 1 << 30)])
def test_free_memory_of_boards_counts_what_the_system_would_give(
    open_gpu, monkeypatch, integrated, free
):
    monkeypatch.setattr(cuda, "available_memory_bytes", lambda: 6 << 30)
    assert open_gpu(FakeDriver(integrated=integrated)).free_bytes() == free


def test_tensorrt_is_called_in_the_context(open_gpu):
    """Loading, contexts and passes, in a thread that did not open the device."""
    driver = FakeDriver()
    device = open_gpu(driver)
    called = lambda name, found=True: lambda *_: (driver.use(name), found)[1]  # noqa: E731
    context = SimpleNamespace(
        set_device_memory=called("set_device_memory"),
        set_optimization_profile_async=called("profile"),
        set_input_shape=called("shape"),
        set_tensor_address=lambda *_: True,
        execute_async_v3=called("execute"),
        is_stream_capturable=called("capturable"),
    )
    engine = SimpleNamespace(num_io_tensors=0, create_execution_context=called("context", context))
    trt = SimpleNamespace(ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED=0))
    loaded = LoadedEngine(trt=trt, runtime=None, engine=engine, device=device, log=None)  # type: ignore[arg-type]

    def work() -> None:
        made = loaded.new_context(0, device.allocate(1))
        made.set_shape("x", (1, 2))
        made.enqueue()
        assert made.is_capturable()

    thread = threading.Thread(target=work, name="engine")
    thread.start()
    thread.join()
    names = [name for name, _ in driver.calls]
    assert names.index("synchronize all") > names.index("profile")  # weights may be on their way
    assert {("execute", "engine"), ("capturable", "engine")} <= set(driver.calls)
    assert not driver.stack


@pytest.mark.parametrize(
    "given", ["driver, graphs", "PythonBindings(graphs), graphs"], ids=["pycuda", "cuda-python"]
)
def test_a_process_ends_cleanly_with_memory_that_lives(given):
    """The driver is not called any more, and no context remains to end the process.

    The primary context is given back before pycuda's own destructor warns that it cannot.
    """
    script = (
        "import atexit, numpy, sys; from fake_cuda import FakeDriver, fake_bindings\n"
        "from edgellm.device_runtime.runners.tensorrt.cuda import driver as cuda\n"
        "driver = FakeDriver()\n"
        "atexit.register(driver.warn_if_attached)\n"
        "from edgellm.device_runtime.runners.tensorrt.cuda.python_bindings import PythonBindings\n"
        "graphs = fake_bindings(driver)\n"
        f"cuda.import_bindings = lambda: ({given})\n"
        "device = cuda.open_device()\n"
        "replay = device.capture(lambda: device.copy(0, 0, 16))\n"
        "sys.held = device.allocate(64), device.pinned(64), replay\n"
        "driver.use = lambda name: print('asked for', name)\n"
        "assert not driver.stack\n"
    )
    path = os.pathsep.join(sys.path)
    found = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
