"""ONNX Runtime's sessions: graphs that are loaded onto a device."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgellm.core.errors import BrokenArtifactError
from edgellm.device_runtime.kernels.library import register

CPU, CUDA = "cpu", "cuda"  # as OrtValues name devices
KEPT_ROWS = 128  # bindings of larger passes (prefills) are not kept
_BORROWS = (1, 31)  # the first ONNX Runtime that takes weights where somebody else has mapped them
_PACKED = b"prepacked_"  # how its graphs name weights as kernels read them
_TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}
_PROVIDERS = {CPU: "CPUExecutionProvider", CUDA: "CUDAExecutionProvider"}
_PROVIDER_OPTIONS = {
    CPU: {},
    # Searching for the fastest convolution takes longer than a picture, and memory is scarce.
    CUDA: {
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "use_tf32": "0",
    },
}


def load_graph(
    path: Path,
    *,
    threads: int = 0,
    optimize: bool = True,
    keeps_memory: bool = True,
    device: str = CPU,
    own_kernels: bool = False,
    captures: bool = False,
    entries: Mapping[str, str] | None = None,
    weights: Mapping[str, ort.OrtValue] | None = None,
) -> ort.InferenceSession:
    """Load a graph.

    Args:
        path: the graph.
        threads: 0 takes all cores.
        optimize: fold and fuse; an engine's graphs are so already.
        keeps_memory: of activations between passes; it grows where their sizes vary.
        device: `CPU` or `CUDA`, which then computes every node.
        own_kernels: it has operators of `device_runtime.kernels`.
        captures: passes may be recorded as CUDA graphs.
        entries: of the session's configuration.
        weights: initializers that lie on the device already; must outlive the session.

    Raises:
        BrokenArtifactError: ONNX Runtime does not take the file, or not wholly on the device.
    """
    options = ort.SessionOptions()
    set_threads(options, threads)
    options.log_severity_level = 3
    options.enable_cpu_mem_arena = keeps_memory
    for name, value in (entries or {}).items():
        options.add_session_config_entry(name, value)
    for name, tensor in (weights or {}).items():
        options.add_initializer(name, tensor)
    mapped = None
    if own_kernels:
        register(options)
        mapped = _map_weights(path, options) if maps_weights(path) else None
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if device == CUDA:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    provider = _PROVIDERS[device]
    session = _session(path, options, device, captures=captures)
    if mapped is not None:
        weakref.finalize(session, mapped.close).atexit = False
    if session.get_providers()[0] != provider:
        raise BrokenArtifactError(
            f"ONNX Runtime {ort.__version__} put {path} on {session.get_providers()[0]}",
            hint="edgellm-doctor says what is missing for CUDA",
        )
    return session


def load_in_memory(
    model: bytes, weights: Mapping[str, mmap.mmap], *, threads: int = 0
) -> ort.InferenceSession:
    """Load a graph as it is onto the CPU.

    Args:
        model: the graph.
        weights: files by the names that it has for them; must outlive the session.
        threads: 0 takes all cores.

    Raises:
        BrokenArtifactError: ONNX Runtime does not take it.
    """
    options = ort.SessionOptions()
    set_threads(options, threads)
    options.log_severity_level = 3
    options.enable_cpu_mem_arena = False
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    # As the nodes are given: by default all weights would be decoded before the first product.
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    _lend(options, weights)
    return _session(model, options, CPU)


def _lend(options: ort.SessionOptions, weights: Mapping[str, mmap.mmap]) -> None:
    """Files that a session reads where they are mapped; before 1.31 it copies them."""
    options.add_session_config_entry("session.use_external_initializer_file_buffers_directly", "1")
    if weights:
        options.add_external_initializers_from_files_in_memory(
            [*weights], [*weights.values()], [len(each) for each in weights.values()]
        )


def maps_weights(path: Path) -> bool:
    """Whether the weights of a graph with edgellm's operators are lent to its session.

    Not where ONNX Runtime is older than that, or the file holds what it packed: it would pack
    again, into memory of its own, what somebody else has mapped.
    """
    file = path.with_suffix(".data")
    version = tuple(int(part) for part in ort.__version__.split(".")[:2])
    if version < _BORROWS or not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    if not file.exists() or not file.stat().st_size:  # all weights are in the graph
        return False
    return _PACKED not in path.read_bytes()


def _map_weights(path: Path, options: ort.SessionOptions) -> mmap.mmap:
    """Lend a session its graph's weights, in pages of 2 MB where the system reads files so.

    A pass reads all of them: in pages of 4 KB it waits for their addresses as well. ONNX Runtime
    maps each weight apart, at a place that no page of 2 MB fits.
    """
    file = path.with_suffix(".data")
    with file.open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    with contextlib.suppress(OSError):  # of a system without such pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    _lend(options, {file.name: mapped})
    return mapped


def _session(
    graph: Path | bytes, options: ort.SessionOptions, device: str, *, captures: bool = False
) -> ort.InferenceSession:
    recording = {"enable_cuda_graph": "1"} if captures and device == CUDA else {}
    source, name = (graph, "the graph") if isinstance(graph, bytes) else (str(graph), graph)
    try:
        # `enable_fallback` would print, and compute on the CPU without being asked.
        session = ort.InferenceSession(
            source,
            options,
            providers=[(_PROVIDERS[device], {**_PROVIDER_OPTIONS[device], **recording})],
            enable_fallback=0,
        )
    except Exception as error:  # noqa: BLE001 - the classes are private to the extension module
        raise BrokenArtifactError(
            f"ONNX Runtime {ort.__version__} cannot load {name}: {str(error).splitlines()[0]}",
            hint="build the engine again on this machine",
        ) from None
    session.disable_fallback()
    return session


def set_threads(options: ort.SessionOptions, threads: int) -> None:
    """Give a session `threads` threads, 0 for all cores, that rest between its passes.

    By default they spin on after a pass; those of the draft then take the cores from the base's
    next pass, which doubles its time.
    """
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.force_spinning_stop", "1")


def dtype_of(name: str) -> type:
    """Of a tensor, by ONNX Runtime's name."""
    return _TYPES[name]


