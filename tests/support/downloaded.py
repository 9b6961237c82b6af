"""Packages that the dev extra does not bring, for tests that run them: downloaded once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
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
    version = hashlib.sha256(requirements.encode()).hexdigest()[:8]
    folder = cache_folder() / f"{name}-{version}-{sys.implementation.cache_tag}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other workers wait
        if not folder.exists():
            _install(name, requirements, folder)
    return folder


def _install(name: str, requirements: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        listed = Path(work, "requirements.txt")
        listed.write_text(requirements)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        result = subprocess.run(
            [*command, "--target", f"{work}/{folder.name}", "--requirement", str(listed)],
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            said = f"{name} cannot be downloaded: {result.stderr.splitlines()[-1:]}"
            pytest.fail(said) if os.environ.get("CI") else pytest.skip(said)
        Path(work, folder.name).replace(folder)
