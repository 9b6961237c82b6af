"""The PTX that ships with edgellm: found by kernel, constants and GPU, and checked.

`python -m edgellm.scripts.ptx` compiles it without a GPU: one archive for each compute capability,
with a manifest and the kernels.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.kernels.triton.catalog import STEPS, TARGETS, Kernel, Variant

FOLDER = Path(__file__).with_name("ptx")
MANIFEST = "manifest.json"  # in each archive
_REGENERATE = "install edgellm again; in a checkout run python -m edgellm.scripts.ptx"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A kernel as a driver loads it."""

    kernel: Kernel
    entry: str
    ptx: str
    constants: Mapping[str, Any]
    threads: int  # of a block
    shared_bytes: int  # dynamic
    ptx_version: int  # 85 for 8.5
    sm: int


def recipe_hash(variant: Variant, sm: int) -> str:
    """The hash of all that determines the PTX of a kernel, without Triton's version."""
    kernel = variant.kernel
    options = {
        "constants": dict(variant.constants),
        "warps": variant.warps,
        "stages": variant.stages,
        "max_registers": variant.max_registers,
        "fuses": kernel.fuses,
        "steps": {name: STEPS[name] for name in kernel.signature if name in STEPS},
        "ptx_version": TARGETS[sm],
    }
    digest = hashlib.sha256(json.dumps([kernel.name, options]).encode())
    for module in sorted(_sources(kernel.module)):
        digest.update(_source(module).encode())
    return digest.hexdigest()


def _source(module: str) -> str:
    return Path(__file__).with_name(f"{module}.py").read_text("utf-8")


@functools.cache
def _sources(module: str) -> frozenset[str]:
    """A module with all modules of kernels that it imports."""
    imported = re.findall(rf"^from {re.escape(__package__ or '')}\.(\w+)", _source(module), re.M)
    return frozenset({module}).union(*map(_sources, imported))


def find(variant: Variant, sm: int, driver_ptx: int | None = None) -> Compiled:
    """The PTX of a kernel for a GPU.

    Args:
        variant: kernel and constants, one of `catalog.variants`.
        sm: the GPU's compute capability, 110 for 11.0.
        driver_ptx: the newest PTX version that its driver supports, 85 for 8.5; None: unknown.

    Raises:
        EdgeLLMError: no PTX for the GPU or of this kernel, the driver is too old for it, or the
            files are damaged.
    """
    target = _target(sm)
    entry = read_manifest(target)["kernels"].get(variant.name)
    if entry is None:
        raise EdgeLLMError(
            f"no kernel {variant.name} was compiled for compute capability "
            f"{target // 10}.{target % 10}",
            hint="in a checkout add it to the catalog and run python -m edgellm.scripts.ptx",
        )
    needed = int(entry["ptx_version"])
    if driver_ptx is not None and driver_ptx < needed:
        raise EdgeLLMError(
            f"the kernels for compute capability {target // 10}.{target % 10} are PTX "
            f"{needed / 10}, the NVIDIA driver takes {driver_ptx / 10} at most",
            hint="install a newer NVIDIA driver; on a Jetson flash a newer JetPack",
        )
    data = _read(target, f"{variant.name}.ptx")
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise EdgeLLMError(f"edgellm's kernel {variant.name} is damaged", hint=_REGENERATE)
    return Compiled(
        kernel=variant.kernel,
        entry=entry["entry"],
        ptx=data.decode("ascii"),
        constants=variant.constants,
        threads=32 * variant.warps,
        shared_bytes=int(entry["shared_bytes"]),
        ptx_version=needed,
        sm=target,
    )


def archive_path(target: int) -> Path:
    """The archive of the kernels for a compute capability."""
    return FOLDER / f"sm_{target}.zip"


@functools.cache
def read_manifest(target: int) -> dict[str, Any]:
    """The manifest in the archive of a compute capability.

    Raises:
        EdgeLLMError: it cannot be read.
    """
    try:
        return json.loads(_read(target, MANIFEST))
    except ValueError as error:
        raise EdgeLLMError(f"edgellm's kernels cannot be read: {error}", hint=_REGENERATE) from None


def _target(sm: int) -> int:
    """The newest target that the GPU runs: its own, or an older one that is portable.

    Raises:
        EdgeLLMError: there is none.
    """
    if sm in TARGETS:
        return sm
    older = [target for target in TARGETS if target < sm and read_manifest(target)["is_portable"]]
    if not older:
        shown = ", ".join(f"{target // 10}.{target % 10}" for target in TARGETS)
        raise EdgeLLMError(
            f"no kernels were compiled for compute capability {sm // 10}.{sm % 10}",
            hint=f"there are some for {shown}",
        )
    return max(older)


def _read(target: int, name: str) -> bytes:
    """The contents of a file of an archive."""
    try:
        with zipfile.ZipFile(archive_path(target)) as archive:
            return archive.read(name)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise EdgeLLMError(f"edgellm's kernels cannot be read: {error}", hint=_REGENERATE) from None
