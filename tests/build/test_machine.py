"""Limits of containers count as the machine's memory: cgroups of version 1 and 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm.build import machine

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
        (folder / "self").mkdir()
        place = str(self._point).replace(" ", "\\040")
        lines = [
            "31 23 0:28 / /proc rw - proc proc rw",
            f"30 23 0:27 / {place}/cpu rw - cgroup cgroup rw,cpu",
            f"35 31 0:32 {root} {place} rw,relatime shared:9 - {self.kind} cgroup {options}",
        ]
        (folder / "self/mountinfo").write_text("\n".join(lines) + "\n")
        member = f"4:memory:{group}\n0::/\n" if version == 1 else f"1:name=systemd:/x\n0::{group}\n"
        (folder / "self/cgroup").write_text(member)
        (folder / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {20 * GB >> 10} kB\n")

    def limit(self, place: str, limit: str, used: int = 0, file: int = 0) -> Path:
        """`file`: pages of files within `used`, half of which were read lately."""
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
    monkeypatch.setattr(machine, "_PROC", tmp_path)
    monkeypatch.setattr(machine.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 6 << 20}.get)
    return lambda *arguments: Container(tmp_path, *arguments)


def memory() -> tuple[float, float]:
    return machine.physical_memory_bytes() / GB, machine.available_memory_bytes() / GB


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
    """One for what is free, one for what there is: parents are shared."""
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
    """Above memory.high a process waits until its pages were taken."""
    folder = make(2, "/box").limit("box", str(8 * GB), used=GB)
    (folder / "memory.high").write_text(f"{6 * GB}\n")
    assert memory() == (6, 5)


def test_more_than_the_limit_is_none_free(make):
    make(2, "/box").limit("box", str(2 * GB), used=3 * GB)
    assert memory() == (2, 0)


def test_a_system_without_cgroups(make, tmp_path):
    make(2, "/box")
    for name in ("self/cgroup", "self/mountinfo", "meminfo"):
        (tmp_path / name).unlink()
    assert memory() == (24, 24)
