"""Loads the graphs of a role into sessions that share weights on the device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import external_data_helper, helper

from edgellm.core.graph_roles import ROLES, Rows
from edgellm.device_runtime.runners.onnxruntime_cuda.device_kv_cache import allocate
from edgellm.device_runtime.runners.onnxruntime_graphs import CUDA, GraphOptions, load_graph
from edgellm.device_runtime.runners.onnxruntime_import import ort

_LAID_OUT = ("MatMulNBits",)  # operators whose weights a session repacks for tensor cores
_INT_GEMM_ENTRY = "ep.cuda.fpa_intb_gemm"  # a session option; older versions ignore it


class Loader:
    """Loads the graphs, and reloads them if they cannot be recorded."""

    def __init__(
        self, *, paths: Sequence[Path], threads: int, device: str, has_int_gemm: bool = False
    ) -> None:
        """Copy weights that several graphs share to the device.

        Args:
            paths: of the graphs.
            threads: host threads.
            device: that runs the graphs.
            has_int_gemm: integer weights are repacked for tensor cores, in each session separately.

        Raises:
            LimitError: the device has too little memory.
        """
        self.device, self._paths, self._threads = device, paths, threads
        self._entries = {_INT_GEMM_ENTRY: "1"} if has_int_gemm else {}
        own = _LAID_OUT if has_int_gemm else ()
        shared = _shared_weights(paths, own) if len(paths) > 1 else {}
        self._owned = {name: _on_device(array, device) for name, array in shared.items()}
        # A session uses a weight without a copy if it is borrowed memory on the session's device
        self._weights = {
            name: ort.OrtValue.from_dlpack(value) for name, value in self._owned.items()
        }

    @property
    def can_capture(self) -> bool:
        """Whether the device records passes."""
        return self.device == CUDA

    def sessions(self, *, captures: bool) -> list[ort.InferenceSession]:
        """A session for each graph; raises `BrokenArtifactError`."""
        return [
            self.load(path, captures=captures, weights=self._weights, entries=self._entries)
            for path in self._paths
        ]

    def of_role(self, role: str) -> ort.InferenceSession:
        """The session of a role without a cache, with one graph."""
        keeps = ROLES[role].rows is not Rows.ITEM
        return self.load(self._paths[0], keeps_memory=keeps, entries=self._entries)

    def load(self, path: Path, **options: object) -> ort.InferenceSession:
        """Load a graph without optimizations; see `load_graph`."""
        given = {"threads": self._threads, "optimize": False, "device": self.device, **options}
        return load_graph(path, GraphOptions(**given))  # type: ignore[arg-type]


def _shared_weights(paths: Sequence[Path], but_of: Sequence[str]) -> dict[str, np.ndarray]:
    """Weights that all graphs have, by name, without inputs of the operators `but_of`."""
    graphs = [onnx.load(path, load_external_data=False).graph for path in paths]
    stored = [
        {
            each.name: each
            for each in graph.initializer
            if external_data_helper.uses_external_data(each)
        }
        for graph in graphs
    ]
    common = set.intersection(*({*each} for each in stored))
    own = {name for node in graphs[0].node if node.op_type in but_of for name in node.input}
    return {name: _array(stored[0][name], paths[0].parent) for name in sorted(common - own)}


def _on_device(array: np.ndarray, device: str) -> ort.OrtValue:
    """A copy on the device; raises `LimitError` if it has too little memory."""
    value = allocate(array.shape, array.dtype, device)
    value.update_inplace(array)
    return value


def _array(tensor: onnx.TensorProto, folder: Path) -> np.ndarray:
    """A tensor's data as a memory map."""
    place = external_data_helper.ExternalDataInfo(tensor)
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.memmap(
        folder / place.location, dtype, "r", offset=place.offset or 0, shape=tuple(tensor.dims)
    )
