"""Building a visual engine; all or nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

from edgellm.artifact import (
    check_output,
    publish,
    temporary_folder,
    verify_files,
)
from edgellm.build import backends
from edgellm.build.engine import look_at, provenance
from edgellm.build.fit import predict, require_fit
from edgellm.build.plan import Report, VisualPlan
from edgellm.contract import LimitError, VisualBundleManifest, VisualEngineManifest, load_manifest
from edgellm.device_runtime import runners
from edgellm.integrity import remember
from edgellm.multimodal.processors import load as load_processor
from edgellm.multimodal.processors.settings import FILES as PROCESSOR_FILES


def read_visual_bundle(bundle: Path, plan: VisualPlan) -> VisualBundleManifest:
    """Look at a visual bundle in no time: is all there, and does the plan suit it?

    Raises:
        BrokenArtifactError: incomplete, or of another contract.
        UnsupportedModelError: settings of the image processor that are not understood.
        LimitError: token limits that contradict each other or the encoder.
    """
    manifest = load_manifest(bundle, VisualBundleManifest)
    least, per_image, total = (
        plan.min_image_tokens, plan.max_image_tokens_per_image, plan.max_image_tokens
    )  # fmt: skip
    if not least <= per_image <= total:
        raise LimitError(
            f"--maxImageTokensPerImage {per_image} does not lie between --minImageTokens {least} "
            f"and --maxImageTokens {total}",
            hint="an image has at least the first and at most the second number of tokens",
        )
    tile = manifest.vision.tokens_per_tile
    if per_image < tile:
        raise LimitError(
            f"--maxImageTokensPerImage {per_image}: a tile of this encoder has {tile} tokens",
            hint=f"give --maxImageTokensPerImage {tile} or more",
        )
    look_at(bundle, manifest.files)
    load_processor(bundle)
    return manifest


def build_visual(
    bundle: Path, engine: Path, plan: VisualPlan, backend_name: str, report: Report
) -> VisualEngineManifest:
    """Build `engine`, which afterwards holds a whole engine or what it held before.

    Raises:
        BrokenArtifactError: the bundle is damaged.
        LimitError: memory or disk would not suffice.
        EdgeLLMError: anything that `read_visual_bundle` or the backend finds.
    """
    backend = backends.find(backend_name)
    check_output(engine, "visual_engine", [*PROCESSOR_FILES])
    manifest = read_visual_bundle(bundle, plan)
    prediction = predict(bundle, manifest, plan, backend_name, engine)
    require_fit(prediction.needs)
    report("checking the bundle")
    verify_files(bundle, manifest.files)
    origin = prediction.origin
    with temporary_folder(engine) as folder:
        compiled = backend.compile_visual(bundle, manifest, plan, folder, report)
        for name in PROCESSOR_FILES:
            if (bundle / name).exists():
                shutil.copyfile(bundle / name, folder / name)
        built = VisualEngineManifest(
            vision=manifest.vision,
            backend=runners.resolve(backend_name),
            backend_version=origin.version,
            machine=origin.machine,
            graph=compiled.graph,
            precision=compiled.precision,
            min_image_tokens=plan.min_image_tokens,
            max_image_tokens=plan.max_image_tokens,
            max_image_tokens_per_image=plan.max_image_tokens_per_image,
            quantization=manifest.quantization,
            options={
                "threads": plan.threads, "quantize": plan.quantize, **plan.compiler.given(),
                "notes": list(compiled.notes),
            },
            provenance=provenance(bundle, manifest.provenance),
        )  # fmt: skip
        report("hashing the engine")
        built = publish(folder, engine, built)
    remember(engine, built.files)
    return built
