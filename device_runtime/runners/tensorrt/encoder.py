"""Passes of an engine whose sizes all vary: images."""

from __future__ import annotations

from math import prod

import numpy as np

from edgellm.device_runtime.runners.outputs import Outputs
from edgellm.device_runtime.runners.runner import Inputs, Runner
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import CompiledEngine, Device
from edgellm.device_runtime.runners.tensorrt.packed_buffers import Block, Packed, packed_bytes


class TensorRtEncoder(Runner):
    """Runs an encoder of images."""

    def __init__(self, engine: CompiledEngine, device: Device) -> None:
        """Allocate for the largest image; raises `LimitError` if the device is too small."""
        self._engine, self._device = engine, device
        self._scratch = device.allocate(engine.scratch_bytes(0))
        self._context = engine.new_context(0, self._scratch)
        infos = engine.tensors.values()
        largest = {
            each.name: engine.shape_range(each.name, 0)[1] for each in infos if each.is_input
        }
        layout = {name: (shape, engine.tensors[name].dtype) for name, shape in largest.items()}
        self._inputs = Block(device, packed_bytes(layout))
        self._place(self._inputs.pack(layout))
        self._outputs = Block(device, packed_bytes(self._results()))

    def hold(self, inputs: Inputs) -> None:
        """See `Runner`; nothing is held."""

    def run(self, inputs: Inputs) -> Outputs:
        """See `Runner`."""
        tensors = self._engine.tensors
        taken = {name: array for name, array in inputs.items() if name in tensors}
        layout = {name: (array.shape, tensors[name].dtype) for name, array in taken.items()}
        packed = self._inputs.pack(layout)
        for name, array in taken.items():
            packed.arrays[name][:] = array
        self._place(packed)
        results = self._outputs.pack(self._results())
        for name, address in results.addresses.items():
            self._context.bind(name, address)
        self._inputs.upload(packed)
        self._context.enqueue()
        self._outputs.download(results)
        self._device.synchronize()
        return {name: array.astype(np.float32) for name, array in results.arrays.items()}

    def _place(self, packed: Packed) -> None:
        for name, array in packed.arrays.items():
            if -1 in self._engine.tensors[name].shape:
                self._context.set_shape(name, array.shape)
            self._context.bind(name, packed.addresses[name])

    def _results(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shapes and types of the outputs for the inputs as they are."""
        outputs = [each for each in self._engine.tensors.values() if not each.is_input]
        found = {each.name: (self._context.output_shape(each.name), each.dtype) for each in outputs}
        assert all(prod(shape) > 0 for shape, _ in found.values())
        return found
