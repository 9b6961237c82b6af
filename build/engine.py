"""Planning and building an engine; all or nothing."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from edgellm.artifact import check_output, hash_file, publish, temporary_folder, verify_files
from edgellm.build.machine import (
    available_memory_bytes,
    free_disk_bytes,
    read_bandwidth_bytes_per_s,
)
from edgellm.contract import (
    MANIFEST_NAME,
    BundleManifest,
    EngineManifest,
    KVCacheSpec,
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
    bandwidth_bytes_per_s: float

    @property
    def tokens_per_s(self) -> float:
        """Upper bound of plain decoding: one token reads all weights once."""
        return self.bandwidth_bytes_per_s / self.estimate.decode_bytes

    def lines(self) -> list[str]:
        """For people."""
        mega = 1e6
        return [
            f"engine            {self.estimate.engine_bytes / mega:10.1f} MB",
            f"KV cache          {self.estimate.kv_bytes / mega:10.1f} MB",
            f"peak build memory {self.estimate.peak_build_bytes / mega:10.1f} MB"
            f" (available {self.available_memory_bytes / mega:.1f} MB)",
            f"memory bandwidth  {self.bandwidth_bytes_per_s / 1e9:10.1f} GB/s",
            f"decode, at most   {self.tokens_per_s:10.1f} tokens/s",
        ]


def check_bundle(bundle: Path, plan: Plan) -> BundleManifest:
    """Read a bundle and make sure that it is whole and that the plan suits it.

    Raises:
        BrokenArtifactError: damaged, or of another contract.
        LimitError: lengths that contradict each other or the model.
    """
    manifest = load_manifest(bundle, BundleManifest)
    longest = manifest.decoder.max_positions
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
    verify_files(bundle, manifest.files)
    return manifest


def predict(bundle: Path, manifest: BundleManifest, plan: Plan, backend: str) -> Prediction:
    """Sizes and speed before anything is built."""
    estimate = backends.find(backend).estimate(bundle, manifest, plan)
    return Prediction(estimate, available_memory_bytes(), read_bandwidth_bytes_per_s())


def build_engine(
    bundle: Path, engine: Path, plan: Plan, backend_name: str, report: Report
) -> EngineManifest:
    """Build `engine`, which afterwards holds a whole engine or what it held before.

    Raises:
        LimitError: memory or disk would not suffice.
        EdgeLLMError: anything that `check_bundle` or the backend finds.
    """
    backend = backends.find(backend_name)
    backend_version = backend.available()
    check_output(engine, "llm_engine", [*TOKENIZER_FILES])
    report("checking the bundle")
    manifest = check_bundle(bundle, plan)
    _check_fit(backend.estimate(bundle, manifest, plan), engine)
    with temporary_folder(engine) as folder:
        compiled = backend.compile(bundle, manifest, plan, folder, report)
        for name in TOKENIZER_FILES:
            if (bundle / name).exists():
                shutil.copyfile(bundle / name, folder / name)
        kv = manifest.decoder.kv
        spec = KVCacheSpec(kv.num_layers, kv.num_kv_heads, kv.head_dim, compiled.kv_dtype)
        built = EngineManifest(
            decoder=dataclasses.replace(manifest.decoder, kv=spec),
            backend=backend.__name__.rsplit(".", 1)[-1],
            backend_version=backend_version,
            machine=backend.machine(),
            max_input_len=plan.max_input_len,
            max_kv_cache_capacity=plan.kv_capacity,
            graphs=compiled.graphs,
            pass_cost_ms=compiled.pass_cost_ms,
            prefill_rows=compiled.prefill_rows,
            quantization=manifest.quantization,
            eos_token_ids=manifest.eos_token_ids,
            options={"threads": plan.threads, "prefill": plan.prefill},
            provenance={
                "bundle": str(bundle),
                "bundle_manifest_sha256": hash_file(bundle / MANIFEST_NAME).sha256,
                "edgellm": version("edgellm"),
                **{f"bundle_{key}": value for key, value in manifest.provenance.items()},
            },
        )
        report("hashing the engine")
        return publish(folder, engine, built)


def _check_fit(estimate: Estimate, engine: Path) -> None:
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
