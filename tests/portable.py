"""Portable graphs in ONNX Runtime, as they are."""

from __future__ import annotations

from pathlib import Path

from edgellm.device_runtime.runners.onnxruntime_cpu.runner import LoadedGraph, OnnxRuntimeRunner
from edgellm.device_runtime.runners.onnxruntime_graphs import load_graph
from edgellm.device_runtime.sessions.decoder import DecoderSession
from edgellm.manifest import LLM_BUNDLE, load_bundle


def open_portable(bundle: Path, capacity: int, graph: Path | None = None) -> DecoderSession:
    """The decoder of a bundle, or another graph with its inputs."""
    spec = load_bundle(bundle, LLM_BUNDLE).decoder
    loaded = LoadedGraph(load_graph(graph or bundle / "model.onnx", threads=1, optimize=not graph))
    runner = OnnxRuntimeRunner([loaded], spec.kv, capacity)
    return DecoderSession(runner, spec, capacity, open_commit(bundle))


def open_commit(folder: Path) -> OnnxRuntimeRunner | None:
    """What moves the states of a bundle's recurrent layers on, if it has some."""
    path = folder / "commit.onnx"
    return OnnxRuntimeRunner([LoadedGraph(load_graph(path, threads=1))]) if path.exists() else None
