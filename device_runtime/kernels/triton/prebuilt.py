"""The PTX that ships with edgellm: found by kernel, constants and GPU, and checked.

`python -m edgellm.scripts.ptx` makes it of the sources, on a machine that needs no GPU.
"""

from __future__ import annotations

import functools
import hashlib
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.kernels.triton.catalog import KERNELS, Kernel, Variant

FOLDER = Path(__file__).with_name("ptx")
MANIFEST = "manifest.json"
_REGENERATE = "install edgellm again; in a checkout run python -m edgellm.scripts.ptx"


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel as a driver takes it."""

    kernel: Kernel
    entry: str
    ptx: str
    constants: Mapping[str, Any]
    threads: int  # of a block
    shared_bytes: int  # dynamic
    ptx_version: int  # 85 for 8.5
    sm: int


def source_hash() -> str:
    """Of everything that decides what the PTX is, but for Triton's version."""
    digest = hashlib.sha256()
    for module in sorted({kernel.module for kernel in KERNELS.values()} | {"cache", "catalog"}):
        digest.update(Path(__file__).with_name(f"{module}.py").read_bytes())
    return digest.hexdigest()


def find(variant: Variant, sm: int, driver_ptx: int | None = None) -> Compiled:
    """The PTX of a kernel for a GPU.

    Args:
        variant: kernel and constants, one of `catalog.variants`.
        sm: the GPU's compute capability, 110 for 11.0.
        driver_ptx: the newest PTX version that its driver takes, 85 for 8.5; None: not known.

    Raises:
        EdgeLLMError: nothing was compiled for the GPU or of this kernel, the driver is too old
            for it, or the files are damaged.
    """
    target = _target(sm)
    entry = _manifest()["targets"][str(target)]["kernels"].get(variant.name)
    if entry is None:
        raise EdgeLLMError(
            f"no kernel {variant.name} was compiled for compute capability "
            f"{target // 10}.{target % 10}",
            hint="build without kernels of edgellm's own, or add it to the catalog and run "
            "python -m edgellm.scripts.ptx",
        )
    needed = int(entry["ptx_version"])
    if driver_ptx is not None and driver_ptx < needed:
        raise EdgeLLMError(
            f"the kernels for compute capability {target // 10}.{target % 10} are PTX "
            f"{needed / 10}, the NVIDIA driver takes {driver_ptx / 10} at most",
            hint="install a newer NVIDIA driver; on a Jetson flash a newer JetPack",
        )
    ptx = _read(target, variant.name, entry["sha256"])
    return Compiled(
        variant.kernel, entry["entry"], ptx, variant.constants, 32 * variant.warps,
        int(entry["shared_bytes"]), needed, target,
    )  # fmt: skip


def _target(sm: int) -> int:
    """The newest target that the GPU runs: its own, or an older one that is not of one GPU alone.

    Raises:
        EdgeLLMError: there is none.
    """
    targets = _manifest()["targets"]
    if str(sm) in targets:
        return sm
    older = [int(t) for t, each in targets.items() if each["is_portable"] and int(t) < sm]
    if not older:
        shown = ", ".join(f"{int(t) // 10}.{int(t) % 10}" for t in targets)
        raise EdgeLLMError(
            f"no kernels were compiled for compute capability {sm // 10}.{sm % 10}",
            hint=f"there are some for {shown}; build without kernels of edgellm's own",
        )
    return max(older)


@functools.cache
def _manifest() -> dict[str, Any]:
    try:
        return json.loads((FOLDER / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise EdgeLLMError(f"edgellm's kernels cannot be read: {error}", hint=_REGENERATE) from None


def _read(target: int, name: str, expected: str) -> str:
    try:
        with zipfile.ZipFile(FOLDER / f"sm_{target}.zip") as archive:
            data = archive.read(f"{name}.ptx")
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise EdgeLLMError(f"edgellm's kernels cannot be read: {error}", hint=_REGENERATE) from None
    if hashlib.sha256(data).hexdigest() != expected:
        raise EdgeLLMError(f"edgellm's kernel {name} is damaged", hint=_REGENERATE)
    return data.decode("ascii")
