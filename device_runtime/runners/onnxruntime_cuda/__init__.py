"""ONNX Runtime on NVIDIA GPUs; what imports onnxruntime is loaded when it is used."""

from __future__ import annotations

from pathlib import Path

from edgellm.contract import DraftEngineManifest, EngineManifest, VisualEngineManifest
from edgellm.device_runtime.runners import onnxruntime_cpu
from edgellm.device_runtime.session import DraftSession, HeadsSession, Session, VisualSession


def available() -> str:
    """See `onnxruntime_cpu.available`: engines are built, and not run, without a GPU."""
    return onnxruntime_cpu.available()


def _device() -> str:
    """The device of engines, which must be here; their versions do not matter."""
    available()
    from edgellm.device_runtime.runners.onnxruntime_cuda import provider

    return provider.require_cuda()


def open_session(engine: Path, manifest: EngineManifest) -> Session:
    """Load a base's engine; raises `EdgeLLMError` where CUDA does not run."""
    device = _device()
    from edgellm.device_runtime.runners.onnxruntime_cuda import cuda_session

    return cuda_session.open_base(engine, manifest, device)


def open_draft_session(engine: Path, manifest: DraftEngineManifest) -> DraftSession:
    """Load a draft engine; raises as `open_session` does."""
    device = _device()
    from edgellm.device_runtime.runners.onnxruntime_cuda import cuda_session

    return cuda_session.open_draft(engine, manifest, device)


def open_heads(engine: Path, manifest: DraftEngineManifest) -> HeadsSession:
    """Load an engine of Medusa heads; raises as `open_session` does."""
    device = _device()
    from edgellm.device_runtime.runners import onnxruntime_graphs as graphs
    from edgellm.device_runtime.runners import onnxruntime_heads as heads

    threads, path = int(manifest.options["threads"]), engine / manifest.graphs[0].path
    graph = graphs.load_graph(path, threads=threads, optimize=False, device=device)
    return heads.OnnxRuntimeHeads(graph)


def open_visual_session(engine: Path, manifest: VisualEngineManifest) -> VisualSession:
    """Load a visual engine; raises as `open_session` does."""
    device = _device()
    from edgellm.device_runtime.runners import onnxruntime_encoder as encoder
    from edgellm.device_runtime.runners import onnxruntime_graphs as graphs

    threads, path = int(manifest.options["threads"]), engine / manifest.graph
    graph = graphs.load_graph(
        path, threads=threads, optimize=False, keeps_memory=False, device=device
    )
    return encoder.OnnxRuntimeVisualSession(graph)
