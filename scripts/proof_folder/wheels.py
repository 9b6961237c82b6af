"""Wheels of the device side for other machines, downloaded with pip."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from edgellm.core.errors import EdgeLLMError

DEFAULT = ("aarch64-cp310", "aarch64-cp312", "x86_64-cp312")
_PLATFORM = re.compile(r"(aarch64|x86_64)-cp(3\d\d)")
_OLDEST, _NEWEST = 17, 35  # minor versions of glibc 2 that wheels may need; Ubuntu 22.04 has 35
_STDERR = 2
# cp310 is JetPack 6, whose driver is of CUDA 12.6.
_CUDA = {"aarch64-cp310": "cuda-python<13"}
# TensorRT's bindings of JetPack before 7.2 change attributes of plugins under NumPy 2.
_JETPACK = ("numpy<2", "ml_dtypes<0.6")


def read_platforms(text: str) -> tuple[str, ...]:
    """Platforms of a list such as "aarch64-cp310,x86_64-cp312".

    Raises:
        EdgeLLMError: one is not of this form.
    """
    found = tuple(filter(None, text.split(",")))
    for one in found:
        if not _PLATFORM.fullmatch(one):
            raise EdgeLLMError(
                f"--platforms: {one} is no platform", hint=f"known forms: {', '.join(DEFAULT)}"
            )
    return found


def requirements_of(platform: str) -> list[str]:
    """What pip installs on a platform."""
    bound = _JETPACK if platform.startswith("aarch64") else ()
    return ["edgellm[device]", _CUDA.get(platform, "cuda-python"), *bound]


def build_wheel(root: Path, folder: Path) -> Path:
    """Build edgellm's wheel into a folder: pure Python, which fits every platform.

    Raises:
        EdgeLLMError: pip fails.
    """
    words = ["wheel", "--no-deps", "--wheel-dir", str(folder), str(root)]
    _pip(words, "edgellm's wheel cannot be built", {**os.environ, "EDGELLM_KERNELS": "0"})
    return next(folder.glob("edgellm-*.whl"))


def download_wheels(platform: str, wheel: Path) -> None:
    """Download what `wheel` needs on a platform into its folder.

    Raises:
        EdgeLLMError: a package has no wheel for it, or there is no network.
    """
    machine, _, python = platform.partition("-cp")
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(_OLDEST, _NEWEST + 1)]
    tags += [f"manylinux2014_{machine}", f"linux_{machine}"]
    flags = [word for tag in tags for word in ("--platform", tag)]
    wanted = requirements_of(platform)
    wanted[0] = wanted[0].replace("edgellm", str(wheel))
    words = ["download", "--only-binary=:all:", "--implementation", "cp", "--python-version"]
    words += [python, *flags, "--dest", str(wheel.parent), "--find-links", str(wheel.parent)]
    _pip([*words, *wanted], f"the wheels for {platform} cannot be downloaded", {**os.environ})


def _pip(words: list[str], failure: str, variables: dict[str, str]) -> None:
    # Standard output is the command's.
    command = [sys.executable, "-m", "pip", *words, "--quiet"]
    if subprocess.run(command, check=False, stdout=_STDERR, env=variables).returncode:
        raise EdgeLLMError(failure, hint="check the network, and what pip says above")
