"""Engines for ONNX Runtime on the CPU; what imports onnx_ir is loaded when it is used."""

from __future__ import annotations

from pathlib import Path

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
from edgellm.contract import (
    BundleManifest,
    DraftBundleManifest,
    EdgeLLMError,
    VisualBundleManifest,
)
from edgellm.device_runtime.runners import onnxruntime_cpu
from edgellm.device_runtime.runners.onnxruntime_cpu.processor import instruction_sets

LABEL = "ONNX Runtime"
DEVICE = "cpu"


def refuse_flags(compiler: CompilerOptions) -> None:
    """Refuse what only compilers for GPUs have; raises `EdgeLLMError`."""
    if given := [*compiler.given()]:
        raise EdgeLLMError(f"{given[0]} is not for {LABEL}", hint="it goes with --backend tensorrt")


def origin(compiler: CompilerOptions) -> Origin:
    """This version, and the instruction sets that it chooses kernels by; see `Backend.origin`."""
    refuse_flags(compiler)
    return Origin(onnxruntime_cpu.available(), instruction_sets())


def estimate(bundle: Path, manifest: BundleManifest | DraftBundleManifest, plan: Plan) -> Estimate:
    """See `Backend.estimate`."""
    if isinstance(manifest, DraftBundleManifest):
        from edgellm.build.onnxruntime_cpu import draft_compiler

        return draft_compiler.estimate(bundle, manifest, plan)
    from edgellm.build.onnxruntime_cpu import compiler

    return compiler.estimate(bundle, manifest, plan)


def compile(
    bundle: Path, manifest: BundleManifest, plan: Plan, folder: Path, report: Report
) -> Compiled:
    """See `Backend.compile`."""
    from edgellm.build.onnxruntime_cpu import compiler

    return compiler.compile_engine(bundle, manifest, plan, folder, report)


def compile_draft(
    bundle: Path, manifest: DraftBundleManifest, plan: Plan, folder: Path, report: Report
) -> CompiledDraft:
    """See `Backend.compile_draft`."""
    if manifest.draft.num_heads:
        from edgellm.build.onnxruntime_cpu import heads_compiler

        return heads_compiler.compile_heads(bundle, manifest, plan, folder, report)
    from edgellm.build.onnxruntime_cpu import draft_compiler

    return draft_compiler.compile_draft(bundle, manifest, plan, folder, report)


def estimate_visual(bundle: Path, manifest: VisualBundleManifest, plan: VisualPlan) -> Estimate:
    """See `Backend.estimate_visual`."""
    from edgellm.build.onnxruntime_cpu import visual_compiler

    return visual_compiler.estimate(bundle, manifest, plan)


def compile_visual(
    bundle: Path, manifest: VisualBundleManifest, plan: VisualPlan, folder: Path, report: Report
) -> CompiledVisual:
    """See `Backend.compile_visual`."""
    from edgellm.build.onnxruntime_cpu import visual_compiler

    return visual_compiler.compile_encoder(bundle, manifest, plan, folder, report)
