"""Atomic build of an engine of any product."""

from __future__ import annotations

import dataclasses
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from edgellm.build import backends
from edgellm.build.artifact_kinds import (
    AUDIO,
    DRAFT,
    LLM,
    PRODUCTS,
    VISUAL,
    read_bundle,
    remembered,
    require_base,
)
from edgellm.build.plan import Compiled, Origin, Plan
from edgellm.build.resource_estimate import predict, require_fit
from edgellm.core.artifact import check_output, hash_file, publish, temporary_folder, verify_files
from edgellm.core.checksums import remember
from edgellm.core.commands.output_folder import OutputKey
from edgellm.core.commands.progress import Report, part_of
from edgellm.core.manifest import ESTIMATED, MANIFEST_NAME, Bundle, Engine, with_kv_dtype
from edgellm.core.model_spec import DecoderSpec
from edgellm.device_runtime import runners
from edgellm.device_runtime.runners.pass_timing import estimated_sizes

_COMMANDS = {
    LLM: "llm_build",
    DRAFT: "llm_build --eagleDraft",
    VISUAL: "visual_build",
    AUDIO: "audio_build",
}

# Fields of a plan whose flags have other names
_FLAGS = {"kv_capacity": "maxKVCacheCapacity", "is_eagle_base": "eagleBase", "checks": "noCheck"}


def target_folder(product: str, engine: Path) -> Path:
    """The folder of a product's files in an engine's folder."""
    folder = PRODUCTS[product].folder
    return engine / folder if folder else engine


def engine_key(
    product: str, source: Path, engine: Path, plan: Plan, backend_name: str
) -> OutputKey:
    """What determines an engine: bundle, plan, and the library and machine that compile it.

    Raises:
        EdgeLLMError: the bundle or the engine's folder do not suit, as in `build_engine`, or a
            draft has no base there.
    """
    bundle = read_bundle(product, source, plan)
    PRODUCTS[product].suits(source, engine, bundle)
    if product == DRAFT:
        require_base(engine)
    origin = backends.find(backend_name).origin(plan.options)
    settings = {_flag(name): value for name, value in dataclasses.asdict(plan).items()}
    settings |= {"backend": backend_name, "library": origin.version, "machine": origin.machine}
    return OutputKey(command=_COMMANDS[product], settings=settings, inputs={"--onnxDir": source})


def _flag(name: str) -> str:
    """The flag that sets a field of a plan."""
    first, *others = _FLAGS.get(name, name).split("_")
    return f"--{first}{''.join(word.title() for word in others)}"


def build_engine(
    product: str,
    source: Path,
    engine: Path,
    plan: Plan,
    backend_name: str,
    report: Report,
    facts: dict[str, Any] | None = None,
) -> Engine:
    """Build `engine` atomically: after an error it is unchanged.

    Args:
        product: "llm", "visual", "audio", or "draft", whose engine goes into its base's folder.
        source: the bundle.
        engine: folder of the engine.
        plan: limits and options.
        backend_name: see `backends.find`.
        report: called with the phase.
        facts: see `edgellm.core.artifact.publish`.

    Raises:
        BrokenArtifactError: the bundle is damaged, or base and draft do not match.
        LimitError: memory or disk is too small.
        EdgeLLMError: an error of `read_bundle` or the backend.
    """
    kind, name = PRODUCTS[product], runners.resolve(backend_name)
    target = target_folder(product, engine)
    check_output(target, kind.engine, [*kind.files], facts)
    bundle = read_bundle(product, source, plan)
    kind.suits(source, engine, bundle)
    prediction = predict(source, bundle, plan, name, engine)
    require_fit(prediction.needs)
    stored = sum(record.num_bytes for record in bundle.files.values())
    verify_files(source, bundle.files, part_of(report, "checking the bundle", stored))
    if kind.folder:
        engine.mkdir(parents=True, exist_ok=True)
    with temporary_folder(target) as folder:
        compiled = backends.find(name).compile(source, bundle, plan, folder, report)
        for file in kind.files:
            if (source / file).exists():
                shutil.copyfile(source / file, folder / file)
        built = _manifest(product, source, bundle, plan, name, prediction.origin, compiled)
        hashing = "hashing the engine"
        built = publish(
            folder, target, built, lambda done, total: part_of(report, hashing, total)(done), facts
        )
    remember(target, built.files)
    return built


def _manifest(
    product: str,
    source: Path,
    bundle: Bundle,
    plan: Plan,
    backend: str,
    origin: Origin,
    compiled: Compiled,
) -> Engine:
    kind = PRODUCTS[product]
    estimated = estimated_sizes(compiled.cost_ms)
    built = Engine(
        kind=kind.engine,
        spec=with_kv_dtype(bundle.spec, compiled.kv_dtype, compiled.pages),
        graphs=compiled.graphs,
        backend=backend,
        backend_version=origin.version,
        machine=origin.machine,
        quantization=bundle.quantization,
        options={
            **remembered(product, plan),
            **plan.options.given(),
            **compiled.options,
            "notes": list(compiled.notes),
            "checks": list(compiled.checks),
            "check_s": round(compiled.check_s, 3),
            **({ESTIMATED: estimated} if estimated else {}),
        },
        provenance=_provenance(source, bundle.provenance),
        eos_token_ids=bundle.eos_token_ids,
        hidden_taps=bundle.hidden_taps,
        pooling=bundle.pooling,
        pooler=bundle.pooler,
        generation_defaults=bundle.generation_defaults,
        prefill_rows=_prefill_rows(compiled.prefill_rows, bundle, plan),
        cost_ms=compiled.cost_ms,
    )
    return dataclasses.replace(built, **kind.limits(bundle, plan))


def _prefill_rows(fastest: int, bundle: Bundle, plan: Plan) -> int:
    """Chunk size of prefill: the fastest, or larger for images that one pass must hold."""
    if not isinstance(bundle.spec, DecoderSpec):
        return fastest
    return max(fastest, min(bundle.spec.min_chunk, plan.max_input_len))


def _provenance(source: Path, of_bundle: dict[str, Any]) -> dict[str, Any]:
    """Provenance of an engine: its bundle and versions."""
    return {
        "bundle": str(source),
        "bundle_manifest_sha256": hash_file(source / MANIFEST_NAME).sha256,
        "edgellm": version("edgellm"),
        **{f"bundle_{key}": value for key, value in of_bundle.items()},
    }
