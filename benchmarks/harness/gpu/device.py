"""The GPU of this machine, or a fake one."""

from __future__ import annotations

import time
from collections.abc import Callable

from edgellm.device_runtime.gpu import compute_capability
from edgellm.device_runtime.runners.tensorrt.cuda.driver import CudaDevice, open_device
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import Device

_REPEATS, _REPLAYS = 20, 3


def open_gpu(*, fake: bool) -> tuple[Device, int]:
    """Return a device and its compute capability."""
    if fake:
        from fake_gpu import FakeDevice

        device = FakeDevice()
        return device, device.sm
    capability = compute_capability()
    if capability is None:
        raise SystemExit("error: there is no NVIDIA GPU here\nhint: --quick runs on a fake GPU")
    return open_device(), capability


def seconds_of(device: Device, launch: Callable[[], None]) -> float:
    """Return the seconds of a launch: the host times replays of a graph of launches.

    Launches one by one would be timed with what they cost the host. A fake GPU launches once.
    """
    is_real = isinstance(device, CudaDevice)
    repeats, replays = (_REPEATS, _REPLAYS) if is_real else (1, 1)

    def launches() -> None:
        for _ in range(repeats):
            launch()

    launch()  # a kernel is loaded at its first launch, which no graph may record
    device.synchronize()
    replay, found = device.capture(launches), []
    for _ in range(replays):
        start = time.perf_counter()
        replay()
        device.synchronize()
        found.append(time.perf_counter() - start)
    return min(found) / repeats
