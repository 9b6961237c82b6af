"""Planning and building an engine; all or nothing."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
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
)
from edgellm.build.machine import (
    available_memory_bytes,
    free_disk_bytes,
    read_bandwidth_bytes_per_s,
)
from edgellm.contract import (
    DRAFT_FOLDER,
    MANIFEST_NAME,
    BrokenArtifactError,
    BundleManifest,
    DecoderSpec,
    DraftBundleManifest,
    DraftEngineManifest,
    EngineManifest,
    LimitError,
    load_manifest,
)
from edgellm.device_runtime import backends
from edgellm.device_runtime.backends import Estimate, Plan, Report

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a build would cost and give on this machine."""

    estimate: Estimate
    available_memory_bytes: int
    bandwidth_bytes_per_s: float  # 0: the engine is for another memory than this machine's

    @property
    def tokens_per_s(self) -> float:
        """Upper bound of plain decoding: one token reads all weights once."""
        return self.bandwidth_bytes_per_s / self.estimate.decode_bytes

    def lines(self) -> list[str]:
        """For people."""
        mega = 1e6
        lines = [
            f"engine            {self.estimate.engine_bytes / mega:10.1f} MB",
            f"KV cache          {self.estimate.kv_bytes / mega:10.1f} MB",
            f"peak build memory {self.estimate.peak_build_bytes / mega:10.1f} MB"
            f" (available {self.available_memory_bytes / mega:.1f} MB)",
            f"read for a token  {self.estimate.decode_bytes / mega:10.1f} MB",
        ]
        if not self.bandwidth_bytes_per_s:
            return lines
        return [
            *lines,
            f"memory bandwidth  {self.bandwidth_bytes_per_s / 1e9:10.1f} GB/s",
            f"decode, at most   {self.tokens_per_s:10.1f} tokens/s",
        ]


def check_bundle(bundle: Path, plan: Plan) -> BundleManifest:
    """Read a base's bundle and make sure that it is whole and that the plan suits it.

    Raises:
        BrokenArtifactError: damaged, of another contract, or without hidden taps for a draft.
        LimitError: lengths that contradict each other or the model.
    """
    manifest = load_manifest(bundle, BundleManifest)
    _check_lengths(manifest.decoder.max_positions, plan)
    if plan.is_eagle_base and not manifest.hidden_taps:
        raise BrokenArtifactError(
            f"{bundle} gives no features to a draft",
            hint="export it again with edgellm-export llm --is_eagle_base",
        )
    verify_files(bundle, manifest.files)
    return manifest


def check_draft_bundle(bundle: Path, plan: Plan) -> DraftBundleManifest:
    """As `check_bundle`, for a draft's bundle."""
    manifest = load_manifest(bundle, DraftBundleManifest)
    if not manifest.draft.num_heads and plan.max_draft_tree_size >= plan.kv_capacity:
        raise LimitError(
            f"--maxDraftTreeSize {plan.max_draft_tree_size} does not fit into "
            f"--maxKVCacheCapacity {plan.kv_capacity}",
            hint="a round's drafted rows stand behind the committed ones",
        )
    verify_files(bundle, manifest.files)
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


def predict(
    bundle: Path, manifest: BundleManifest | DraftBundleManifest, plan: Plan, backend: str
) -> Prediction:
    """Sizes and speed before anything is built."""
    found = backends.find(backend)
    found.origin(plan.compiler)
    estimate = found.estimate(bundle, manifest, plan)
    bandwidth = read_bandwidth_bytes_per_s() if estimate.runs_on_cpu else 0.0
    return Prediction(estimate, available_memory_bytes(), bandwidth)


def build_engine(
    bundle: Path, engine: Path, plan: Plan, backend_name: str, report: Report
) -> EngineManifest:
    """Build `engine`, which afterwards holds a whole engine or what it held before.

    Raises:
        LimitError: memory or disk would not suffice.
        EdgeLLMError: anything that `check_bundle` or the backend finds.
    """
    backend = backends.find(backend_name)
    origin = backend.origin(plan.compiler)
    check_output(engine, "llm_engine", [*TOKENIZER_FILES])
    report("checking the bundle")
    manifest = check_bundle(bundle, plan)
    _check_draft_there(engine, manifest)
    check_fit(backend.estimate(bundle, manifest, plan), engine)
    with temporary_folder(engine) as folder:
        compiled = backend.compile(bundle, manifest, plan, folder, report)
        for name in TOKENIZER_FILES:
            if (bundle / name).exists():
                shutil.copyfile(bundle / name, folder / name)
        built = EngineManifest(
            decoder=with_kv_dtype(manifest.decoder, compiled.kv_dtype),
            backend=backend.__name__.rsplit(".", 1)[-1],
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
        return publish(folder, engine, built)


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


def check_fit(estimate: Estimate, engine: Path) -> None:
    """Refuse a build that memory or disk cannot hold; raises `LimitError`."""
    memory, disk = available_memory_bytes(), free_disk_bytes(engine)
    if estimate.peak_build_bytes > memory:
        raise LimitError(
            f"the build needs about {estimate.peak_build_bytes / 1e9:.1f} GB of memory, "
            f"{memory / 1e9:.1f} GB are available",
            hint="quantize the model, or build on a machine with more memory",
        )
    if 2 * estimate.engine_bytes > disk:
        raise LimitError(
            f"the build needs about {2 * estimate.engine_bytes / 1e9:.1f} GB of disk, "
            f"{disk / 1e9:.1f} GB are free",
            hint="free some space, or give an --engineDir on another disk",
        )
