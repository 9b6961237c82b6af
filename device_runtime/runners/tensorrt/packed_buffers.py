"""Packed inputs and outputs in device memory that all passes of a runner share.

Varying inputs are written to one pinned host block and uploaded in one copy. The outputs that the
host reads in every pass are downloaded in one copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from edgellm.device_runtime.runners.tensorrt.cuda.protocols import ALIGNMENT, Device

Shape = tuple[int, ...]
Layout = Mapping[str, tuple[Shape, DTypeLike]]  # tensors by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Consecutive tensors in a block."""

    arrays: dict[str, NDArray]  # views of the host block
    addresses: dict[str, int]  # on the device
    host: NDArray[np.uint8]  # all of them
    address: int


class Block:
    """Pinned host memory, and device memory of the same size."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        """Allocate `num_bytes` on both sides."""
        self._device = device
        self._on_device = device.allocate(num_bytes)
        self._on_host = device.pinned(num_bytes)

    def pack(self, layout: Layout) -> Packed:
        """Lay out the tensors of a pass; passes overwrite each other."""
        arrays, addresses, end = {}, {}, 0
        for name, (shape, dtype) in layout.items():
            size = math.prod(shape) * np.dtype(dtype).itemsize
            arrays[name] = self._on_host[end : end + size].view(dtype).reshape(shape)
            addresses[name] = self._on_device.address + end
            end += aligned(size)
        assert end <= len(self._on_host)
        return Packed(
            arrays=arrays,
            addresses=addresses,
            host=self._on_host[:end],
            address=self._on_device.address,
        )

    def upload(self, packed: Packed) -> None:
        """Ask for the copy to the device."""
        self._device.upload(packed.address, packed.host)

    def download(self, packed: Packed) -> None:
        """Ask for copies from the device, of what is in the tensors and not of what is between."""
        for name, array in packed.arrays.items():
            self._device.download(array, packed.addresses[name])


class Tensors:
    """Tensors on the device alone."""

    def __init__(self, device: Device, layout: Layout) -> None:
        """Allocate, zeroed."""
        self._buffer = device.allocate(packed_bytes(layout))
        self.addresses: dict[str, int] = {}
        end = self._buffer.address
        for name, (shape, dtype) in layout.items():
            self.addresses[name] = end
            end += aligned(math.prod(shape) * np.dtype(dtype).itemsize)

    def __getitem__(self, name: str) -> int:
        return self.addresses[name]


def aligned(num_bytes: int) -> int:
    """Up to the next tensor."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def packed_bytes(layout: Layout) -> int:
    """What `pack` takes."""
    return sum(
        aligned(math.prod(shape) * np.dtype(dtype).itemsize) for shape, dtype in layout.values()
    )
