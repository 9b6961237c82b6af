"""LoRA adapters on a GPU: the matrices of an engine's slots, and the mask of a pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.device_runtime.runners.lora_slots import AdapterPlaces
from edgellm.device_runtime.runners.tensorrt.bound_pass import Placed
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import CompiledEngine, Device
from edgellm.device_runtime.runners.tensorrt.packed_buffers import Layout


class DeviceAdapters(AdapterPlaces):
    """Matrices of all adapter slots at fixed addresses; empty slots are zeros."""

    def __init__(
        self, *, engine: CompiledEngine, device: Device, count: int, placed_rows: int
    ) -> None:
        """Allocate `count` slots for an engine with adapters.

        Args:
            engine: the loaded engine.
            device: its device.
            count: number of slots.
            placed_rows: maximum tokens of a pass without host inputs.

        Raises:
            LimitError: the device has too little memory.
        """
        last = engine.num_profiles - 1  # of passes with adapters
        tensors = {
            name: (engine.shape_range(name, last)[1], info.dtype)
            for name, info in engine.tensors.items()
            if info.is_input
        }
        super().__init__(tensors, count)
        self._device = device
        sizes = {
            name: int(np.prod(each)) * self.dtype.itemsize for name, each in self.shapes.items()
        }
        self._buffers = {name: device.allocate(size) for name, size in sizes.items()}
        self._staging = device.pinned(max(sizes.values()))
        self._hidden = device.allocate(placed_rows)  # a mask of one column, of zeros

    def hold(self, weights: NDArray[np.float32], table: NDArray[np.int64]) -> None:
        """See `Runner.hold_adapters`; synchronous, and no pass may run."""
        for name, matrix in self.matrices(weights, table):
            host = self._staging[: matrix.nbytes]
            host[:] = matrix.reshape(-1).view(np.uint8)
            self._device.upload(self._buffers[name].address, host)
            self._device.synchronize()

    def placed(self, *, are_used: bool) -> Placed:
        """The matrices of a pass: all columns, or a single masked one."""
        return {
            name: ((columns if are_used else 1, width), self._buffers[name].address)
            for name, (columns, width) in self.shapes.items()
        }

    def unused(self, rows: int) -> Placed:
        """Masks and matrices of a pass of `rows` tokens without adapters."""
        masks = self.layout(rows, are_used=False)
        placed = {name: (shape, self._hidden.address) for name, (shape, _) in masks.items()}
        return {**placed, **self.placed(are_used=False)}

    def of(self, inputs: Mapping[str, NDArray[Any]]) -> tuple[dict[str, NDArray[Any]], bool]:
        """The masks of a pass, and whether a token has an adapter.

        The inputs have `ADAPTER_ROWS`, or one `ADAPTER` for all tokens, or neither.
        """
        rows = inputs[graph_io.INPUT_IDS].shape[1]
        lone = inputs.get(graph_io.ADAPTER, np.zeros(1, np.int64))
        own = inputs.get(graph_io.ADAPTER_ROWS, np.repeat(lone, rows))
        if own.any():
            return self.masks_of(own[None]), True
        return {name: np.zeros((1, rows, 1), np.bool_) for name in self.masks}, False

    def layout(self, rows: int, *, are_used: bool) -> Layout:
        """The layout of the masks of a pass of `rows` tokens."""
        return {
            name: ((1, rows, columns if are_used else 1), np.bool_)
            for name, columns in self.masks.items()
        }
