"""Dry runs: TensorRT's backend on the fake GPU, and engines for CUDA on the CPU."""

from __future__ import annotations

import importlib
from pathlib import Path

from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.device_runtime.runners.onnxruntime_cuda import provider

_MODULE = __name__


def pretend(backend: str) -> None:
    """Let a backend for GPUs run on this machine's CPU, in this process."""
    if backend == "tensorrt":
        importlib.import_module("fake_backend").install()
    else:
        provider.require_cuda = lambda: "cpu"


def command_prefix(backend: str) -> str:
    """Python code that does so in another process."""
    return f"from {_MODULE} import pretend; pretend({backend!r}); "


def backend_for(bundle: Path, backend: str) -> str:
    """The backend of a dry run: TensorRT's graphs of NVFP4 have a type that no CPU computes."""
    has_fp4 = load_bundle(bundle, LLM_BUNDLE).quantization == "NVFP4"
    return "onnxruntime_cpu" if has_fp4 and backend == "tensorrt" else backend
