"""Portable graphs in ONNX Runtime, as they are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.device_runtime.networks.decoder import DecoderNetwork
from edgellm.device_runtime.runners.onnxruntime_cpu.runner import LoadedGraph, OnnxRuntimeRunner
from edgellm.device_runtime.runners.onnxruntime_graphs import GraphOptions, load_graph

TOLERANCE = 2e-4
# Of the largest number, by which transformers' own two forms of the delta rule differ as much.
_OF_LARGEST = dict.fromkeys(("olmo_hybrid", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), 1e-4)


def allowed(checkpoint: Path, expected: np.ndarray) -> float:
    """Largest allowed difference from transformers' numbers."""
    model_type = json.loads((checkpoint / "config.json").read_text())["model_type"]
    return max(TOLERANCE, _OF_LARGEST.get(model_type, 0) * np.abs(expected).max())


def open_portable(bundle: Path, capacity: int, graph: Path | None = None) -> DecoderNetwork:
    """The decoder of a bundle, or another graph with its inputs."""
    spec = load_bundle(bundle, LLM_BUNDLE).decoder
    loaded = LoadedGraph(
        load_graph(graph or bundle / "model.onnx", GraphOptions(threads=1, optimize=not graph))
    )
    runner = OnnxRuntimeRunner(graphs=[loaded], kv=spec.kv, capacity=capacity)
    return DecoderNetwork(runner=runner, spec=spec, capacity=capacity, commit=open_commit(bundle))


def open_commit(folder: Path) -> OnnxRuntimeRunner | None:
    """Session that advances the states of a bundle's recurrent layers, if it has some."""
    path = folder / "commit.onnx"
    return (
        OnnxRuntimeRunner(graphs=[LoadedGraph(load_graph(path, GraphOptions(threads=1)))])
        if path.exists()
        else None
    )
