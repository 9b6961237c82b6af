"""Engines for ONNX Runtime's CUDA provider, also built where no GPU is.

What imports onnx_ir and onnxruntime is loaded when it is used.
"""

from __future__ import annotations

from pathlib import Path

from edgellm.build.onnxruntime_cpu import LABEL, refuse_flags
from edgellm.build.plan import (
    Compiled,
    CompiledDraft,
    CompiledVisual,
    CompilerOptions,
    Estimate,
    Origin,
    Plan,
    Report,
    VisualPlan,
)
from edgellm.contract import BundleManifest, DraftBundleManifest, VisualBundleManifest
from edgellm.device_runtime.runners import onnxruntime_cuda

__all__ = ["LABEL"]
DEVICE = "cuda"


def origin(compiler: CompilerOptions) -> Origin:
    """This version; graphs depend on no GPU. See `Backend.origin`."""
    refuse_flags(compiler)
    return Origin(onnxruntime_cuda.available(), DEVICE)


def estimate(bundle: Path, manifest: BundleManifest | DraftBundleManifest, plan: Plan) -> Estimate:
    """See `Backend.estimate`."""
    from edgellm.build.onnxruntime_cuda import compiler

    return compiler.estimate(bundle, manifest, plan)


def compile(
    bundle: Path, manifest: BundleManifest, plan: Plan, folder: Path, report: Report
) -> Compiled:
    """See `Backend.compile`."""
    from edgellm.build.onnxruntime_cuda import compiler

    return compiler.compile_base(bundle, manifest, plan, folder, report)


def compile_draft(
    bundle: Path, manifest: DraftBundleManifest, plan: Plan, folder: Path, report: Report
) -> CompiledDraft:
    """See `Backend.compile_draft`."""
    from edgellm.build.onnxruntime_cuda import compiler

    return compiler.compile_draft(bundle, manifest, plan, folder, report)


def estimate_visual(bundle: Path, manifest: VisualBundleManifest, plan: VisualPlan) -> Estimate:
    """See `Backend.estimate_visual`."""
    from edgellm.build.onnxruntime_cuda import compiler

    return compiler.estimate_visual(bundle, manifest, plan)


def compile_visual(
    bundle: Path, manifest: VisualBundleManifest, plan: VisualPlan, folder: Path, report: Report
) -> CompiledVisual:
    """See `Backend.compile_visual`."""
    from edgellm.build.onnxruntime_cuda import compiler

    return compiler.compile_encoder(bundle, manifest, plan, folder, report)
