"""Image rows of prompts on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.device_runtime.runners.tensorrt.bound_pass import Placed
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import CompiledEngine, Device
from edgellm.device_runtime.runners.tensorrt.packed_buffers import Block, Layout, packed_bytes


class DeviceImages:
    """What is held of prompts' images, and rows of zeros for passes without any.

    Rows go to the device with the pass that reads them: an engine takes as many image rows as a
    pass has rows, whatever else is held.
    """

    def __init__(self, device: Device, engine: CompiledEngine, first_id: int) -> None:
        """Token ids from `first_id` on stand for image rows."""
        self._device, self._first_id = device, first_id
        self._tensors = {
            name: engine.tensors[name]
            for name in (graph_io.IMAGE_EMBEDS, graph_io.DEEPSTACK_EMBEDS)
            if name in engine.tensors
        }
        self._held: Mapping[str, NDArray[Any]] = {}
        layout = self._layout(1)
        self._none = Block(device, packed_bytes(layout))
        self.none = self._sent(self._none, layout, {})  # of a pass without image rows
        self._block, self._num_bytes = self._none, 0

    def hold(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        """See `runners.Runner`."""
        self._held = inputs

    def of(self, token_ids: NDArray[np.int64]) -> tuple[Placed, NDArray[np.int64]]:
        """What a pass over these tokens reads, and the ids by which it finds its image rows."""
        is_image = token_ids >= self._first_id
        if not self._tensors or not is_image.any():
            return self.none, token_ids
        rows = token_ids[is_image] - self._first_id
        begin, end = int(rows.min()), int(rows.max()) + 1
        layout = self._layout(end - begin)
        if (size := packed_bytes(layout)) > self._num_bytes:
            self._block, self._num_bytes = Block(self._device, size), size
        some = {name: self._held[name][..., begin:end, :] for name in self._tensors}
        return self._sent(self._block, layout, some), token_ids - begin * is_image

    def _layout(self, rows: int) -> Layout:
        return {
            name: (tuple(rows if dim < 0 else dim for dim in info.shape), info.dtype)
            for name, info in self._tensors.items()
        }

    def _sent(self, block: Block, layout: Layout, arrays: Mapping[str, NDArray[Any]]) -> Placed:
        """Arrays on the device; zeros in the place of those that are not there."""
        packed = block.pack(layout)
        packed.host[:] = 0
        for name, array in arrays.items():
            packed.arrays[name][:] = array
        block.upload(packed)
        self._device.synchronize()  # who comes next writes into the same memory of the host
        return {name: (shape, packed.addresses[name]) for name, (shape, _) in layout.items()}
