"""Stages of the demo: commands as a user would type them, skipped where their result is there."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TypeVar

from edgellm.artifact import hash_file
from edgellm.contract import (
    MANIFEST_NAME,
    DraftEngineManifest,
    EdgeLLMError,
    EngineManifest,
    VisualEngineManifest,
    load_manifest,
)

Engine = TypeVar("Engine", EngineManifest, DraftEngineManifest, VisualEngineManifest)


def is_built(engine: Path, bundle: Path, kind: type[Engine]) -> bool:
    """Whether the engine was made of this bundle, on this machine."""
    from edgellm.device_runtime import backends

    try:
        manifest = load_manifest(engine, kind)
    except EdgeLLMError:
        return False
    here = backends.find(manifest.backend).origin(backends.CompilerOptions())
    built_here = (manifest.backend_version, manifest.machine) == (here.version, here.machine)
    source = manifest.provenance["bundle_manifest_sha256"]
    return built_here and source == hash_file(bundle / MANIFEST_NAME).sha256


def unless(is_current: bool, name: str, *arguments: object) -> None:
    """Run a command whose result is not there yet."""
    if is_current:
        print(f"    {name} {arguments[0]}: is there already")
    else:
        command(name, *arguments)


def command(name: str, *arguments: object) -> None:
    """Run one of the installed commands and show it as a user would type it."""
    words = [str(argument) for argument in arguments]
    print(f"    $ {name} {' '.join(words)}", flush=True)
    start = time.perf_counter()
    result = subprocess.run([Path(sys.executable).parent / name, *words], check=False)
    if result.returncode:
        raise SystemExit(result.returncode)
    took(start)


def say(stage: str, what: str) -> None:
    """Announce a stage."""
    print(f"\n{stage}: {what}", flush=True)


def took(start: float) -> None:
    """Print the time since `start`."""
    print(f"    {time.perf_counter() - start:.1f} s", flush=True)
