"""The images of a prompt, bound to passes of ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

from edgellm import contract
from edgellm.contract import DecoderSpec
from edgellm.device_runtime.positions import PromptPositions
from edgellm.device_runtime.runners.onnxruntime_graphs import CPU
from edgellm.device_runtime.session import F32, I64, ImageRows

KEPT_ROWS = 128  # bindings of larger passes (prefills) are not kept


class Shown:
    """The images of a prompt: rows for token ids from the vocabulary's size on, and positions."""

    def __init__(self, spec: DecoderSpec, device: str = CPU, dtype: type = np.float32) -> None:
        self._device, self._dtype = device, dtype
        self._takes_images = spec.images is not None
        self._num_deepstack = spec.images.num_deepstack if spec.images is not None else 0
        self._positions = PromptPositions()
        self._arrays: dict[str, F32] = {}
        self.values: dict[str, ort.OrtValue] = {}
        self.version = 0
        self.put(ImageRows.none(spec.hidden_size, self._num_deepstack))

    def put(self, images: ImageRows) -> None:
        """The images of the next prompt."""
        self._positions.set_images(images)
        if not self._takes_images:
            return
        arrays = {contract.IMAGE_EMBEDS: images.embeds}
        if self._num_deepstack:
            arrays[contract.DEEPSTACK_EMBEDS] = images.deepstack
        # ONNX Runtime does not keep the arrays alive that it is given.
        self._arrays = {
            name: np.ascontiguousarray(array, self._dtype) for name, array in arrays.items()
        }
        self.values = {
            name: ort.OrtValue.ortvalue_from_numpy(array, self._device)
            for name, array in self._arrays.items()
        }
        self.version += 1

    def place(self, rows: I64, out: I64) -> None:
        """See `PromptPositions.place`."""
        self._positions.place(rows, out)
