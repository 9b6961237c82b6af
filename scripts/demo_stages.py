"""Stages of the demo: commands as a user types them, skipped if their result exists."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from edgellm.core.artifact import hash_file
from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import (
    DRAFT_BUNDLE,
    DRAFT_ENGINE,
    DRAFT_FOLDER,
    LLM_BUNDLE,
    LLM_ENGINE,
    MANIFEST_NAME,
    load_bundle,
    load_engine,
)


def export_pair(model: Path, draft: Path, bundle: Path, drafted: Path) -> None:
    """Export a base and its EAGLE3 draft to float32 bundles."""
    run_unless(
        is_exported(bundle, LLM_BUNDLE, model), "edgellm-export", "llm", "--model_dir", model,
        "--output_dir", bundle, "--dtype", "fp32", "--is_eagle_base", "--draft_model_dir", draft,
    )  # fmt: skip
    run_unless(
        is_exported(drafted, DRAFT_BUNDLE, draft), "edgellm-export", "draft",
        "--draft_model_dir", draft, "--base_model_dir", model, "--output_dir", drafted,
        "--dtype", "fp32",
    )  # fmt: skip


def build_pair(bundle: Path, drafted: Path, engine: Path, *sizes: object) -> None:
    """Build both bundles into one engine."""
    run_unless(
        is_built(engine, bundle, LLM_ENGINE), "llm_build", "--onnxDir", bundle,
        "--engineDir", engine, "--eagleBase", *sizes,
    )  # fmt: skip
    run_unless(
        is_built(engine / DRAFT_FOLDER, drafted, DRAFT_ENGINE), "llm_build", "--onnxDir",
        drafted, "--engineDir", engine, "--eagleDraft", *sizes,
    )  # fmt: skip


def is_exported(bundle: Path, kind: str, checkpoint: Path) -> bool:
    """Return whether the bundle is an export of this checkpoint, and newer."""
    try:
        manifest = load_bundle(bundle, kind)
    except EdgeLLMError:
        return False
    weights = checkpoint / "model.safetensors" if checkpoint.is_dir() else checkpoint
    is_newer = weights.stat().st_mtime < bundle.stat().st_mtime
    return manifest.provenance["checkpoint"] == str(checkpoint) and is_newer


def is_built(engine: Path, bundle: Path, kind: str) -> bool:
    """Return whether the engine was built of this bundle, on this machine."""
    from edgellm.build import backends

    try:
        manifest = load_engine(engine, kind)
    except EdgeLLMError:
        return False
    backend = backends.find(manifest.backend)
    here = backend.origin(backend.Options())
    built_here = (manifest.backend_version, manifest.machine) == (here.version, here.machine)
    source = manifest.provenance["bundle_manifest_sha256"]
    return built_here and source == hash_file(bundle / MANIFEST_NAME).sha256


def run_unless(is_current: bool, name: str, *arguments: object) -> None:
    """Run a command unless its result is current."""
    if is_current:
        print(f"    {name} {arguments[0]}: is up to date")
    else:
        command(name, *arguments, "--overwrite")


def command(name: str, *arguments: object) -> None:
    """Print and run an installed command."""
    words = [str(argument) for argument in arguments]
    print(f"    $ {name} {' '.join(words)}", flush=True)
    start = time.perf_counter()
    result = subprocess.run([Path(sys.executable).parent / name, *words], check=False)
    if result.returncode:
        raise SystemExit(result.returncode)
    print_time(start)


def announce(stage: str, what: str) -> None:
    """Announce a stage."""
    print(f"\n{stage}: {what}", flush=True)


def print_time(start: float) -> None:
    """Print the time since `start`."""
    print(f"    {time.perf_counter() - start:.1f} s", flush=True)
