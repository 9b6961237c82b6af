"""Properties of the machine's NVIDIA GPU, from the driver's library."""

from __future__ import annotations

import ctypes

from edgellm.core.errors import EdgeLLMError

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
# Statuses of a machine without a GPU: the toolkit's stub library, no device, no such device.
_NO_GPU = {34, 100, 101}


def compute_capability() -> int | None:
    """Compute capability of the first GPU, 89 for 8.9; None without a GPU or its driver.

    Raises:
        EdgeLLMError: there is a driver that fails, as all functions here.
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    asked = _ask(
        ("cuDeviceGetAttribute", ctypes.byref(major), _MAJOR),
        ("cuDeviceGetAttribute", ctypes.byref(minor), _MINOR),
    )
    return 10 * major.value + minor.value if asked else None


def name() -> str:
    """Name of the first GPU; "" without a GPU."""
    text = ctypes.create_string_buffer(256)
    asked = _ask(("cuDeviceGetName", text, len(text)))
    return text.value.decode(errors="replace") if asked else ""


def memory_bytes() -> int:
    """Memory of the first GPU, on a Jetson the system's; 0 without a GPU."""
    size = ctypes.c_size_t()
    return size.value if _ask(("cuDeviceTotalMem_v2", ctypes.byref(size))) else 0


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA version of the driver, (13, 0) for 13.0; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return version.value // 1000, version.value % 1000 // 10


def newest_ptx(cuda: tuple[int, int]) -> int:
    """The newest PTX version of a CUDA driver, 85 for 8.5."""
    major, minor = cuda
    if major >= 13:
        return 10 * (major - 4) + minor
    return 10 * (major - 4) + minor - (minor > 5)  # CUDA 12.6 brought none


def _ask(*questions: tuple) -> bool:
    """Call driver functions that take a device last; returns False without a GPU.

    Raises:
        EdgeLLMError: a call fails for another reason.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    device = ctypes.c_int()
    for name, *rest in (("cuInit", 0), ("cuDeviceGet", ctypes.byref(device), 0)):
        status = getattr(driver, name)(*rest)
        if status in _NO_GPU:
            return False
        _require_success(name, status)
    for name, *rest in questions:
        _require_success(name, getattr(driver, name)(*rest, device))
    return True


def _require_success(name: str, status: int) -> None:
    if status:
        raise EdgeLLMError(
            f"the NVIDIA driver fails: {name} gives {status}",
            hint="add the user to the groups video and render, and see that nvidia-smi works; "
            "--backend onnxruntime --device cpu needs no GPU",
        )
