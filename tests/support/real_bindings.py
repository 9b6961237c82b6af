"""NVIDIA's own Python bindings of TensorRT, of several versions, without its libraries.

Their wheels have a few MB. They are loaded on an empty library with the functions that they link,
in a process of its own for each version and NumPy.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import downloaded
import numpy as np
import pytest
import real_pycuda
import stub_cuda

# JetPack 6.1 and 6.2; the first with plugins that bring kernels; JetPack 7.0 and 7.1; 7.2; newer.
EACH_CHANGE = {
    "10.3": "tensorrt-cu12-bindings==10.3.0",
    "10.9": "tensorrt-cu12-bindings==10.9.0.34",
    "10.13": "tensorrt-cu13-bindings==10.13.3.9",
    "10.16": "tensorrt-cu13-bindings==10.16.1.11",
    "11.4": "tensorrt-cu13-bindings==11.4.0.106",
}
NIGHTLY = {
    "10.7": "tensorrt-cu12-bindings==10.7.0",
    "10.14": "tensorrt-cu13-bindings==10.14.1.48.post1",
    "10.15": "tensorrt-cu13-bindings==10.15.1.29",
}
CUDA_PYTHON = {
    "12": "cuda-bindings==12.9.10\ncuda-pathfinder==1.9.1",
    "13": "cuda-bindings==13.5.0\ncuda-pathfinder==1.9.1",
}
NUMPY_1 = "numpy==1.26.4\nml_dtypes==0.5.4"
# Wheels of all of these exist for these versions of Python.
_PYTHONS = (3, 11), (3, 12)
_LIBRARIES = "nvinfer", "nvinfer_plugin", "nvonnxparser"
_FUNCTIONS = (
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
)


def make_libraries(folder: Path) -> Path:
    """Compile the empty libraries and a driver into a folder."""
    empty = folder / "empty.so"
    functions = (f"void *{name}(void) {{ return 0; }}\n" for name in _FUNCTIONS)
    stub_cuda.compile_shared("".join(functions), empty)
    for name in _LIBRARIES:
        for major in (10, 11):
            (folder / f"lib{name}.so.{major}").symlink_to(empty)
    stub_cuda.make_driver(folder)
    return folder


def run(
    script: str,
    libraries: Path,
    asked: Any,
    *,
    version: str = "",
    numpy: str = "2",
    cuda: str = "13",
    pycuda: str = "",
    is_pips: bool = False,
    variables: Mapping[str, str] | None = None,
) -> str:
    """What a script of this folder prints; skips the test if a package cannot be downloaded.

    Args:
        script: its name.
        libraries: what `make_libraries` made.
        asked: JSON that it reads from standard input.
        version: of TensorRT's bindings, a key of `EACH_CHANGE` or `NIGHTLY`; "": none.
        numpy: "1", or "2" for the installed one.
        cuda: of cuda-python, a key of `CUDA_PYTHON`; "": none.
        pycuda: its release, a key of `real_pycuda.HEADERS`; "": none.
        is_pips: the module `tensorrt` is pip's, which imports the bindings; else JetPack's.
        variables: of its environment.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("the bindings are those of Linux on x86_64")
    if sys.version_info[:2] not in _PYTHONS:
        pytest.skip("not all of these bindings have wheels for this Python")
    if numpy == "2" and np.__version__.startswith("1."):
        pytest.skip("NumPy 1 is installed")
    paths = [*map(Path, sys.path)]
    if cuda:
        paths.insert(0, downloaded.pinned(f"cuda-bindings-{cuda}", CUDA_PYTHON[cuda]))
    if pycuda:
        paths.insert(0, real_pycuda.folder(pycuda))
    if numpy == "1":
        paths.insert(0, downloaded.pinned("numpy-1.26", NUMPY_1))
    if version:
        paths.insert(0, _package(version, libraries, is_pips=is_pips))
    found = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script))],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            **(variables or {}),
            "LD_LIBRARY_PATH": str(libraries),
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
        },
    )
    assert found.returncode == 0, f"status {found.returncode}: {found.stderr}"
    return found.stdout


def _package(version: str, libraries: Path, *, is_pips: bool) -> Path:
    """A folder with the module `tensorrt`."""
    bindings = downloaded.pinned(f"tensorrt-{version}", {**EACH_CHANGE, **NIGHTLY}[version])
    folder = libraries / f"site-{version}-{is_pips}"
    if not folder.exists():
        # JetPack's package has the bindings under the name `tensorrt`, pip's imports them.
        place, other = ("tensorrt_bindings", "tensorrt")[:: 1 if is_pips else -1]
        (folder / other).mkdir(parents=True)
        (folder / place).symlink_to(bindings / "tensorrt_bindings")
        names = "*", "__version__"
        lines = [f"from tensorrt_bindings import {name}\n" for name in names if is_pips]
        (folder / other / "__init__.py").write_text("".join(lines))  # or hides installed ones
    return folder
