"""Packages that the dev extra does not bring, for tests that run them: downloaded once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from edgellm.core.artifact import cache_folder


def packages(requirements: Path) -> Path:
    """A folder for PYTHONPATH with the packages that a file lists; see `pinned`."""
    return pinned(requirements.stem, requirements.read_text("utf-8"))


def pinned(name: str, requirements: str) -> Path:
    """A folder for PYTHONPATH with the packages of a list, without dependencies.

    Skips the test where the packages cannot be installed. With the environment variable CI set
    this is a failure, since nothing else would say that the test has not run.

    Args:
        name: begins the folder's name.
        requirements: the text of a requirements file.
    """
    if sys.version_info < (3, 11):
        pytest.skip(f"{name} needs Python 3.11")

    def install(work: Path) -> Path:
        listed, target = work / "requirements.txt", work / "packages"
        listed.write_text(requirements)
        _pip(name, "install", "--target", str(target), "--requirement", str(listed))
        return target

    return kept(name, requirements, install)


def kept(name: str, recipe: str, make: Callable[[Path], Path]) -> Path:
    """A folder of the cache, made once for this Python; other processes wait for it.

    Args:
        name: begins the folder's name.
        recipe: all that its contents depend on.
        make: makes it below a temporary folder.
    """
    version = hashlib.sha256(recipe.encode()).hexdigest()[:8]
    folder = cache_folder() / f"{name}-{version}-{sys.implementation.cache_tag}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as work:
                make(Path(work)).replace(folder)
    return folder


def source(requirement: str, folder: Path) -> Path:
    """The unpacked source distribution of a package, below a folder; skips as `pinned`."""
    archives, package = folder / "archives", requirement.partition("==")[0]
    # pip asks for its metadata, which is built with setuptools: here, or in a new environment.
    flags = ["--no-build-isolation"] if find_spec("setuptools") else []
    flags += ["--no-binary", package, "--dest", str(archives)]
    _pip(requirement, "download", *flags, requirement)
    (archive,) = archives.iterdir()
    shutil.unpack_archive(archive, folder / "source")
    (found,) = (folder / "source").iterdir()
    return found


def _pip(name: str, command: str, *arguments: str) -> None:
    pip = [sys.executable, "-m", "pip", command, "--quiet", "--no-deps", *arguments]
    result = subprocess.run(pip, capture_output=True, text=True, check=False)
    if result.returncode:
        said = f"{name} cannot be downloaded: {result.stderr.splitlines()[-1:]}"
        pytest.fail(said) if os.environ.get("CI") else pytest.skip(said)
