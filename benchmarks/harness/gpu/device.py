"""The GPU of this machine, or a fake one."""

from __future__ import annotations

from edgellm.device_runtime.gpu import compute_capability
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import Device


def open_gpu(*, fake: bool) -> tuple[Device, int]:
    """Return a device and its compute capability."""
    if fake:
        from fake_gpu import FakeDevice

        device = FakeDevice()
        return device, device.sm
    from edgellm.device_runtime.runners.tensorrt.cuda.driver import open_device

    capability = compute_capability()
    assert capability is not None, "there is no NVIDIA GPU here"
    return open_device(), capability
