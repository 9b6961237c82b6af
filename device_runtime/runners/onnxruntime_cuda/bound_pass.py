"""A pass of fixed sizes with IO binding, recorded as a CUDA graph if it recurs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.device_runtime.runners.onnxruntime_cuda.device_kv_cache import Buffers, allocate
from edgellm.device_runtime.runners.onnxruntime_cuda.size_buckets import Sizes
from edgellm.device_runtime.runners.onnxruntime_graphs import CPU, Held, dtype_of
from edgellm.device_runtime.runners.onnxruntime_import import ort

_ON_DEVICE = (graph_io.LOGITS, graph_io.HIDDEN_TAPS)  # until they are fetched
_ALL_ROWS = (graph_io.HIDDEN_TAPS,)  # outputs of all tokens; others have selected tokens
_GRAPH_ID = "gpu_graph_id"  # of a run, from 1 on; -1: no recording


class BoundPass:
    """A session with bound inputs and outputs of fixed sizes."""

    def __init__(
        self,
        *,
        session: ort.InferenceSession,
        device: str,
        place: Callable[[ort.IOBinding], None],
        inputs: Mapping[str, NDArray[Any]],
        capture_id: int = 0,
    ) -> None:
        """Bind.

        Args:
            session: of the graph.
            device: of all tensors.
            place: binds tensors with a fixed address: keys and values, adapters.
            inputs: host arrays, which `run` uploads.
            capture_id: of the recording in the session; -1: not recorded; 0: the session records
                nothing.
        """
        self._session, self._device, self._version = session, device, 0
        self._capture_id, self._runs = capture_id, 0
        self._options = ort.RunOptions()
        self._record(-1)
        self._binding = session.io_binding()
        self._buffers = Buffers(device, inputs, self._binding)
        self.inputs = inputs
        self._given = [
            value for value in session.get_outputs() if not value.name.startswith(graph_io.PRESENT)
        ]
        self.outputs = [value.name for value in self._given]
        for name in self.outputs:
            self._binding.bind_output(name, device if name in _ON_DEVICE else CPU)
        place(self._binding)

    @property
    def is_recording(self) -> bool:
        """Whether the latest run made or replayed a recording."""
        return self._capture_id > 0 and self._runs > 1

    def run(self, held: Held) -> None:
        """Run the pass; outputs are valid until the next run."""
        self._runs += 1
        if self.is_recording and self._runs == 2:
            self._fix_outputs()
            self._record(self._capture_id)
        self._version = held.bind(self._binding, self._version)
        self._buffers.upload()
        self._session.run_with_iobinding(self._binding, self._options)
        self._binding.synchronize_outputs()

    def _record(self, capture_id: int) -> None:
        if self._capture_id:
            self._options = ort.RunOptions()
            self._options.add_run_config_entry(_GRAPH_ID, str(capture_id))

    def _fix_outputs(self) -> None:
        """Bind outputs to fixed memory, since a recording always writes to the same addresses."""
        found = self._binding.get_outputs()
        self._fixed = [
            allocate(value.shape(), np.dtype(dtype_of(given.type)), self._device)
            for given, value in zip(self._given, found[: len(self._given)], strict=True)
        ]
        for name, value in zip(self.outputs, self._fixed, strict=True):
            self._binding.bind_ortvalue_output(name, value)

    def fetch(self, name: str, asked: Sizes) -> NDArray[Any]:
        """An output in host memory without padding, floats as float32."""
        found = self._binding.get_outputs()[self.outputs.index(name)].numpy()
        found = found[:, : asked.rows if name in _ALL_ROWS else asked.outputs]
        return found.astype(np.float32) if found.dtype == np.float16 else found
