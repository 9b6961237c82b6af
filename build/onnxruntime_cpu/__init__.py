"""Engines for ONNX Runtime on the CPU; modules that import onnx_ir are loaded lazily."""

from __future__ import annotations

from pathlib import Path

from edgellm.build.onnxruntime_cpu.options import CpuOptions as Options
from edgellm.build.onnxruntime_cpu.options import kernels_of
from edgellm.build.plan import Compiled, Estimate, Origin, Plan
from edgellm.build.plan import Options as AnyOptions
from edgellm.core.commands.progress import Report
from edgellm.core.manifest import Bundle
from edgellm.device_runtime.runners import onnxruntime_cpu
from edgellm.device_runtime.runners.onnxruntime_cpu import EDGELLM
from edgellm.device_runtime.runners.onnxruntime_cpu.processor import instruction_sets

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
DEVICE = "cpu"
TAKES_STATES = True
TAKES_MIXED_LAYERS = True
TAKES_AUDIO = True


def origin(options: AnyOptions) -> Origin:
    """ONNX Runtime's version, and instruction sets that select its kernels; see `Backend`."""
    del options  # the origin does not depend on them
    return Origin(onnxruntime_cpu.available(), instruction_sets())


def takes_batches(plan: Plan) -> bool:
    """See `Backend.takes_batches`."""
    return kernels_of(plan) == EDGELLM


def takes_adapters(plan: Plan) -> bool:
    """See `Backend.takes_adapters`."""
    return mixes_rows(plan)


def mixes_rows(plan: Plan) -> bool:
    """See `Backend.mixes_rows`."""
    return kernels_of(plan) == EDGELLM


def estimate(source: Path, bundle: Bundle, plan: Plan) -> Estimate:
    """See `Backend.estimate`."""
    from edgellm.build.onnxruntime_cpu import compiler

    return compiler.estimate(source, bundle, plan)


def compile(source: Path, bundle: Bundle, plan: Plan, folder: Path, report: Report) -> Compiled:
    """See `Backend.compile`."""
    from edgellm.build.onnxruntime_cpu import compiler

    return compiler.compile_bundle(source, bundle, plan, folder, report)
