"""Compiling and finding the kernels, and their self-test in C++."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.kernels import compile as compiling
from edgellm.device_runtime.kernels import library

SELF_TEST = Path(__file__).with_name("self_test.cpp")
TILES = Path(__file__).with_name("tile_model.h")
CACHE = library.library_path().parents[1]


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache of compiled kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.library_path.cache_clear()
    yield tmp_path
    library.library_path.cache_clear()


def test_without_a_compiler_there_is_a_remedy(fresh, monkeypatch):
    monkeypatch.setenv("PATH", str(fresh))
    with pytest.raises(EdgeLLMError, match=r"no C\+\+ compiler") as caught:
        library.library_path()
    assert "apt install g++" in str(caught.value.hint)


def test_failed_compilation_leaves_no_files(fresh, monkeypatch):
    broken = fresh / "broken"
    broken.write_text("#!/bin/sh\necho 'unknown option -mavxvnni' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(EdgeLLMError, match="cannot compile the kernels: unknown option"):
        library.library_path()
    assert not [path for path in fresh.rglob("*") if path.is_file() and path != broken]


def test_a_compiler_writes_beside_the_library_and_a_full_disk_is_named(fresh, monkeypatch):
    """Its own files are large, and /tmp may be small, full or read-only."""
    full, seen = fresh / "full", fresh / "seen"
    said = f"echo $TMPDIR >>{seen}; echo 'x.s: No space left on device' >&2"
    full.write_text(f"#!/bin/sh\n{said}\nexit 1\n")
    full.chmod(0o755)
    monkeypatch.setenv("CXX", str(full))
    monkeypatch.setenv("TMPDIR", "/tmp")
    with pytest.raises(EdgeLLMError, match="No space left on device") as caught:
        library.library_path()
    assert "XDG_CACHE_HOME" in str(caught.value.hint)
    folders = set(seen.read_text().splitlines()[-2:])  # the first calls ask for its version
    assert all(Path(each).is_relative_to(fresh / "edgellm/kernels") for each in folders)


def test_a_cache_that_cannot_be_written_has_a_remedy(fresh):
    (fresh / "edgellm").write_text("a file where a folder belongs")
    with pytest.raises(EdgeLLMError, match="cannot be written") as caught:
        library.library_path()
    assert "XDG_CACHE_HOME" in str(caught.value.hint)


def test_a_wheel_carries_the_kernels(tmp_path, monkeypatch):
    builders = pytest.importorskip("hatchling.builders.wheel")
    root = Path(__file__).parents[3]
    for name, is_pure in (("with", False), ("without", True)):
        monkeypatch.setenv("EDGELLM_KERNELS", str(int(not is_pure)))
        builder = builders.WheelBuilder(str(root))
        wheel = Path(next(builder.build(directory=str(tmp_path / name), versions=["standard"])))
        assert wheel.name.endswith("-none-any.whl") == is_pure
        names = zipfile.ZipFile(wheel).namelist()
        folder = "edgellm/device_runtime/kernels"
        assert (f"{folder}/prebuilt/{compiling.LIBRARY}" in names) != is_pure
        ort_headers = f"{folder}/src/third_party/onnxruntime"
        assert {
            f"{folder}/src/kernels.h",
            f"{ort_headers}/onnxruntime_c_api.h",
            f"{ort_headers}/LICENSE",
        } <= set(names)


def test_an_editable_install_needs_the_link_that_git_may_have_written_as_a_file(tmp_path):
    """With core.symlinks=false; `import edgellm` failed after an install without an error."""
    pytest.importorskip("hatchling")
    from edgellm.device_runtime.kernels.hatch_hook import KernelHook

    link = tmp_path / ".src/edgellm"
    link.parent.mkdir()
    link.write_text("..")
    given: list[Any] = [str(tmp_path), {}, None, None, str(tmp_path), "wheel"]
    with pytest.raises(NotADirectoryError, match="ln -sfn"):
        KernelHook(*given).initialize("editable", {})
    link.unlink()
    link.symlink_to("..")
    KernelHook(*given).initialize("editable", {})


CROSS, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
needs_emulator = pytest.mark.skipif(
    CROSS is None or EMULATOR is None, reason="needs g++-aarch64-linux-gnu and qemu-user-static"
)
LOADER = """
#include <cstdio>
#include <dlfcn.h>
int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (library == nullptr) return std::fprintf(stderr, "%s", dlerror()), 1;
  auto name = reinterpret_cast<const char* (*)(int)>(dlsym(library, "edgellm_instruction_set"));
  for (int at = 0; name(at) != nullptr; ++at) std::puts(name(at));
}
"""


@pytest.mark.nightly
@needs_emulator
def test_a_cross_compiler_makes_a_wheel_that_loads_on_arm(tmp_path, monkeypatch):
    builders = pytest.importorskip("hatchling.builders.wheel")
    monkeypatch.setenv("CXX", str(CROSS))
    builder = builders.WheelBuilder(str(Path(__file__).parents[3]))
    wheel = Path(next(builder.build(directory=str(tmp_path), versions=["standard"])))
    assert wheel.name.endswith("-py3-none-linux_aarch64.whl")
    kernels = f"edgellm/device_runtime/kernels/prebuilt/{compiling.LIBRARY}"
    made = zipfile.ZipFile(wheel).extract(kernels, tmp_path)
    (tmp_path / "loader.cpp").write_text(LOADER)
    loader = tmp_path / "loader"
    subprocess.run([str(CROSS), tmp_path / "loader.cpp", "-o", loader], check=True)
    emulated = [str(EMULATOR), "-cpu", "max", "-L", "/usr/aarch64-linux-gnu", loader, made]
    result = subprocess.run(emulated, capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["neon_i8mm", "neon_dotprod", "scalar"], result.stderr


@pytest.mark.parametrize(
    ("triple", "machine", "expected"),
    [
        ("aarch64-linux-gnu", "x86_64", "aarch64"),
        ("x86_64-pc-linux-gnu", "x86_64", "x86_64"),
        ("arm64-apple-darwin23", "arm64", "arm64"),  # a processor's name on its own system
        ("arm-linux-gnueabihf", "aarch64", "aarch64"),
        ("", "x86_64", "x86_64"),
    ],
)
def test_a_compiler_names_its_processor(tmp_path, monkeypatch, triple, machine, expected):
    compiler = tmp_path / "g++"
    compiler.write_text(f"#!/bin/sh\necho {triple}\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert compiling.machine_of(str(compiler)) == expected


@pytest.mark.nightly
def test_a_source_distribution_has_the_headers(tmp_path):
    builders = pytest.importorskip("hatchling.builders.sdist")
    builder = builders.SdistBuilder(str(Path(__file__).parents[3]))
    path = next(builder.build(directory=str(tmp_path), versions=["standard"]))
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = Path("device_runtime/kernels/src")
    headers = "ort_api.h", "third_party/onnxruntime/onnxruntime_c_api.h"
    assert {(sources / header).as_posix() for header in headers} <= names


def self_test(name, cxx, machine, flags, run):
    """Compile the kernels and their self-test, once for these sources, and run them."""
    texts = [path.read_text("utf-8") for path in (SELF_TEST, TILES)]
    digest = compiling.fingerprint(cxx, machine, (*flags, *texts))
    program = CACHE / f"{digest}-{name}" / "self_test"
    if not program.exists():
        compiling.compile_program(program, cxx, SELF_TEST, machine=machine, flags=flags)
    return subprocess.run([*run, program], capture_output=True, text=True, check=False)


@needs_emulator
def test_neon_has_the_bits_of_the_reference():
    result = self_test("neon", str(CROSS), "aarch64", ("-static",), [str(EMULATOR), "-cpu", "max"])
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines() == [
        "neon_i8mm: 0 faults", "neon_dotprod: 0 faults", "scalar: 0 faults",
    ]  # fmt: skip


@pytest.mark.skipif(
    "avx512_vnni" not in library.instruction_sets() or "amx" in library.instruction_sets(),
    reason="a processor with AMX runs every test of products on it; the model needs AVX-512",
)
def test_tiles_have_the_bits_of_the_reference():
    cxx = compiling.compiler()
    assert cxx is not None
    result = self_test("tiles", cxx, platform.machine(), ("-O1", "-include", str(TILES)), [])
    assert result.returncode == 0, result.stdout + result.stderr
    assert "amx: 0 faults" in result.stdout.splitlines()


@pytest.mark.skipif("EDGELLM_SANITIZE" not in os.environ, reason="once in CI: compiles a minute")
def test_sanitizers_find_nothing():
    cxx = compiling.compiler()
    # -O0 compiles in a third of the time of -O1, and optimizes no fault away.
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-O0")
    assert cxx is not None
    result = self_test("sanitized", cxx, platform.machine(), flags, [])
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(result.stdout.splitlines()) == len(library.instruction_sets())
