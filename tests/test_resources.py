"""Limits of containers count as the machine's memory: cgroups of version 1 and 2."""

from __future__ import annotations

import errno
import functools
import os
import pwd
import stat
import tempfile
from pathlib import Path

import pytest

from edgellm.build import resource_estimate
from edgellm.core import resources
from edgellm.core.artifact import cache_folder
from edgellm.core.errors import EdgeLLMError, LimitError
from edgellm.core.model_spec import KVCacheSpec, PageSpec
from edgellm.device_runtime.kernels import library
from edgellm.device_runtime.runners.onnxruntime_cpu.block_kv_cache import BlockPool
from edgellm.device_runtime.runners.tensorrt.cuda import driver
from edgellm.quantize.models import checks as quantize_checks
from edgellm.tools.bench import machine as bench_machine
from edgellm.tools.doctor import checks as doctor_checks
from edgellm.tools.doctor.machine import Machine
from edgellm.tools.store.store import home

GB = 1 << 30
KINDS = {
    1: ("cgroup", "rw,memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("cgroup2", "rw", "memory.max", "memory.current", ""),
}
NO_LIMIT = {1: str((1 << 63) - 4096), 2: "max"}


class Container:
    """A process in cgroup `group`, whose hierarchy is mounted from `root` on."""

    def __init__(self, folder: Path, version: int, group: str, root: str = "/") -> None:
        self.kind, options, *self._names = KINDS[version]
        self._point = folder / "sys fs"
        proc = folder / "proc"
        (proc / "self").mkdir(parents=True)
        place = "/sys\\040fs"
        lines = [
            "31 23 0:28 / /proc rw - proc proc rw",
            f"30 23 0:27 / {place}/cpu rw - cgroup cgroup rw,cpu",
            f"35 31 0:32 {root} {place} rw,relatime shared:9 - {self.kind} cgroup {options}",
        ]
        (proc / "self/mountinfo").write_text("\n".join(lines) + "\n")
        member = f"4:memory:{group}\n0::/\n" if version == 1 else f"1:name=systemd:/x\n0::{group}\n"
        (proc / "self/cgroup").write_text(member)
        sizes = f"MemTotal: {24 * GB >> 10} kB\nMemAvailable: {20 * GB >> 10} kB\n"
        (proc / "meminfo").write_text(sizes)

    def limit(self, place: str, limit: str, used: int = 0, file: int = 0) -> Path:
        """`file`: file cache within `used`; half of it is active."""
        folder = self._point / place
        folder.mkdir(parents=True, exist_ok=True)
        name, current, prefix = self._names
        (folder / name).write_text(f"{limit}\n")
        (folder / current).write_text(f"{used}\n")
        kinds = [f"{prefix}{each}_file {file // 2}" for each in ("active", "inactive")]
        (folder / "memory.stat").write_text("\n".join(["anon 1", *kinds]) + "\n")
        return folder


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Make a container; this process is then in it."""
    whole = resources.system_memory
    within = functools.partial(whole, tmp_path)
    monkeypatch.setattr(resources, "system_memory", within)
    monkeypatch.setattr(quantize_checks, "system_memory", within)
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 5 << 20}
    monkeypatch.setattr(resources.os, "sysconf", sizes.get)
    return lambda *arguments: Container(tmp_path, *arguments)


def memory() -> tuple[float, float]:
    physical = resources.physical_memory_bytes()
    return physical / GB, resources.available_memory_bytes() / GB


@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_is_all_there_is(make, version):
    make(version, "/pod/box").limit("pod/box", str(8 * GB), used=3 * GB)
    assert memory() == (8, 5)


@pytest.mark.parametrize("version", [1, 2])
def test_pages_of_files_are_free(make, version):
    make(version, "/box").limit("box", str(8 * GB), used=7 * GB, file=6 * GB)
    assert memory() == (8, 7)


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_limit_above_counts(make, version):
    """Separately for free and total memory: parents are shared."""
    container = make(version, "/slice/pod/box")
    container.limit("slice/pod/box", NO_LIMIT[version], used=GB)
    container.limit("slice/pod", str(10 * GB), used=2 * GB)
    container.limit("slice", str(12 * GB), used=11 * GB)
    container.limit("", NO_LIMIT[version], used=15 * GB)
    assert memory() == (10, 1)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("group", "root"), [("/", "/"), ("/docker/abc", "/docker/abc"), ("/../elsewhere", "/")]
)
def test_the_mount_of_a_container_is_its_own_group(make, version, group, root):
    """With a namespace of cgroups, without one, and a group that is not mounted."""
    make(version, group, root).limit("", str(4 * GB), used=GB)
    assert memory() == (4, 3)


@pytest.mark.parametrize("version", [1, 2])
def test_no_limit_leaves_the_machine(make, version):
    make(version, "/box").limit("box", NO_LIMIT[version], used=GB)
    assert memory() == (24, 20)


def test_a_limit_that_slows_counts_too(make):
    """Above memory.high a process waits until its pages are reclaimed."""
    folder = make(2, "/box").limit("box", str(8 * GB), used=GB)
    (folder / "memory.high").write_text(f"{6 * GB}\n")
    assert memory() == (6, 5)


def test_more_than_the_limit_is_none_free(make):
    make(2, "/box").limit("box", str(2 * GB), used=3 * GB)
    assert memory() == (2, 0)


@pytest.mark.parametrize("missing", ["proc/self/cgroup", "proc/self/mountinfo", "sys fs"])
def test_a_system_without_cgroups(make, tmp_path, missing):
    """A file of /proc, or /sys itself, is not mounted: no limit is seen, and none is invented."""
    make(2, "/box").limit("box", str(8 * GB), used=GB)
    (tmp_path / missing).rename(tmp_path / "elsewhere")
    assert memory() == (24, 20)


def test_a_system_without_meminfo(make, tmp_path):
    """Other systems than Linux: the physical size."""
    make(2, "/box")
    (tmp_path / "proc/meminfo").unlink()
    assert memory() == (20, 20)
    assert quantize_checks.available_bytes() is None


def test_all_readers_see_the_limit(make, tmp_path):
    """All reports and checks of the machine's memory use the limit of the container."""
    make(1, "/box").limit("box", str(8 * GB), used=5 * GB)
    (found,) = doctor_checks._memory(Machine(tmp_path))
    assert found.found == "3.2 of 8.6 GB are free"
    assert bench_machine.facts()["memory"] == "8.6 GB"
    assert quantize_checks.available_bytes() == 3 * GB
    with pytest.raises(LimitError, match=r"3\.2 GB are free"):
        quantize_checks.check_memory(4 * GB, quantize_checks.available_bytes())
    assert resource_estimate.available_memory_bytes() == driver.available_memory_bytes() == 3 * GB
    assert "this machine has 8.6 GB" in resource_estimate._room_for_cache(9 * GB).found


def test_an_engine_of_a_larger_machine_does_not_open(make):
    """The system would end the process in the middle of a long prompt."""
    make(2, "/box").limit("box", str(GB))
    pages = PageSpec(rows=64, windows=(0, 0))
    kv = KVCacheSpec(num_layers=2, num_kv_heads=8, head_dim=64, dtype="float16", pages=pages)
    missing = r"a full KV cache takes 1\.34 GB .* has 1\.07 GB: 0\.27 GB are missing"
    with pytest.raises(LimitError, match=missing):
        BlockPool(kv, 10 << 15)
    BlockPool(kv, 7 << 15)


def test_a_doctor_of_a_small_container(make, tmp_path):
    """A machine with 20 GB free, of which the container takes almost none."""
    make(2, "/pod/box").limit("pod", str(2 * GB), used=2 * GB - 1)
    (found,) = doctor_checks._memory(Machine(tmp_path))
    assert (found.status, found.found) == (doctor_checks.FAULT, "0.0 of 2.1 GB are free")


@pytest.fixture
def no_home(monkeypatch, tmp_path):
    """A user id without HOME and without an entry of passwd, as containers give."""

    def unknown(_number):
        raise KeyError("getpwuid(): uid not found")

    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "EDGELLM_CACHE", "EDGELLM_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"edgellm-{os.getuid()}"


def test_a_user_without_a_home_has_private_folders(no_home, monkeypatch):
    assert cache_folder() == no_home / ".cache/edgellm"
    assert home() == no_home / ".local/share/edgellm"
    assert stat.S_IMODE(no_home.stat().st_mode) == 0o700
    monkeypatch.setenv("EDGELLM_CACHE", "/given")
    monkeypatch.setenv("EDGELLM_HOME", "/given too")
    assert (cache_folder(), home()) == (Path("/given"), Path("/given too"))


@pytest.mark.parametrize("taken", ["open", "link"])
def test_a_folder_that_others_can_write_holds_no_caches(no_home, tmp_path, taken):
    """It would hold kernels, which are loaded into the process."""
    if taken == "open":
        no_home.mkdir()
        no_home.chmod(0o777)
    else:
        no_home.symlink_to(tmp_path)
    with pytest.raises(EdgeLLMError, match="open to other users") as caught:
        resources.private_folder()
    assert "set HOME" in caught.value.hint


def test_kernels_go_to_a_private_folder_if_the_home_cannot_be_written(no_home, monkeypatch):
    asked = []

    def refuse(_cxx, cache):
        asked.append(cache)
        if len(asked) == 1:
            raise OSError(errno.EROFS, "Read-only file system", "/")
        return cache / "kernels.so"

    monkeypatch.setenv("HOME", "/read-only")
    monkeypatch.setattr(library, "cached_library", refuse)
    assert library._cached("g++") == no_home / ".cache/kernels.so"
    assert asked == [Path("/read-only/.cache"), no_home / ".cache"]
    monkeypatch.setenv("XDG_CACHE_HOME", "/given")
    asked.clear()
    with pytest.raises(OSError, match="Read-only"):
        library._cached("g++")