class Held:
    """Inputs that stay until they are replaced, bound to passes that were made before."""

    def __init__(self, device: str = CPU) -> None:
        self._device, self._version = device, 0
        self._arrays: dict[str, NDArray[Any]] = {}
        self._values: dict[str, ort.OrtValue] = {}

    def replace(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Arrays in the graph's type."""
        # ONNX Runtime does not keep the arrays alive that it is given.
        self._arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        self._values = {
            name: ort.OrtValue.ortvalue_from_numpy(array, self._device)
            for name, array in self._arrays.items()
        }
        self._version += 1

    def bind(self, binding: ort.IOBinding, version: int) -> int:
        """What is held, unless `version`, which this gave before, is of today."""
        if version != self._version:
            for name, value in self._values.items():
                binding.bind_ortvalue_input(name, value)
        return self._version


def input_types(session: ort.InferenceSession) -> dict[str, type]:
    """Types of a graph's inputs by name."""
    return {value.name: _TYPES[value.type] for value in session.get_inputs()}


def run_arrays(
    session: ort.InferenceSession, inputs: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """One run from and to the host's memory.

    Args:
        session: on any device.
        inputs: by name; floats are cast to the graph's.

    Returns:
        Outputs by name; floats are float32.
    """
    types = input_types(session)
    feed = {name: np.asarray(array, types[name]) for name, array in inputs.items()}
    names = [value.name for value in session.get_outputs()]
    outputs = [np.asarray(array) for array in session.run(names, feed)]
    return {
        name: array.astype(np.float32) if array.dtype == np.float16 else array
        for name, array in zip(names, outputs, strict=True)
    }
