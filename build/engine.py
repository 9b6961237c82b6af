"""Planning and building an engine; all or nothing."""

from __future__ import annotations

import dataclasses
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from edgellm.artifact import (
    check_output,
    hash_file,
    publish,
    require_pair,
    temporary_folder,
    verify_files,
    verify_sizes,
)
from edgellm.build import backends
from edgellm.build.fit import predict, require_fit
from edgellm.build.plan import Plan, Report
from edgellm.contract import (
    DRAFT_FOLDER,
    MANIFEST_NAME,
    BrokenArtifactError,
    BundleManifest,
    DecoderSpec,
    DraftBundleManifest,
    DraftEngineManifest,
    EngineManifest,
    FileRecord,
    LimitError,
    load_manifest,
)
from edgellm.device_runtime import runners
from edgellm.integrity import remember

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def look_at(bundle: Path, files: dict[str, FileRecord]) -> None:
    """Is all there, and are the graphs, which are small and will be read at once, unharmed?

    Raises:
        BrokenArtifactError: no.
    """
    verify_sizes(bundle, files)
    graphs = {name: record for name, record in files.items() if name.endswith(".onnx")}
    verify_files(bundle, graphs)


def read_bundle(bundle: Path, plan: Plan) -> BundleManifest:
    """Look at a base's bundle in no time: is all there, and does the plan suit it?

    Raises:
        BrokenArtifactError: incomplete, of another contract, or without hidden taps for a draft.
        LimitError: lengths that contradict each other or the model.
    """
    manifest = load_manifest(bundle, BundleManifest)
    _check_lengths(manifest.decoder.max_positions, plan)
    if plan.is_eagle_base and not manifest.hidden_taps:
        raise BrokenArtifactError(
            f"{bundle} gives no features to a draft",
            hint="export it again with edgellm-export llm --is_eagle_base",
        )
    look_at(bundle, manifest.files)
    return manifest


def read_draft_bundle(bundle: Path, plan: Plan) -> DraftBundleManifest:
    """As `read_bundle`, for a draft's bundle."""
    manifest = load_manifest(bundle, DraftBundleManifest)
    if not manifest.draft.num_heads and plan.max_draft_tree_size >= plan.kv_capacity:
        raise LimitError(
            f"--maxDraftTreeSize {plan.max_draft_tree_size} does not fit into "
            f"--maxKVCacheCapacity {plan.kv_capacity}",
            hint="a round's drafted rows stand behind the committed ones",
        )
    look_at(bundle, manifest.files)
    return manifest


def _check_lengths(longest: int, plan: Plan) -> None:
    if plan.max_input_len > plan.kv_capacity:
        raise LimitError(
            f"--maxInputLen {plan.max_input_len} exceeds --maxKVCacheCapacity {plan.kv_capacity}",
            hint="the cache must hold the prompt and the answer",
        )
    if plan.kv_capacity > longest:
        raise LimitError(
            f"--maxKVCacheCapacity {plan.kv_capacity} exceeds the model's {longest} positions",
            hint=f"give --maxKVCacheCapacity {longest} or less",
        )
    if plan.max_verify_tree_size >= plan.kv_capacity:
        raise LimitError(
            f"--maxVerifyTreeSize {plan.max_verify_tree_size} does not fit into "
            f"--maxKVCacheCapacity {plan.kv_capacity}",
            hint="the cache must hold the committed tokens and a tree",
        )


def build_engine(
    bundle: Path, engine: Path, plan: Plan, backend_name: str, report: Report
) -> EngineManifest:
    """Build `engine`, which afterwards holds a whole engine or what it held before.

    Raises:
        BrokenArtifactError: the bundle is damaged.
        LimitError: memory or disk would not suffice.
        EdgeLLMError: anything that `read_bundle` or the backend finds.
    """
    backend = backends.find(backend_name)
    check_output(engine, "llm_engine", [*TOKENIZER_FILES])
    manifest = read_bundle(bundle, plan)
    _check_draft_there(engine, manifest)
    prediction = predict(bundle, manifest, plan, backend_name, engine)
    require_fit(prediction.needs)
    report("checking the bundle")
    verify_files(bundle, manifest.files)
    origin = prediction.origin
    with temporary_folder(engine) as folder:
        compiled = backend.compile(bundle, manifest, plan, folder, report)
        for name in TOKENIZER_FILES:
            if (bundle / name).exists():
                shutil.copyfile(bundle / name, folder / name)
        built = EngineManifest(
            decoder=with_kv_dtype(manifest.decoder, compiled.kv_dtype),
            backend=runners.resolve(backend_name),
            backend_version=origin.version,
            machine=origin.machine,
            max_input_len=plan.max_input_len,
            max_kv_cache_capacity=plan.kv_capacity,
            graphs=compiled.graphs,
            pass_cost_ms=compiled.pass_cost_ms,
            prefill_rows=compiled.prefill_rows,
            quantization=manifest.quantization,
            eos_token_ids=manifest.eos_token_ids,
            options={
                "threads": plan.threads, "prefill": plan.prefill, "quantize": plan.quantize,
                **plan.compiler.given(), "notes": list(compiled.notes),
            },
            provenance=provenance(bundle, manifest.provenance),
            hidden_taps=manifest.hidden_taps,
            max_verify_tree_size=plan.max_verify_tree_size,
        )  # fmt: skip
        report("hashing the engine")
        built = publish(folder, engine, built)
    remember(engine, built.files)
    return built


def _check_draft_there(engine: Path, manifest: BundleManifest) -> None:
    """A draft that was built into the folder before must be this base's."""
    folder = engine / DRAFT_FOLDER
    if manifest.hidden_taps and (folder / MANIFEST_NAME).exists():
        require_pair(load_manifest(folder, DraftEngineManifest).draft, manifest, str(folder))


def with_kv_dtype(decoder: DecoderSpec, dtype: str) -> DecoderSpec:
    """The spec as an engine has it."""
    return dataclasses.replace(decoder, kv=dataclasses.replace(decoder.kv, dtype=dtype))


def provenance(bundle: Path, of_bundle: dict[str, Any]) -> dict[str, Any]:
    """Where an engine comes from."""
    return {
        "bundle": str(bundle),
        "bundle_manifest_sha256": hash_file(bundle / MANIFEST_NAME).sha256,
        "edgellm": version("edgellm"),
        **{f"bundle_{key}": value for key, value in of_bundle.items()},
    }
