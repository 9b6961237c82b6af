"""ONNX Runtime on NVIDIA GPUs; what imports onnxruntime is loaded when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm.contract import EdgeLLMError
from edgellm.device_runtime.gpu import compute_capability
from edgellm.device_runtime.runners import Runner, onnxruntime_cpu
from edgellm.manifest import DecoderSpec, DraftSpec, Engine, GraphSpec, Spec
from edgellm.roles import DECODER, DRAFT, ROLES, Rows

if TYPE_CHECKING:
    from onnxruntime import InferenceSession


MINIMUM_VERSION = "minimum_onnxruntime"  # option of an engine, where an operator wants a newer one


def available() -> str:
    """See `onnxruntime_cpu.available`: engines are built, and not run, without a GPU."""
    return onnxruntime_cpu.available()


def require_device() -> None:
    """See `runners.Backend`."""
    available()
    if compute_capability() is None:
        raise EdgeLLMError("there is no NVIDIA GPU here")
    from edgellm.device_runtime.runners.onnxruntime_cuda import provider

    provider.require_cuda()


def open_engine(folder: Path, engine: Engine) -> dict[str, Runner]:
    """Load the engine's graphs, which depend on no version.

    Raises:
        BrokenArtifactError: ONNX Runtime refuses a graph.
        LimitError: the device's memory does not suffice.
        EdgeLLMError: CUDA does not run here, or ONNX Runtime is older than an operator wants.
    """
    available()
    from edgellm.device_runtime.runners.onnxruntime_cuda import provider

    threads, capacity = int(engine.options["threads"]), engine.max_kv_cache_capacity
    device = provider.require_cuda()
    provider.require_version(engine.options)
    return open_graphs(folder, engine.graphs, engine.spec, capacity, threads, device)


def open_graphs(
    folder: Path,
    graphs: Mapping[str, tuple[GraphSpec, ...]],
    spec: Spec,
    capacity: int,
    threads: int,
    device: str,
) -> dict[str, Runner]:
    """Load graphs onto a device; raises as `open_engine`."""
    from edgellm.device_runtime.runners.onnxruntime_cuda.runner import CudaRunner, PlainRunner
    from edgellm.device_runtime.runners.onnxruntime_cuda.slots import ROWS_GRAPH
    from edgellm.device_runtime.runners.onnxruntime_graphs import load_graph

    def load(path: str, role: str) -> InferenceSession:
        keeps = ROLES[role].rows is not Rows.IMAGE
        return load_graph(
            folder / path, threads=threads, optimize=False, keeps_memory=keeps, device=device
        )

    opened: dict[str, Runner] = {}
    for role, (graph,) in graphs.items():
        loaded = load(graph.path, role)
        if role == DECODER and isinstance(spec, DecoderSpec):
            mover, window = load(ROWS_GRAPH, role), spec.sliding_window
            opened[role] = CudaRunner(loaded, mover, spec, capacity, device, window)
        elif role == DRAFT and isinstance(spec, DraftSpec):
            opened[role] = CudaRunner(loaded, None, spec.decoder, capacity, device)
        else:
            opened[role] = PlainRunner(loaded)
    return opened
