"""Compiling the kernels: what a wheel's build and a first use have in common.

Standard library only: a build backend imports this without the package.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
LIBRARY = "libedgellm_kernels.so"

# -ffp-contract=off: a product and a sum are one step where the source says so, and nowhere else.
_COMMON = (
    "-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden",
    "-Wall", "-Wextra", "-Wno-maybe-uninitialized",
)  # fmt: skip
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
_ANY = ("scalar", "layout", "dispatch", "c_api", "operators")
_UNITS = {
    "x86_64": {"avx2": _AVX2, "avx_vnni": (*_AVX2, "-mavxvnni"), "avx512_vnni": _AVX512},
    "aarch64": {
        "neon_dotprod": ("-march=armv8.2-a+dotprod+fp16",),
        "neon_i8mm": ("-march=armv8.2-a+dotprod+fp16+i8mm",),
    },
}  # fmt: skip


class NoCompilerError(Exception):
    """There is no C++ compiler, or it refused the kernels."""


def compiler() -> str | None:
    """The C++ compiler's path: $CXX, else g++, clang++ or c++."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else ("g++", "clang++", "c++")
    return next((path for name in names if (path := shutil.which(name))), None)


def units(machine: str) -> dict[str, tuple[str, ...]]:
    """Names of the translation units for a processor, with the flags of each."""
    return {**{name: () for name in _ANY}, **_UNITS.get(machine, {})}


def fingerprint(cxx: str, machine: str, flags: tuple[str, ...] = ()) -> str:
    """A name for what a compiler makes of these sources."""
    digest = hashlib.sha256(repr((units(machine), _COMMON, flags)).encode())
    version = subprocess.run([cxx, "--version"], capture_output=True, check=False)
    digest.update(version.stdout)
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def compile_library(
    target: Path, cxx: str, *, machine: str | None = None, flags: tuple[str, ...] = ()
) -> None:
    """Write the shared library to `target`; raises `NoCompilerError` with what the compiler said.

    It appears whole or not at all, also when several processes write it at once.
    """
    machine = machine or platform.machine()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder, LIBRARY)
        objects = _compile_units(Path(folder), cxx, machine, flags)
        _run([cxx, "-shared", *flags, *objects, "-pthread", "-o", str(made)])
        made.replace(target)


def _compile_units(folder: Path, cxx: str, machine: str, flags: tuple[str, ...]) -> list[str]:
    """Compile all units at once; the objects' paths."""
    running: list[tuple[list[str], subprocess.Popen[bytes]]] = []
    objects: list[str] = []
    for name, own in units(machine).items():
        objects.append(str(folder / f"{name}.o"))
        source = str(SOURCES / f"{name}.cpp")
        command = [cxx, *_COMMON, *flags, *own, "-c", source, "-o", objects[-1]]
        running.append((command, subprocess.Popen(command, stderr=subprocess.PIPE)))
    failures = [
        error.decode(errors="replace")
        for _, process in running
        if (error := process.communicate()[1]) is not None and process.returncode
    ]
    if failures:
        raise NoCompilerError(failures[0].strip())
    return objects


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise NoCompilerError(result.stderr.strip())
