"""ONNX Runtime on the CPU: the embedded default. What imports onnx_ir is loaded when it is used."""

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
    """This version, and the instruction sets that choose the kernels.

    Raises:
        EdgeLLMError: not usable, or options that only compilers for GPUs have.
    """
    if given := compiler.given():
        raise EdgeLLMError(
            f"{next(iter(given))} is not for ONNX Runtime", hint="it goes with --backend tensorrt"
        )
    return Origin(available(), instruction_sets())


def open_session(engine: Path, manifest: EngineManifest) -> Session:
    """Load the engine's graphs.

    Raises:
        BrokenArtifactError: built with another ONNX Runtime or for another processor, whose
            prepacked weights this one would misread.
    """
    from edgellm.device_runtime.backends.onnxruntime import session

    _check_origin(engine, manifest)
    threads = int(manifest.options["threads"])
    graphs = [
        session.LoadedGraph(
            session.load_graph(engine / graph.path, threads=threads, optimize=False),
            graph.max_rows,
        )
        for graph in manifest.graphs
    ]
    return session.OnnxRuntimeSession(
        graphs, manifest.decoder, manifest.max_kv_cache_capacity, len(manifest.hidden_taps)
    )


def open_draft_session(engine: Path, manifest: DraftEngineManifest) -> DraftSession:
    """Load a draft engine; raises as `open_session` does."""
    from edgellm.device_runtime.backends.onnxruntime import session

    _check_origin(engine, manifest)
    threads = int(manifest.options["threads"])
    model, fuse = (
        session.load_graph(engine / path, threads=threads, optimize=False) if path else None
        for path in (manifest.graphs[0].path, manifest.fuse_graph)
    )
    assert model is not None
    return session.OnnxRuntimeDraftSession(
        model, fuse, manifest.draft.decoder, manifest.max_kv_cache_capacity
    )


def open_heads(engine: Path, manifest: DraftEngineManifest) -> HeadsSession:
    """Load an engine of Medusa heads; raises as `open_session` does."""
    from edgellm.device_runtime.backends.onnxruntime import heads, session

    _check_origin(engine, manifest)
    threads, path = int(manifest.options["threads"]), engine / manifest.graphs[0].path
    return heads.OnnxRuntimeHeads(session.load_graph(path, threads=threads, optimize=False))


def open_visual_session(engine: Path, manifest: VisualEngineManifest) -> VisualSession:
    """Load a visual engine; raises as `open_session` does."""
    from edgellm.device_runtime.backends.onnxruntime import session, visual

    _check_origin(engine, manifest)
    threads = int(manifest.options["threads"])
    graph = session.load_graph(
        engine / manifest.graph, threads=threads, optimize=False, keeps_memory=False
    )
    return visual.OnnxRuntimeVisualSession(graph)


def _check_origin(
    engine: Path, manifest: EngineManifest | DraftEngineManifest | VisualEngineManifest
) -> None:
    maker = "visual_build" if isinstance(manifest, VisualEngineManifest) else "llm_build"
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


def estimate(bundle: Path, manifest: BundleManifest | DraftBundleManifest, plan: Plan) -> Estimate:
    """See `Backend.estimate`."""
    if isinstance(manifest, DraftBundleManifest):
        from edgellm.device_runtime.backends.onnxruntime import draft_compiler

        return draft_compiler.estimate(bundle, manifest, plan)
    from edgellm.device_runtime.backends.onnxruntime import compiler

    return compiler.estimate(bundle, manifest, plan)


def compile(
    bundle: Path, manifest: BundleManifest, plan: Plan, folder: Path, report: Report
) -> Compiled:
    """See `Backend.compile`."""
    from edgellm.device_runtime.backends.onnxruntime import compiler

    return compiler.compile_engine(bundle, manifest, plan, folder, report)


def compile_draft(
    bundle: Path, manifest: DraftBundleManifest, plan: Plan, folder: Path, report: Report
) -> CompiledDraft:
    """See `Backend.compile_draft`."""
    if manifest.draft.num_heads:
        from edgellm.device_runtime.backends.onnxruntime import heads_compiler

        return heads_compiler.compile_heads(bundle, manifest, plan, folder, report)
    from edgellm.device_runtime.backends.onnxruntime import draft_compiler

    return draft_compiler.compile_draft(bundle, manifest, plan, folder, report)


def estimate_visual(bundle: Path, manifest: VisualBundleManifest, plan: VisualPlan) -> Estimate:
    """See `Backend.estimate_visual`."""
    from edgellm.device_runtime.backends.onnxruntime import visual_compiler

    return visual_compiler.estimate(bundle, manifest, plan)


def compile_visual(
    bundle: Path, manifest: VisualBundleManifest, plan: VisualPlan, folder: Path, report: Report
) -> CompiledVisual:
    """See `Backend.compile_visual`."""
    from edgellm.device_runtime.backends.onnxruntime import visual_compiler

    return visual_compiler.compile_encoder(bundle, manifest, plan, folder, report)
