"""The NVIDIA GPU of this machine, asked through the driver's own library."""

from __future__ import annotations

import ctypes

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


def compute_capability() -> int | None:
    """That of the first GPU, 89 for 8.9; None without a GPU or without its driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    calls = (
        (driver.cuInit, 0),
        (driver.cuDeviceGet, ctypes.byref(device), 0),
        (driver.cuDeviceGetAttribute, ctypes.byref(major), _MAJOR, device),
        (driver.cuDeviceGetAttribute, ctypes.byref(minor), _MINOR, device),
    )
    if any(function(*arguments) for function, *arguments in calls):
        return None
    return 10 * major.value + minor.value
