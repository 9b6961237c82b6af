"""Engines for ONNX Runtime's CUDA provider; building needs no GPU.

Modules that import onnx_ir and onnxruntime are loaded lazily.
"""

from __future__ import annotations

from pathlib import Path

from edgellm.build import plan as plans
from edgellm.build.onnxruntime_cuda.options import CudaOptions as Options
from edgellm.build.plan import Compiled, Estimate, Origin, Plan
from edgellm.core.commands.progress import Report
from edgellm.core.manifest import Bundle
from edgellm.device_runtime.runners import onnxruntime_cuda

__all__ = [
    "DEVICE",
    "LABEL",
    "TAKES_AUDIO",
    "TAKES_MIXED_LAYERS",
    "TAKES_STATES",
    "Options",
    "compile",
    "estimate",
    "mixes_rows",
    "origin",
    "takes_adapters",
    "takes_batches",
]
LABEL = "ONNX Runtime"
DEVICE = "cuda"
TAKES_STATES = False
TAKES_MIXED_LAYERS = False
TAKES_AUDIO = False


def origin(options: plans.Options) -> Origin:
    """ONNX Runtime's version; graphs depend on no GPU. See `Backend.origin`."""
    del options  # graphs depend on none
    return Origin(onnxruntime_cuda.available(), DEVICE)


def takes_batches(plan: Plan) -> bool:
    """See `Backend.takes_batches`."""
    del plan
    return True


def takes_adapters(plan: Plan) -> bool:
    """See `Backend.takes_adapters`."""
    del plan
    return True


def mixes_rows(plan: Plan) -> bool:
    """See `Backend.mixes_rows`."""
    del plan
    return False


def estimate(source: Path, bundle: Bundle, plan: Plan) -> Estimate:
    """See `Backend.estimate`."""
    from edgellm.build.onnxruntime_cuda import compiler

    return compiler.estimate(source, bundle, plan)


def compile(source: Path, bundle: Bundle, plan: Plan, folder: Path, report: Report) -> Compiled:
    """See `Backend.compile`."""
    from edgellm.build.onnxruntime_cuda import compiler

    return compiler.compile_bundle(source, bundle, plan, folder, report)
