"""Sessions of the graphs of a role, which share their weights on the device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import external_data_helper, helper

from edgellm.core.graph_roles import ROLES, Rows
from edgellm.device_runtime.runners.onnxruntime_cuda.cache import allocate
from edgellm.device_runtime.runners.onnxruntime_graphs import CUDA, load_graph

_LAID_OUT = ("MatMulNBits",)  # operators whose weights a session lays out anew for tensor cores
_INT_GEMM_ENTRY = "ep.cuda.fpa_intb_gemm"  # of a session; older versions ignore it


class Loader:
    """Loads them, and once more if they cannot be recorded."""

    def __init__(
        self, paths: Sequence[Path], threads: int, device: str, *, has_int_gemm: bool = False
    ) -> None:
        """Copy weights that several graphs read to the device.

        Args:
            paths: of the graphs.
            threads: of the host.
            device: where they run.
            has_int_gemm: integer weights become what tensor cores read, in each session apart.

        Raises:
            LimitError: the device is too small.
        """
        self.device, self._paths, self._threads = device, paths, threads
        self._entries = {_INT_GEMM_ENTRY: "1"} if has_int_gemm else {}
        own = _LAID_OUT if has_int_gemm else ()
        shared = _shared_weights(paths, own) if len(paths) > 1 else {}
        self._owned = {name: _on_device(array, device) for name, array in shared.items()}
        # A session takes a weight where it lies, if that is its own device and nobody's but lent
        self._weights = {
            name: ort.OrtValue.from_dlpack(value) for name, value in self._owned.items()
        }

    @property
    def can_capture(self) -> bool:
        """Whether the device records passes."""
        return self.device == CUDA

    def sessions(self, *, captures: bool) -> list[ort.InferenceSession]:
        """One for each graph; raises `BrokenArtifactError`."""
        return [
            self.load(path, captures=captures, weights=self._weights, entries=self._entries)
            for path in self._paths
        ]

    def of_role(self, role: str) -> ort.InferenceSession:
        """That of a role without a cache, with one graph."""
        keeps = ROLES[role].rows is not Rows.IMAGE
        return self.load(self._paths[0], keeps_memory=keeps, entries=self._entries)

    def load(self, path: Path, **options: object) -> ort.InferenceSession:
        """A graph as it is; see `load_graph`."""
        given = {"threads": self._threads, "optimize": False, "device": self.device, **options}
        return load_graph(path, **given)  # type: ignore[arg-type]


def _shared_weights(paths: Sequence[Path], but_of: Sequence[str]) -> dict[str, np.ndarray]:
    """Those that all graphs have, by name, but for what nodes of some types read."""
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
    """A copy; raises `LimitError` if there is no room."""
    value = allocate(array.shape, array.dtype, device)
    value.update_inplace(array)
    return value


def _array(tensor: onnx.TensorProto, folder: Path) -> np.ndarray:
    """What a file holds, mapped."""
    place = external_data_helper.ExternalDataInfo(tensor)
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.memmap(
        folder / place.location, dtype, "r", offset=place.offset or 0, shape=tuple(tensor.dims)
    )
