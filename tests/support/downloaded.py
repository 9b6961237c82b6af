"""Packages that the dev extra does not bring, for tests that run them: downloaded once."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from edgellm.core.artifact import cache_folder


def packages(requirements: Path) -> Path:
    """A folder for PYTHONPATH with the packages that a file lists, without dependencies.

    Skips the test where the packages cannot be installed.
    """
    if sys.version_info < (3, 11):
        pytest.skip(f"{requirements.name} needs Python 3.11")
    version = hashlib.sha256(requirements.read_bytes()).hexdigest()[:8]
    name = f"{requirements.stem}-{version}-{sys.implementation.cache_tag}"
    folder = cache_folder() / name
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        result = subprocess.run(
            [*command, "--target", f"{work}/{name}", "--requirement", str(requirements)],
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            reason = result.stderr.splitlines()[-1:]
            pytest.skip(f"{requirements.stem} cannot be downloaded: {reason}")
        Path(work, name).replace(folder)
    return folder
