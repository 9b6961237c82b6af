"""TensorRT and TensorRT-RTX: engines for NVIDIA GPUs, compiled but not run yet."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from edgellm.contract import (
    BrokenArtifactError,
    BundleManifest,
    DraftBundleManifest,
    DraftEngineManifest,
    EdgeLLMError,
    EngineManifest,
    VisualBundleManifest,
    VisualEngineManifest,
)
from edgellm.device_runtime.backends import (
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
from edgellm.device_runtime.backends.tensorrt import library
from edgellm.device_runtime.backends.tensorrt.gpu import compute_capability
from edgellm.device_runtime.session import DraftSession, Session, VisualSession


def available() -> str:
    """The library that compiles here, with its version.

    Raises:
        EdgeLLMError: neither TensorRT nor TensorRT-RTX is usable; says why.
    """
    return library.find_library().label


def origin(compiler: CompilerOptions) -> Origin:
    """The library and the GPU that it compiles for.

    Raises:
        EdgeLLMError: no library, no such GPU, or an option that the library does not have.
    """
    target = library.find_target(compiler.target_sm)
    if compiler.timing_cache is not None and target.library.is_ahead_of_time:
        raise EdgeLLMError(
            f"{target.library.label} has no timing cache",
            hint="leave --timingCache away; kernels are chosen when an engine is loaded",
        )
    return target.origin


def open_session(engine: Path, manifest: EngineManifest) -> Session:
    """Not yet: compares the engine's origin with this machine, and says what is wrong.

    Raises:
        EdgeLLMError: always.
    """
    _refuse(engine, manifest)


def open_draft_session(engine: Path, manifest: DraftEngineManifest) -> DraftSession:
    """As `open_session`."""
    _refuse(engine, manifest)


def open_visual_session(engine: Path, manifest: VisualEngineManifest) -> VisualSession:
    """As `open_session`."""
    _refuse(engine, manifest)


def _refuse(
    engine: Path, manifest: EngineManifest | DraftEngineManifest | VisualEngineManifest
) -> NoReturn:
    """An engine of another GPU or library is told from its manifest, before it is read."""
    maker = "visual_build" if isinstance(manifest, VisualEngineManifest) else "llm_build"
    built = f"{engine} was compiled by {manifest.backend_version} for {manifest.machine}"
    sm, libraries = compute_capability(), library.installed()
    if sm is None:
        fault = "this machine has no NVIDIA GPU"
    elif f"sm{sm}" != manifest.machine:
        fault = f"this machine has sm{sm}"
    elif manifest.backend_version not in libraries:
        fault = f"this machine has {' and '.join(libraries) or 'no TensorRT'}"
    else:
        raise EdgeLLMError(
            f"{built}, and edgellm cannot run TensorRT engines yet",
            hint=f"{maker} --backend onnxruntime makes an engine for the CPU",
        )
    raise BrokenArtifactError(
        f"{built}, {fault}", hint=f"run {maker} on the machine that will run the engine"
    )


def estimate(bundle: Path, manifest: BundleManifest | DraftBundleManifest, plan: Plan) -> Estimate:
    """See `Backend.estimate`."""
    from edgellm.device_runtime.backends.tensorrt import compiler

    return compiler.estimate(bundle, manifest, plan)


def compile(
    bundle: Path, manifest: BundleManifest, plan: Plan, folder: Path, report: Report
) -> Compiled:
    """See `Backend.compile`."""
    from edgellm.device_runtime.backends.tensorrt import compiler

    return compiler.compile_base(bundle, manifest, plan, folder, report)


def compile_draft(
    bundle: Path, manifest: DraftBundleManifest, plan: Plan, folder: Path, report: Report
) -> CompiledDraft:
    """See `Backend.compile_draft`."""
    from edgellm.device_runtime.backends.tensorrt import compiler

    return compiler.compile_draft(bundle, manifest, plan, folder, report)


def estimate_visual(bundle: Path, manifest: VisualBundleManifest, plan: VisualPlan) -> Estimate:
    """See `Backend.estimate_visual`."""
    from edgellm.device_runtime.backends.tensorrt import compiler

    return compiler.estimate_visual(bundle, manifest, plan)


def compile_visual(
    bundle: Path, manifest: VisualBundleManifest, plan: VisualPlan, folder: Path, report: Report
) -> CompiledVisual:
    """See `Backend.compile_visual`."""
    from edgellm.device_runtime.backends.tensorrt import compiler

    return compiler.compile_visual(bundle, manifest, plan, folder, report)
