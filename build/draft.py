"""Building a draft engine into the folder of its base's engine; all or nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from edgellm.artifact import (
    check_output,
    publish,
    require_pair,
    temporary_folder,
    verify_files,
)
from edgellm.build import backends
from edgellm.build.engine import provenance, read_draft_bundle, with_kv_dtype
from edgellm.build.fit import predict, require_fit
from edgellm.build.plan import Plan, Report
from edgellm.contract import (
    DRAFT_FOLDER,
    MANIFEST_NAME,
    DraftEngineManifest,
    EngineManifest,
    load_manifest,
)
from edgellm.device_runtime import runners
from edgellm.integrity import remember


def build_draft(
    bundle: Path, engine: Path, plan: Plan, backend_name: str, report: Report
) -> DraftEngineManifest:
    """Build `engine`/draft; a base engine that is already there must be the draft's.

    Raises:
        BrokenArtifactError: the draft is for another base, or damaged.
        LimitError: memory, disk or the cache would not suffice.
        EdgeLLMError: anything that the backend finds.
    """
    backend = backends.find(backend_name)
    folder = engine / DRAFT_FOLDER
    check_output(folder, "draft_engine", [])
    manifest = read_draft_bundle(bundle, plan)
    if (engine / MANIFEST_NAME).exists():  # the base may be built after its draft
        require_pair(manifest.draft, load_manifest(engine, EngineManifest), str(bundle))
    prediction = predict(bundle, manifest, plan, backend_name, engine)
    require_fit(prediction.needs)
    report("checking the bundle")
    verify_files(bundle, manifest.files)
    origin = prediction.origin
    engine.mkdir(parents=True, exist_ok=True)
    with temporary_folder(folder) as temporary:
        compiled = backend.compile_draft(bundle, manifest, plan, temporary, report)
        draft = manifest.draft
        built = DraftEngineManifest(
            draft=dataclasses.replace(
                draft, decoder=with_kv_dtype(draft.decoder, compiled.kv_dtype)
            ),
            backend=runners.resolve(backend_name),
            backend_version=origin.version,
            machine=origin.machine,
            max_kv_cache_capacity=0 if draft.num_heads else plan.kv_capacity,
            max_draft_tree_size=0 if draft.num_heads else plan.max_draft_tree_size,
            graphs=compiled.graphs,
            fuse_graph=compiled.fuse_graph,
            step_cost_ms=compiled.step_cost_ms,
            extend_cost_ms=compiled.extend_cost_ms,
            quantization=manifest.quantization,
            options={
                "threads": plan.threads, "quantize": plan.quantize, **plan.compiler.given(),
                "notes": list(compiled.notes),
            },
            provenance=provenance(bundle, manifest.provenance),
        )  # fmt: skip
        report("hashing the engine")
        built = publish(temporary, folder, built)
    remember(folder, built.files)
    return built
