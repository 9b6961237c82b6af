"""ONNX Runtime on the CPU, the embedded default."""

from __future__ import annotations

from pathlib import Path

from edgellm.contract import (
    BrokenArtifactError,
    DraftEngineManifest,
    EdgeLLMError,
    EngineManifest,
    VisualEngineManifest,
)
from edgellm.device_runtime.runners.onnxruntime_cpu.processor import instruction_sets
from edgellm.device_runtime.session import DraftSession, HeadsSession, Session, VisualSession

MINIMUM_VERSION = (1, 22)


def available() -> str:
    """ONNX Runtime's version.

    Raises:
        EdgeLLMError: not installed, or too old.
    """
    try:
        import onnxruntime
    except ImportError:
        raise EdgeLLMError(
            "onnxruntime is not installed", hint="in edgellm's folder: pip install '.[device]'"
        ) from None
    version = onnxruntime.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < MINIMUM_VERSION:
        raise EdgeLLMError(
            f"onnxruntime {version} is too old", hint="pip install --upgrade onnxruntime"
        )
    return version


def open_session(engine: Path, manifest: EngineManifest) -> Session:
    """Load the engine's graphs.

    Raises:
        BrokenArtifactError: built with another ONNX Runtime or for another processor, whose
            prepacked weights this one would misread.
    """
    from edgellm.device_runtime.runners import onnxruntime_graphs as graphs
    from edgellm.device_runtime.runners.onnxruntime_cpu import session

    _check_origin(engine, manifest)
    threads = int(manifest.options["threads"])
    loaded = [
        session.LoadedGraph(
            graphs.load_graph(engine / graph.path, threads=threads, optimize=False),
            graph.max_rows,
        )
        for graph in manifest.graphs
    ]
    return session.OnnxRuntimeSession(
        loaded, manifest.decoder, manifest.max_kv_cache_capacity, len(manifest.hidden_taps)
    )


def open_draft_session(engine: Path, manifest: DraftEngineManifest) -> DraftSession:
    """Load a draft engine; raises as `open_session` does."""
    from edgellm.device_runtime.runners import onnxruntime_graphs as graphs
    from edgellm.device_runtime.runners.onnxruntime_cpu import session

    _check_origin(engine, manifest)
    threads = int(manifest.options["threads"])
    model, fuse = (
        graphs.load_graph(engine / path, threads=threads, optimize=False) if path else None
        for path in (manifest.graphs[0].path, manifest.fuse_graph)
    )
    assert model is not None
    return session.OnnxRuntimeDraftSession(
        model, fuse, manifest.draft.decoder, manifest.max_kv_cache_capacity
    )


def open_heads(engine: Path, manifest: DraftEngineManifest) -> HeadsSession:
    """Load an engine of Medusa heads; raises as `open_session` does."""
    from edgellm.device_runtime.runners import onnxruntime_graphs as graphs
    from edgellm.device_runtime.runners import onnxruntime_heads as heads

    _check_origin(engine, manifest)
    threads, path = int(manifest.options["threads"]), engine / manifest.graphs[0].path
    return heads.OnnxRuntimeHeads(graphs.load_graph(path, threads=threads, optimize=False))


def open_visual_session(engine: Path, manifest: VisualEngineManifest) -> VisualSession:
    """Load a visual engine; raises as `open_session` does."""
    from edgellm.device_runtime.runners import onnxruntime_encoder as encoder
    from edgellm.device_runtime.runners import onnxruntime_graphs as graphs

    _check_origin(engine, manifest)
    threads, path = int(manifest.options["threads"]), engine / manifest.graph
    graph = graphs.load_graph(path, threads=threads, optimize=False, keeps_memory=False)
    return encoder.OnnxRuntimeVisualSession(graph)


def _check_origin(
    engine: Path, manifest: EngineManifest | DraftEngineManifest | VisualEngineManifest
) -> None:
    maker = "visual_build" if isinstance(manifest, VisualEngineManifest) else "llm_build"
    for what, built, found in (
        ("ONNX Runtime", manifest.backend_version, available()),
        ("processor", manifest.machine, instruction_sets()),
    ):
        if built != found:
            raise BrokenArtifactError(
                f"{engine} was built for {what} {built}, this machine has {found}",
                hint=f"run {maker} on this machine",
            )
