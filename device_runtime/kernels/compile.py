"""Compiles the kernels, for wheels and at first use.

Uses only the standard library and no other module of edgellm: build backends import this file
alone.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
LIBRARY = "libedgellm_kernels.so"

_FULL = b"No space left on device"  # of compilers that write to a full disk
# -ffp-contract=off: fused multiply-adds only where the source has them.
_COMMON = (
    "-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden",
    "-Wall", "-Wextra", "-Wno-maybe-uninitialized",
)  # fmt: skip
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
_OPERATORS = (  # for ONNX Runtime
    "operators",
    "attention_operator",
    "delta_operator",
    "experts",
    "low_rank",
)
_ANY = ("scalar", "layout", "dispatch", "c_api", *_OPERATORS)
_UNITS = {
    "x86_64": {
        "avx2": _AVX2,
        "avx_vnni": (*_AVX2, "-mavxvnni"),
        "avx512_vnni": _AVX512,
        "avx512_bf16": (*_AVX512, "-mavx512bf16"),
        "amx": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-int8"),
    },
    "aarch64": {
        "neon_dotprod": ("-march=armv8.2-a+dotprod+fp16",),
        "neon_i8mm": ("-march=armv8.2-a+dotprod+fp16+i8mm",),
    },
}
_SAME = {"arm64": "aarch64", "AMD64": "x86_64"}  # names on other systems


class NoCompilerError(Exception):
    """There is no C++ compiler, or it failed."""


def compiler() -> str | None:
    """The C++ compiler's path: $CXX, else g++, clang++ or c++."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else ("g++", "clang++", "c++")
    return next((path for name in names if (path := shutil.which(name))), None)


def units(machine: str) -> dict[str, tuple[str, ...]]:
    """Names of the translation units for a processor, with the flags of each."""
    return {**dict.fromkeys(_ANY, ()), **_UNITS.get(_SAME.get(machine, machine), {})}


def machine_of(cxx: str) -> str:
    """The processor that a compiler compiles for: another one if its target triple says so."""
    said = subprocess.run([cxx, "-dumpmachine"], capture_output=True, text=True, check=False)
    first, here = said.stdout.partition("-")[0], platform.machine()
    target = _SAME.get(first, first)
    return target if target in _UNITS and target != _SAME.get(here, here) else here


def fingerprint(cxx: str, machine: str, flags: tuple[str, ...] = ()) -> str:
    """A hash of sources, flags and compiler version."""
    digest = hashlib.sha256(repr((units(machine), _COMMON, flags)).encode())
    version = subprocess.run([cxx, "--version"], capture_output=True, check=False)
    digest.update(version.stdout)
    for path in sorted([*SOURCES.rglob("*.h"), *SOURCES.rglob("*.cpp")]):
        digest.update(path.relative_to(SOURCES).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def cached_library(cxx: str, machine: str = "", cache: Path | None = None) -> Path:
    """The library, compiled if it is not cached.

    Args:
        cxx: the compiler.
        machine: the processor that it compiles for; "": this one.
        cache: the folder of caches; None: the user's.

    Raises:
        NoCompilerError: with the compiler's message.
        OSError: the cache's folder cannot be written, or its disk is full.
    """
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    machine = machine or platform.machine()
    target = cache / "edgellm" / "kernels" / fingerprint(cxx, machine) / LIBRARY
    if not target.exists():
        compile_library(target, cxx, machine)
    return target


def compile_library(target: Path, cxx: str, machine: str) -> None:
    """Write the shared library to `target`; raises as `cached_library`.

    The write is atomic, also if several processes compile concurrently.
    """
    _compile(target, [cxx, "-shared"], units(machine), ())


def compile_program(
    target: Path, cxx: str, main: Path, *, machine: str, flags: tuple[str, ...]
) -> None:
    """Write a program of `main` and the kernels, also for another machine."""
    own = {name: unit for name, unit in units(machine).items() if name not in _OPERATORS}
    _compile(target, [cxx], {**own, str(main.with_suffix("")): (f"-I{SOURCES}",)}, flags)


def _compile(
    target: Path, linker: list[str], sources: dict[str, tuple[str, ...]], flags: tuple[str, ...]
) -> None:
    """Compile all units in parallel and link them."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        environment = {**os.environ, "TMPDIR": folder}  # of the compiler's own files
        running: list[subprocess.Popen[bytes]] = []
        objects: list[str] = []
        for name, own in sources.items():
            objects.append(f"{folder}/{len(objects)}.o")
            source = str(SOURCES / f"{name}.cpp")  # joined to an absolute path it is that path
            command = [linker[0], *_COMMON, *flags, *own, "-c", source, "-o", objects[-1]]
            running.append(subprocess.Popen(command, stderr=subprocess.PIPE, env=environment))
        said = [(process.communicate()[1], process.returncode) for process in running]
        for text, code in said:
            if code and _FULL in text:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target.parent))
            if code:
                raise NoCompilerError(text.decode(errors="replace").strip())
        made = Path(folder, target.name)
        command = [*linker, *flags, *objects, "-pthread", "-o", str(made)]
        linked = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment
        )
        if linked.returncode:
            raise NoCompilerError(linked.stderr.strip())
        made.replace(target)
