"""ONNX Runtime on the CPU, the embedded default, and on CUDA.

What imports onnx_ir is loaded when it is used.
"""

from __future__ import annotations

from pathlib import Path

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
from edgellm.device_runtime.backends.onnxruntime.cpu import instruction_sets
from edgellm.device_runtime.session import DraftSession, HeadsSession, Session, VisualSession

MINIMUM_VERSION = (1, 22)
CUDA = "cuda"  # the machine of engines for it


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


def origin(compiler: CompilerOptions) -> Origin:
    """This version, and what chooses the kernels: instruction sets of the CPU, or CUDA.

    Raises:
        EdgeLLMError: not usable, or options that only compilers for GPUs have.
    """
    if given := [flag for flag in compiler.given() if flag != "--device"]:
        raise EdgeLLMError(
            f"{given[0]} is not for ONNX Runtime", hint="it goes with --backend tensorrt"
        )
    return Origin(available(), CUDA if compiler.device == CUDA else instruction_sets())


def open_session(engine: Path, manifest: EngineManifest) -> Session:
    """Load the engine's graphs.

    Raises:
        BrokenArtifactError: built with another ONNX Runtime or for another processor, whose
            prepacked weights this one would misread.
    """
    from edgellm.device_runtime.backends.onnxruntime import device_session, graphs, session

    if (device := _check_origin(engine, manifest)) is not None:
        return device_session.open_base(engine, manifest, device)
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
    from edgellm.device_runtime.backends.onnxruntime import device_session, graphs, session

    if (device := _check_origin(engine, manifest)) is not None:
        return device_session.open_draft(engine, manifest, device)
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
    from edgellm.device_runtime.backends.onnxruntime import graphs, heads

    device = _check_origin(engine, manifest) or graphs.CPU
    threads, path = int(manifest.options["threads"]), engine / manifest.graphs[0].path
    graph = graphs.load_graph(path, threads=threads, optimize=False, device=device)
    return heads.OnnxRuntimeHeads(graph)


def open_visual_session(engine: Path, manifest: VisualEngineManifest) -> VisualSession:
    """Load a visual engine; raises as `open_session` does."""
    from edgellm.device_runtime.backends.onnxruntime import graphs, visual

    device = _check_origin(engine, manifest) or graphs.CPU
    threads = int(manifest.options["threads"])
    graph = graphs.load_graph(
        engine / manifest.graph, threads=threads, optimize=False, keeps_memory=False,
        device=device,
    )  # fmt: skip
    return visual.OnnxRuntimeVisualSession(graph)


def _check_origin(
    engine: Path, manifest: EngineManifest | DraftEngineManifest | VisualEngineManifest
) -> str | None:
    """The device of an engine for CUDA, which must be here; None for the CPU's."""
    maker = "visual_build" if isinstance(manifest, VisualEngineManifest) else "llm_build"
    if manifest.machine == CUDA:
        from edgellm.device_runtime.backends.onnxruntime import cuda

        available()
        return cuda.require_cuda()
    here = origin(CompilerOptions())
    for what, built, found in (
        ("ONNX Runtime", manifest.backend_version, here.version),
        ("processor", manifest.machine, here.machine),
    ):
        if built != found:
            raise BrokenArtifactError(
                f"{engine} was built for {what} {built}, this machine has {found}",
                hint=f"run {maker} on this machine",
            )
    return None


def estimate(bundle: Path, manifest: BundleManifest | DraftBundleManifest, plan: Plan) -> Estimate:
    """See `Backend.estimate`."""
    if plan.compiler.device == CUDA:
        from edgellm.device_runtime.backends.onnxruntime import cuda_compiler

        return cuda_compiler.estimate(bundle, manifest, plan)
    if isinstance(manifest, DraftBundleManifest):
        from edgellm.device_runtime.backends.onnxruntime import draft_compiler

        return draft_compiler.estimate(bundle, manifest, plan)
    from edgellm.device_runtime.backends.onnxruntime import compiler

    return compiler.estimate(bundle, manifest, plan)


def compile(
    bundle: Path, manifest: BundleManifest, plan: Plan, folder: Path, report: Report
) -> Compiled:
    """See `Backend.compile`."""
    if plan.compiler.device == CUDA:
        from edgellm.device_runtime.backends.onnxruntime import cuda_compiler

        return cuda_compiler.compile_base(bundle, manifest, plan, folder, report)
    from edgellm.device_runtime.backends.onnxruntime import compiler

    return compiler.compile_engine(bundle, manifest, plan, folder, report)


def compile_draft(
    bundle: Path, manifest: DraftBundleManifest, plan: Plan, folder: Path, report: Report
) -> CompiledDraft:
    """See `Backend.compile_draft`."""
    if plan.compiler.device == CUDA:
        from edgellm.device_runtime.backends.onnxruntime import cuda_compiler

        return cuda_compiler.compile_draft(bundle, manifest, plan, folder, report)
    if manifest.draft.num_heads:
        from edgellm.device_runtime.backends.onnxruntime import heads_compiler

        return heads_compiler.compile_heads(bundle, manifest, plan, folder, report)
    from edgellm.device_runtime.backends.onnxruntime import draft_compiler

    return draft_compiler.compile_draft(bundle, manifest, plan, folder, report)


def estimate_visual(bundle: Path, manifest: VisualBundleManifest, plan: VisualPlan) -> Estimate:
    """See `Backend.estimate_visual`."""
    if plan.compiler.device == CUDA:
        from edgellm.device_runtime.backends.onnxruntime import cuda_compiler

        return cuda_compiler.estimate_visual(bundle, manifest, plan)
    from edgellm.device_runtime.backends.onnxruntime import visual_compiler

    return visual_compiler.estimate(bundle, manifest, plan)


def compile_visual(
    bundle: Path, manifest: VisualBundleManifest, plan: VisualPlan, folder: Path, report: Report
) -> CompiledVisual:
    """See `Backend.compile_visual`."""
    if plan.compiler.device == CUDA:
        from edgellm.device_runtime.backends.onnxruntime import cuda_compiler

        return cuda_compiler.compile_encoder(bundle, manifest, plan, folder, report)
    from edgellm.device_runtime.backends.onnxruntime import visual_compiler

    return visual_compiler.compile_encoder(bundle, manifest, plan, folder, report)
