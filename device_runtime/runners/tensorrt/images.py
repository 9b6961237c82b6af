"""Image rows of a prompt on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm import contract
from edgellm.device_runtime.runners.tensorrt.bound_pass import Placed
from edgellm.device_runtime.runners.tensorrt.device import Buffer, CompiledEngine, Device
from edgellm.device_runtime.runners.tensorrt.packed_buffers import aligned


class DeviceImages:
    """What is held of a prompt's images, and rows of zeros for passes without any."""

    def __init__(self, device: Device, engine: CompiledEngine, first_id: int) -> None:
        """Token ids from `first_id` on stand for image rows."""
        self._device, self._first_id = device, first_id
        self._tensors = {
            name: engine.tensors[name]
            for name in (contract.IMAGE_EMBEDS, contract.DEEPSTACK_EMBEDS)
            if name in engine.tensors
        }
        shapes = {
            name: tuple(1 if dim < 0 else dim for dim in info.shape)
            for name, info in self._tensors.items()
        }
        none = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        self._none, self._none_buffers = self._placed(none)
        self._held, self._buffers = self._none, self._none_buffers

    def hold(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        """See `runners.Runner`."""
        self._held, self._buffers = self._placed(inputs)

    def of(self, token_ids: NDArray[np.int64]) -> tuple[Placed, bool]:
        """What a pass over these tokens reads, and whether it is more than the row of zeros."""
        has_images = bool(self._tensors) and bool((token_ids >= self._first_id).any())
        return (self._held if has_images else self._none), has_images

    def _placed(self, arrays: Mapping[str, NDArray[Any]]) -> tuple[Placed, list[Buffer]]:
        placed, buffers = {}, []
        for name, info in self._tensors.items():
            array = arrays[name].astype(info.dtype)
            buffers.append(self._device.allocate(aligned(array.nbytes)))
            host = self._device.pinned(array.nbytes)
            host[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self._device.upload(buffers[-1].address, host)
            self._device.synchronize()
            placed[name] = (array.shape, buffers[-1].address)
        return placed, buffers
