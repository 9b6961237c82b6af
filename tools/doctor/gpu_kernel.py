"""A kernel on the GPU, launched as engines launch theirs."""

from __future__ import annotations

import numpy as np

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.runners.tensorrt.cuda.driver import open_device

_ORDER, _ROW_BYTES = np.array([3, 0, 2]), 64


def run() -> None:
    """Open the first GPU, gather rows on it, and compare them.

    Raises:
        EdgeLLMError: a package is missing, the driver fails, or the rows are wrong.
    """
    device = open_device()
    rows = np.arange(4 * _ROW_BYTES, dtype=np.uint8).reshape(4, _ROW_BYTES)
    expected = rows[_ORDER].reshape(-1)
    host, back = device.pinned(rows.nbytes), device.pinned(expected.nbytes)
    source, target = device.allocate(rows.nbytes), device.allocate(expected.nbytes)
    host[:], back[:] = rows.reshape(-1), 0
    device.upload(source.address, host)
    device.gather_rows(target.address, source.address, _ORDER, _ROW_BYTES)
    device.download(back, target.address)
    device.synchronize()
    if not np.array_equal(back, expected):
        raise EdgeLLMError(
            "a kernel that copies rows on the GPU gives wrong rows",
            hint="restart the machine; if it stays, install the NVIDIA driver again",
        )
