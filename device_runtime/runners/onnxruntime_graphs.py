"""Loads graphs into ONNX Runtime sessions on a device."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core.errors import BrokenArtifactError
from edgellm.core.resources import utf8_path
from edgellm.device_runtime.kernels.library import register
from edgellm.device_runtime.runners.onnxruntime_import import ort

CPU, CUDA = "cpu", "cuda"  # device names of OrtValues
KEPT_ROWS = 128  # tokens; bindings of larger passes (prefills) are not cached
_FIRST_WITH_OPSET_24 = (1, 24)
_BORROWS = (1, 31)  # first ONNX Runtime that uses weights from the caller's memory map
_PACKED = b"prepacked_"  # prefix of prepacked weights in its graphs
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
    # An exhaustive search of convolutions takes longer than an image, and memory is scarce.
    CUDA: {
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "use_tf32": "0",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """How a graph is loaded.

    Attributes:
        threads: 0: all cores.
        optimize: fold and fuse; an engine's graphs are optimized already.
        keeps_memory: keep activation memory between passes; it grows if sizes vary.
        device: `CPU` or `CUDA`, which then computes every node.
        own_kernels: the graph has operators of `device_runtime.kernels`.
        captures: passes may be recorded as CUDA graphs.
        entries: entries of the session's configuration.
        weights: initializers that are on the device already; must outlive the session.
        lookups: offset and bytes of tables in the weight file that passes read by rows.
    """

    threads: int = 0
    optimize: bool = True
    keeps_memory: bool = True
    device: str = CPU
    own_kernels: bool = False
    captures: bool = False
    entries: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, ort.OrtValue] = field(default_factory=dict)
    lookups: Sequence[tuple[int, int]] = ()


def load_graph(path: Path, how: GraphOptions | None = None) -> ort.InferenceSession:
    """Load a graph; `how` None: the defaults.

    Raises:
        BrokenArtifactError: ONNX Runtime rejects the file, or cannot run all nodes on the device.
    """
    how = how or GraphOptions()
    options = ort.SessionOptions()
    set_threads(options, how.threads)
    options.log_severity_level = 3
    options.enable_cpu_mem_arena = how.keeps_memory
    for name, value in how.entries.items():
        options.add_session_config_entry(name, value)
    for name, tensor in how.weights.items():
        options.add_initializer(name, tensor)
    mapped = None
    if how.own_kernels:
        register(options)
        mapped = _map_weights(path, options, how.lookups) if maps_weights(path) else None
    if not how.optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if how.device == CUDA:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    provider = _PROVIDERS[how.device]
    session = _session(path, options, how.device, captures=how.captures)
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
    """Load a graph onto the CPU without optimizations.

    Args:
        model: the graph.
        weights: mapped files by their names in the graph; must outlive the session.
        threads: 0: all cores.

    Raises:
        BrokenArtifactError: ONNX Runtime rejects the graph, or is too old for portable graphs.
    """
    if _version() < _FIRST_WITH_OPSET_24:  # it cannot take weights from memory either
        raise BrokenArtifactError(
            f"portable graphs have opset 24, which onnxruntime {ort.__version__} does not know; "
            "version 1.24 (Python 3.11 or newer) does",
            hint="install onnxruntime 1.24 or newer (Python 3.11 or newer)",
        )
    options = ort.SessionOptions()
    set_threads(options, threads)
    options.log_severity_level = 3
    options.enable_cpu_mem_arena = False
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    # In the order of the nodes: by default all weights are dequantized before the first product.
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    _lend(options, weights)
    return _session(model, options, CPU)


def _lend(options: ort.SessionOptions, weights: Mapping[str, mmap.mmap]) -> None:
    """Let a session use mapped files without a copy; before 1.31 it copies them."""
    options.add_session_config_entry("session.use_external_initializer_file_buffers_directly", "1")
    if weights:
        options.add_external_initializers_from_files_in_memory(
            [*weights], [*weights.values()], [len(each) for each in weights.values()]
        )


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in ort.__version__.split(".")[:2])


def maps_weights(path: Path) -> bool:
    """Whether a session of a graph with edgellm's operators uses mapped weights.

    False for an older ONNX Runtime, and for files with weights that it prepacked: it would pack
    mapped weights again into its own memory.
    """
    file = path.with_suffix(".data")
    if _version() < _BORROWS or not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    if not file.exists() or not file.stat().st_size:  # all weights are in the graph
        return False
    return _PACKED not in path.read_bytes()


def _map_weights(
    path: Path, options: ort.SessionOptions, lookups: Sequence[tuple[int, int]]
) -> mmap.mmap:
    """Map the graph's weights for a session, in pages of 2 MB if the system supports them.

    A pass reads all weights; with pages of 4 KB, TLB misses slow it down. ONNX Runtime maps each
    weight separately, at addresses that do not fit pages of 2 MB. Of tables in `lookups` a pass
    reads some rows: with pages of 2 MB, each row would read 2 MB of the file.
    """
    file = path.with_suffix(".data")
    with file.open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    with contextlib.suppress(OSError):  # the system has no such pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
        for offset, size in lookups:
            begin = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
            length = (offset + size - begin) // mmap.PAGESIZE * mmap.PAGESIZE
            if length > 0 and offset + size <= len(mapped):
                mapped.madvise(mmap.MADV_NOHUGEPAGE, begin, length)
                mapped.madvise(mmap.MADV_RANDOM, begin, length)
    _lend(options, {file.name: mapped})
    return mapped


def _session(
    graph: Path | bytes, options: ort.SessionOptions, device: str, *, captures: bool = False
) -> ort.InferenceSession:
    recording = {"enable_cuda_graph": "1"} if captures and device == CUDA else {}
    name = "the graph" if isinstance(graph, bytes) else graph
    opened = contextlib.nullcontext(graph) if isinstance(graph, bytes) else utf8_path(graph)
    try:
        with opened as source:
            # `enable_fallback` would print, and silently compute on the CPU.
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
    """Give a session `threads` threads (0: all cores) that sleep between passes.

    By default threads spin after a pass; the draft's threads then take cores from the base's next
    pass, which doubles its time.
    """
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.force_spinning_stop", "1")


def dtype_of(name: str) -> type:
    """The dtype for ONNX Runtime's name of a tensor type."""
    return _TYPES[name]


class Held:
    """Inputs that stay until they are replaced, also in passes that were bound before."""

    def __init__(self, device: str = CPU) -> None:
        self._device, self._version = device, 0
        self._arrays: dict[str, NDArray[Any]] = {}
        self._values: dict[str, ort.OrtValue] = {}

    def replace(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Replace all arrays; their dtype is the graph's."""
        # ONNX Runtime does not keep its input arrays alive.
        self._arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        self._values = {
            name: ort.OrtValue.ortvalue_from_numpy(array, self._device)
            for name, array in self._arrays.items()
        }
        self._version += 1

    def bind(self, binding: ort.IOBinding, version: int) -> int:
        """Bind the arrays unless `version`, a former result, is current; returns the version."""
        if version != self._version:
            for name, value in self._values.items():
                binding.bind_ortvalue_input(name, value)
        return self._version


def input_types(session: ort.InferenceSession) -> dict[str, type]:
    """Dtypes of a graph's inputs by name."""
    return {value.name: _TYPES[value.type] for value in session.get_inputs()}


def run_arrays(
    session: ort.InferenceSession, inputs: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Run a session with inputs and outputs in host memory.

    Args:
        session: on any device.
        inputs: by name; floats are cast to the graph's dtype.

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
