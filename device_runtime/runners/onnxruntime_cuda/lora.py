"""LoRA adapters on the device named in the config."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.device_runtime.runners.lora_slots import AdapterPlaces
from edgellm.device_runtime.runners.onnxruntime_cuda.device_kv_cache import allocate
from edgellm.device_runtime.runners.onnxruntime_graphs import input_types
from edgellm.device_runtime.runners.onnxruntime_import import ort


class DeviceAdapters(AdapterPlaces):
    """Matrices of all adapter slots at fixed addresses; empty slots are zeros."""

    def __init__(self, graph: ort.InferenceSession, count: int, device: str) -> None:
        """Allocate `count` slots for a graph with adapters.

        Raises:
            LimitError: the device has too little memory.
        """
        types = input_types(graph)
        tensors = {each.name: (each.shape, types[each.name]) for each in graph.get_inputs()}
        super().__init__(tensors, count)
        self._device = device
        self._values = {
            name: allocate(each, self.dtype, device) for name, each in self.shapes.items()
        }
        self.hold(np.zeros(1, np.float32), np.zeros((1, 0, 3), np.int64))

    def hold(self, weights: NDArray[np.float32], table: NDArray[np.int64]) -> None:
        """See `Runner.hold_adapters`; synchronous, and no pass may run."""
        for name, matrix in self.matrices(weights, table):
            self._values[name].update_inplace(matrix)

    def bind(self, binding: ort.IOBinding) -> None:
        """Bind the matrices as inputs."""
        for name, value in self._values.items():
            binding.bind_ortvalue_input(name, value)
