"""edgellm's calls of CUDA through the real cuda-python or pycuda, on the driver of `stub_cuda.c`.

`test_real_cuda.py` starts it, and reads the results as JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.metadata
import json
import os
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgellm.core.errors import EdgeLLMError, LimitError
from edgellm.device_runtime import gpu
from edgellm.device_runtime.kernels.triton import catalog, prebuilt
from edgellm.device_runtime.runners.tensorrt.cuda import driver
from edgellm.device_runtime.runners.tensorrt.cuda.launch import DriverKernels
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import Planes

COUNT, ROWS, WIDTH = 3, 16, 64  # planes, rows of each, bytes of a row
STUB = ctypes.CDLL("libcuda.so.1")
STUB.stub_call.restype = ctypes.c_char_p


def check_planes(device: driver.CudaDevice) -> None:
    """Rows of planes are written, moved and read."""
    memory = device.allocate(COUNT * ROWS * WIDTH)
    planes = Planes(address=memory.address, count=COUNT, rows=ROWS, row_bytes=WIDTH)
    given = np.random.default_rng(0).integers(0, 256, (COUNT, ROWS, WIDTH), np.uint8)
    device.load_rows(planes, given.reshape(COUNT, -1))
    device.copy_rows(planes, 1, 5, 3)
    expected = given.copy()
    expected[:, 5:8] = given[:, 1:4]
    found = device.save_rows(planes, ROWS - 2, 2)
    np.testing.assert_array_equal(found.reshape(COUNT, -1, WIDTH), expected[:, 2:])


def check_copies(device: driver.CudaDevice) -> None:
    """Copies are done when they are waited for, and in their order."""
    size = ROWS * WIDTH
    source, target = device.allocate(size), device.allocate(size)
    host, back = device.pinned(size), device.pinned(size)
    host[:] = np.random.default_rng(1).integers(0, 256, size)
    back[:] = 7
    rows = np.array([3, 1, 2, 15])
    device.upload(source.address, host)
    device.gather_rows(target.address, source.address, rows, WIDTH)
    device.gather_rows(target.address + 4 * WIDTH, source.address, np.arange(8), WIDTH)
    device.copy(target.address + 12 * WIDTH, source.address, 4 * WIDTH)
    device.download(back, target.address)
    assert (back == 7).all(), "the driver of the test copies later"
    device.synchronize()
    order = [*rows, *range(8), *range(4)]
    np.testing.assert_array_equal(back.reshape(ROWS, WIDTH), host.reshape(ROWS, WIDTH)[order])


def check_capture(device: driver.CudaDevice) -> None:
    """A graph reads its inputs each time it is launched; memory is freed after the capture."""
    memory, host, back = device.allocate(WIDTH), device.pinned(WIDTH), device.pinned(WIDTH)
    held, cycle = [device.allocate(WIDTH)], SimpleNamespace(memory=device.allocate(WIDTH))
    cycle.itself = cycle
    del cycle

    def enqueue() -> None:
        held.clear()
        gc.collect()
        device.upload(memory.address, host)
        device.download(back, memory.address)

    replay = device.capture(enqueue)
    for value in (1, 2):
        host[:] = value
        replay()
        device.synchronize()
        assert (back == value).all()


def launch(device: driver.CudaDevice) -> None:
    kernel = catalog.lay_out(64)
    kinds = kernel.kernel.signature.values()
    given = [1 << 40 if kind.startswith("*") else 3 for kind in kinds]
    device.launch(kernel, (1, 1, 1), given)


def check_launch(device: driver.CudaDevice) -> None:
    """A kernel that ships with edgellm is found by its name, and launched."""
    launch(device)
    device.synchronize_all()
    assert device.free_bytes() > 0


WORK: list[Callable[[driver.CudaDevice], None]] = [
    check_planes,
    check_copies,
    check_capture,
    check_launch,
]


def new_device() -> driver.CudaDevice:
    driver.open_device.cache_clear()
    return driver.open_device()


def scenario() -> None:
    """All work of a device, from its opening to its end."""
    device = new_device()
    for work in WORK:
        work(device)
    device.close()


def drop_contexts() -> None:
    """Pop contexts off this thread's stack, and off pycuda's."""
    pycuda = sys.modules.get("pycuda.driver")
    if pycuda is not None:
        with contextlib.suppress(pycuda.Error):
            while STUB.stub_depth():
                pycuda.Context.pop()
    while STUB.stub_depth():
        STUB.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def check_rules() -> None:
    """Work with calls that may not be captured runs piece by piece, with the same results."""
    calls: list[Callable[[driver.CudaDevice], object]] = [
        driver.CudaDevice.synchronize,
        driver.CudaDevice.synchronize_all,
        lambda device: device.allocate(WIDTH),
        lambda device: device.pinned(WIDTH),
        launch,  # loads a module
    ]
    for call in calls:
        device = new_device()
        _check_rule(device, call)
        device.close()


def _check_rule(device: driver.CudaDevice, call: Callable[[driver.CudaDevice], object]) -> None:
    memory, host, back = device.allocate(WIDTH), device.pinned(WIDTH), device.pinned(WIDTH)

    def enqueue() -> None:
        device.upload(memory.address, host)
        call(device)
        device.download(back, memory.address)

    host[:] = 3
    replay = device.capture(enqueue)
    assert replay is enqueue, "the driver of the test rejects it"
    replay()
    device.synchronize()
    assert (back == 3).all()


def check_threads() -> None:
    """Each thread has a stack of contexts of its own, which ends empty."""
    device, faults = new_device(), []

    def elsewhere() -> None:
        try:
            for work in WORK:
                work(device)
            assert STUB.stub_depth() == 0
        except BaseException as error:  # noqa: BLE001
            faults.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert faults == []
    for work in WORK:
        work(device)
    assert STUB.stub_depth() == 0
    with pytest.raises(LimitError, match="2147 are needed"):
        device.allocate(2 << 30)


def check_memory() -> None:
    """All memory but that of indices is freed when its owners are gone, outside captures."""
    device = new_device()
    gc.collect()
    before = STUB.stub_alive()
    for work in WORK:
        work(device)
    gc.collect()
    assert STUB.stub_alive() == before + 2
    assert not device._refusals, "nothing invalidated the graph"


def check_kernels() -> int:
    """Every kernel of every GPU is found in its PTX by its name; how many there are."""
    kernels, count = DriverKernels(), 0
    for sm in catalog.TARGETS:
        for variant in catalog.variants(sm):
            kernels.load(prebuilt.find(variant, sm))
            count += 1
    return count


def failures(work: Callable[[], None]) -> tuple[int, list[str]]:
    """The number of calls, and what goes wrong if one of them fails, for each of them.

    Either this call fails alone, or the GPU stops there. An error is one of edgellm's with a
    hint, or the work ends as if nothing had failed. The thread's stack of contexts is empty
    afterwards, unless the pop itself failed.
    """
    STUB.stub_fail_at(-1)
    work()
    names = [STUB.stub_call(at).decode() for at in range(STUB.stub_num_calls())]
    found = []
    for at, name in enumerate(names):
        for is_alone in (True, False):
            (STUB.stub_fail_at if is_alone else STUB.stub_stop_at)(at)
            fault = _fault(work, name, is_alone=is_alone)
            STUB.stub_fail_at(-1)
            if fault:
                found.append(f"{at} {name}: {fault}")
            drop_contexts()
            gc.collect()
    return len(names), found


def _fault(work: Callable[[], None], name: str, *, is_alone: bool) -> str:
    """What is wrong with the end of some work; "" if nothing.

    Args:
        work: of which a call fails.
        name: of the call.
        is_alone: the others do not fail, so the error names this one.
    """
    try:
        work()
    except EdgeLLMError as error:
        if not error.hint or (is_alone and name.removesuffix("_v2") not in str(error)):
            return f"{error} ({error.hint})"
        left = STUB.stub_depth()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    else:
        left = STUB.stub_depth()
    return "a context is left" if left and name != "cuCtxPopCurrent_v2" else ""


def launch_a_kernel() -> None:
    """What a plugin in Python does, in TensorRT's thread with its context."""
    device, compiled = new_device(), prebuilt.find(catalog.keep_rows(80, "int8"), gpu_sm())
    with device.current():
        DriverKernels().load(compiled)((3, 2, 2), [1 << 40, 2, 3, 4, 80], device.stream)
    device.close()


def gpu_sm() -> int:
    return int(os.environ["STUB_SM"])


def read_machine() -> None:
    """What `llm_build` asks of the GPU."""
    assert gpu.compute_capability() == gpu_sm()
    assert (gpu.name(), gpu.memory_bytes()) == ("a stub", 128 << 30)


def _version(module: str) -> str:
    return importlib.metadata.version(module) if module in sys.modules else ""


def main() -> dict[str, Any]:
    sys.setdlopenflags(os.RTLD_LAZY)  # see `real_pycuda.py`
    scenario()
    gc.freeze()  # collections of imported modules would take most of the time
    check_threads()
    check_memory()
    check_rules()
    works = {"device": scenario, "plugin": launch_a_kernel, "machine": read_machine}
    found = {name: failures(work) for name, work in works.items()}
    return {
        "pycuda": _version("pycuda"),
        "kernels": check_kernels(),
        "calls": {name: calls for name, (calls, _) in found.items()},
        "failures": {name: faults for name, (_, faults) in found.items()},
    }


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
