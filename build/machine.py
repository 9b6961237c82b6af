"""Resources of this machine: memory, disk, memory bandwidth.

A container's limit counts as the machine's memory: see `container_memory`.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_PROC = Path("/proc")
# Files of a memory cgroup, version 1 and 2: its limits, what it uses, and pages of files within
# that, which go when memory is scarce.
_LIMITS = {"cgroup": ("memory.limit_in_bytes",), "cgroup2": ("memory.max", "memory.high")}
_USED = {"cgroup": "memory.usage_in_bytes", "cgroup2": "memory.current"}
_DROPPABLE = {
    "cgroup": ("total_inactive_file", "total_active_file"),
    "cgroup2": ("inactive_file", "active_file"),
}


def available_memory_bytes() -> int:
    """Memory that can be used without swapping (Linux); the physical size elsewhere."""
    free = [max(0, each.limit_bytes - each.used_bytes) for each in container_memory()]
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text(_PROC / "meminfo"), re.MULTILINE)
    free.append(int(found[1]) * 1024 if found is not None else physical_memory_bytes())
    return min(free)


def physical_memory_bytes() -> int:
    """All memory of the machine, or of the container that this runs in."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(each.limit_bytes for each in container_memory())])


@dataclass(frozen=True, slots=True)
class ContainerMemory:
    """A limit of a memory cgroup, and what counts against it that cannot be dropped."""

    limit_bytes: int
    used_bytes: int


def container_memory() -> Iterator[ContainerMemory]:
    """The limits that this process is under: those of its cgroup and of all above it (Linux)."""
    groups = _text(_PROC / "self/cgroup").splitlines()
    mounts = _text(_PROC / "self/mountinfo").splitlines()
    for mount in mounts:
        fields, _, source = mount.partition(" - ")
        kind, _, options = source.split(" ", 2)
        if kind not in _LIMITS or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        root, point = (_unescaped(each) for each in fields.split()[3:5])
        for folder in _folders(Path(point), root, _group(groups, kind)):
            yield from _limits(folder, kind)


def _group(groups: list[str], kind: str) -> str:
    """The path of this process in the hierarchy that memory belongs to."""
    for line in groups:
        number, controllers, path = line.split(":", 2)
        is_meant = number == "0" if kind == "cgroup2" else "memory" in controllers.split(",")
        if is_meant:
            return path
    return "/"


def _folders(point: Path, root: str, group: str) -> Iterator[Path]:
    """From the folder of a cgroup up to where its hierarchy is mounted.

    `root`: the cgroup that is mounted. A group outside of it is not shown: only the mount counts.
    """
    inside = os.path.relpath(group, root)
    parts = () if inside.startswith("..") else Path(inside).parts
    for count in range(len(parts), -1, -1):
        yield point.joinpath(*parts[:count])


def _limits(folder: Path, kind: str) -> Iterator[ContainerMemory]:
    """None of the root, which has no such files, and none where a limit is "max"."""
    stat = dict(re.findall(r"^(\w+) (\d+)$", _text(folder / "memory.stat"), re.MULTILINE))
    droppable = sum(int(stat.get(name, 0)) for name in _DROPPABLE[kind])
    used = _text(folder / _USED[kind]).strip()
    for name in _LIMITS[kind]:
        limit = _text(folder / name).strip()
        if limit.isdecimal() and used.isdecimal():
            yield ContainerMemory(int(limit), max(0, int(used) - droppable))


def _text(path: Path) -> str:
    """A file of the system's; nothing where there is none."""
    try:
        return path.read_text("utf-8")
    except OSError:
        return ""


def _unescaped(path: str) -> str:
    """A path of mountinfo, where spaces and their like are octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def trim() -> None:
    """Give what malloc keeps for later back to the system, where it is glibc's."""
    if (function := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        function(0)


def free_disk_bytes(folder: Path) -> int:
    """Free space of the file system that will hold `folder`."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def read_bandwidth_bytes_per_s() -> float:
    """Memory read bandwidth of all cores: the best of a few sums over 256 MB."""
    from concurrent.futures import ThreadPoolExecutor

    workers = os.cpu_count() or 1
    block = np.ones((256 << 20) // 8 // workers, np.int64)
    blocks = [block.copy() for _ in range(workers)]
    best = float("inf")
    with ThreadPoolExecutor(workers) as pool:
        for _ in range(5):
            start = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, blocks))
            best = min(best, time.perf_counter() - start)
    return workers * block.nbytes / best
