"""ONNX Runtime on the CPU: the embedded default."""

from __future__ import annotations

from pathlib import Path

from edgellm.contract import BrokenArtifactError, EdgeLLMError, EngineManifest
from edgellm.device_runtime.backends.onnxruntime.cpu import instruction_sets

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
            "onnxruntime is not installed", hint="pip install 'edgellm[device]'"
        ) from None
    version = onnxruntime.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < MINIMUM_VERSION:
        raise EdgeLLMError(
            f"onnxruntime {version} is too old", hint="pip install --upgrade onnxruntime"
        )
    return version


def machine() -> str:
    """Processor architecture and the instruction sets that choose the kernels."""
    return instruction_sets()


def open_session(engine: Path, manifest: EngineManifest):  # noqa: ANN201 - see Backend
    """Load the engine's graphs.

    Raises:
        BrokenArtifactError: built with another ONNX Runtime or for another processor, whose
            prepacked weights this one would misread.
    """
    from edgellm.device_runtime.backends.onnxruntime import session

    for what, built, here in (
        ("ONNX Runtime", manifest.backend_version, available()),
        ("processor", manifest.machine, machine()),
    ):
        if built != here:
            raise BrokenArtifactError(
                f"{engine} was built for {what} {built}, this machine has {here}",
                hint="run llm_build on this machine",
            )
    threads = int(manifest.options["threads"])
    graphs = [
        session.LoadedGraph(
            session.load_graph(engine / graph.path, threads=threads, optimize=False),
            graph.max_rows,
        )
        for graph in manifest.graphs
    ]
    return session.OnnxRuntimeSession(graphs, manifest.decoder, manifest.max_kv_cache_capacity)


def __getattr__(name: str):  # noqa: ANN202 - `compile` and `estimate`, which import onnx_ir
    if name in ("compile", "estimate"):
        from edgellm.device_runtime.backends.onnxruntime import compiler

        return getattr(compiler, name)
    raise AttributeError(name)
