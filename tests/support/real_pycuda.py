"""The real pycuda, compiled from its source distribution: there are no wheels of it.

Only the parts that `pycuda.driver` imports are compiled, without optimization, in 45 s of
processor time. They are linked with `stub_cuda.c`; functions that it lacks are looked up when they
are called, so a process that imports them needs `sys.setdlopenflags(os.RTLD_LAZY)`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import downloaded
import numpy as np
import pytest
import stub_cuda

from edgellm.device_runtime.kernels.compile import compiler

# Its releases, each with NVIDIA's headers of a CUDA that it knows.
HEADERS = {
    "2025.1.2": "nvidia-cuda-runtime-cu12==12.6.77\nnvidia-cuda-profiler-api-cu12==12.6.77",
    "2026.1": "nvidia-cuda-runtime==13.0.96\nnvidia-cuda-profiler-api==13.0.85",
}
_BOOST = "bpl-subset/bpl_subset"
_UNITS = {  # sources that are compiled together, which takes a fourth of the time
    "driver": ("src/wrapper/wrap_cudadrv.cpp",),
    "rest": (
        "src/cpp/*.cpp",
        "src/wrapper/mempool.cpp",
        f"{_BOOST}/libs/python/src/**/*.cpp",
        f"{_BOOST}/libs/thread/src/pthread/*.cpp",
        f"{_BOOST}/libs/system/src/*.cpp",
    ),
    "struct": ("src/wrapper/_pvt_struct_v3.cpp",),
}
_EXTENSIONS = {"_driver": ("driver", "rest"), "_pvt_struct": ("struct",)}
# Those of its setup.py, but for CURAND and a second name of Boost.
_DEFINES = (
    "BOOST_ALL_NO_LIB=1",
    "BOOST_THREAD_BUILD_DLL=1",
    "BOOST_MULTI_INDEX_DISABLE_SERIALIZATION=1",
    "BOOST_PYTHON_SOURCE=1",
    "BOOST_THREAD_DONT_USE_CHRONO=1",
    "PYGPU_PACKAGE=pycuda",
    "PYGPU_PYCUDA=1",
)
_FLAGS = ("-std=c++17", "-O0", "-fPIC", "-w", *(f"-D{each}" for each in _DEFINES))
_SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))


def folder(version: str) -> Path:
    """A folder for PYTHONPATH with a release of pycuda, compiled once.

    Skips the test where there is no compiler or no header of Python.

    Args:
        version: a key of `HEADERS`.
    """
    cxx, python = compiler(), sysconfig.get_path("include")
    if cxx is None or not Path(python, "Python.h").exists():
        pytest.skip("pycuda needs a C++ compiler and the headers of Python (python3-dev)")
    headers = downloaded.pinned(f"cuda-headers-{version}", HEADERS[version])
    recipe = repr((version, headers.name, np.__version__, _UNITS, _FLAGS))

    def build(work: Path) -> Path:
        source = downloaded.source(f"pycuda=={version}", work)
        includes = [source / "src/cpp", source / _BOOST, python, np.get_include()]
        includes += [each.parent for each in headers.rglob("include/cuda*.h")]
        flags = [cxx, *_FLAGS, *(f"-I{each}" for each in dict.fromkeys(includes))]
        return _build(source, work, flags)

    return downloaded.kept(f"pycuda-{version}", recipe, build)


def _build(source: Path, work: Path, command: list[str]) -> Path:
    """The package below `work`: modules, extensions, and metadata that name its version."""
    stub_cuda.make_driver(work)

    def compile_unit(name: str) -> str:
        sources = [path for each in _UNITS[name] for path in sorted(source.glob(each))]
        unit = work / f"{name}.cpp"
        unit.write_text("".join(f'#include "{path}"\n' for path in sources))
        _run(*command, "-c", str(unit), "-o", f"{unit}.o")
        return f"{unit}.o"

    with ThreadPoolExecutor(os.cpu_count()) as workers:
        objects = dict(zip(_UNITS, workers.map(compile_unit, _UNITS), strict=True))
    package = work / "packages" / "pycuda"
    shutil.copytree(source / "pycuda", package)
    shutil.copytree(source / "pycuda.egg-info", package.with_name("pycuda.egg-info"))
    link, driver = (command[0], "-shared", "-Wl,-z,lazy", "-pthread"), str(work / "libcuda.so.1")
    for name, units in _EXTENSIONS.items():
        made = package / f"{name}{_SUFFIX}"
        _run(*link, "-o", str(made), *(objects[unit] for unit in units), driver)
    return package.parent


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}: {result.stderr[-2000:]}"
