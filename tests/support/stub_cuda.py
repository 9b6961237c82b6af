"""`stub_cuda.c` as `libcuda.so.1`, for processes that find it by LD_LIBRARY_PATH."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgellm.device_runtime.kernels.compile import compiler


def compile_shared(source: str, library: Path, *flags: str) -> None:
    """Compile C into a library; skips the test where there is no compiler for it."""
    cxx = compiler()
    if cxx is None or sys.platform != "linux":
        pytest.skip("there is no compiler for a library of the test")
    command = [cxx, "-x", "c", "-", "-O1", "-shared", "-fPIC", "-o", str(library), *flags]
    subprocess.run(command, input=source, text=True, check=True)


def make_driver(folder: Path) -> None:
    """Compile the driver into a folder."""
    source, name = Path(__file__).with_suffix(".c").read_text(), "libcuda.so.1"
    compile_shared(source, folder / name, f"-Wl,-soname,{name}", "-ldl")
