"""Memory of this machine; a container's limit counts as the machine's (cgroups v1 and v2, Linux).

Standard library only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
# Files of a memory cgroup, version 1 and 2: its limits, what it uses, and pages of files within
# that, which the kernel drops when memory is scarce.
_LIMITS = {"cgroup": ("memory.limit_in_bytes",), "cgroup2": ("memory.max", "memory.high")}
_USED = {"cgroup": "memory.usage_in_bytes", "cgroup2": "memory.current"}
_DROPPABLE = {
    "cgroup": ("total_inactive_file", "total_active_file"),
    "cgroup2": ("inactive_file", "active_file"),
}


@dataclass(frozen=True, slots=True)
class SystemMemory:
    """Bytes of memory, of the machine or of the container that this process runs in."""

    total_bytes: int
    available_bytes: int  # without swapping


def system_memory(root: Path = _ROOT) -> SystemMemory | None:
    """Total and available memory; None where the system has no /proc/meminfo (not Linux).

    Args:
        root: of the file system; tests give another one.
    """
    text = _text(root / "proc/meminfo")
    sizes = {name: int(kb) * 1024 for name, kb in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
    if "MemTotal" not in sizes or "MemAvailable" not in sizes:
        return None
    limits = [*_container_limits(root)]
    return SystemMemory(
        min([sizes["MemTotal"], *(each.total_bytes for each in limits)]),
        min([sizes["MemAvailable"], *(each.available_bytes for each in limits)]),
    )


def available_memory_bytes() -> int:
    """Memory that can be used without swapping (Linux); the physical size elsewhere."""
    found = system_memory()
    return found.available_bytes if found is not None else physical_memory_bytes()


def physical_memory_bytes() -> int:
    """All memory of the machine, or of the container that this process runs in."""
    if (found := system_memory()) is not None:
        return found.total_bytes
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _container_limits(root: Path) -> Iterator[SystemMemory]:
    """The limits that this process is under: those of its cgroup and of all above it."""
    groups = _text(root / "proc/self/cgroup").splitlines()
    for mount in _text(root / "proc/self/mountinfo").splitlines():
        fields, _, source = mount.partition(" - ")
        kind, _, options = source.split(" ", 2)
        if kind not in _LIMITS or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        mounted, point = (_unescaped(each) for each in fields.split()[3:5])
        place = root / point.lstrip("/")
        for folder in _folders(place, mounted, _group(groups, kind)):
            yield from _limits(folder, kind)


def _group(groups: list[str], kind: str) -> str:
    """The path of this process in the hierarchy that memory belongs to."""
    for line in groups:
        number, controllers, path = line.split(":", 2)
        is_meant = number == "0" if kind == "cgroup2" else "memory" in controllers.split(",")
        if is_meant:
            return path
    return "/"


def _folders(point: Path, mounted: str, group: str) -> Iterator[Path]:
    """From the folder of a cgroup up to where its hierarchy is mounted.

    `mounted`: the cgroup that is mounted. A group outside of it is hidden: only the mount counts.
    """
    inside = os.path.relpath(group, mounted)
    parts = () if inside.startswith("..") else Path(inside).parts
    for count in range(len(parts), -1, -1):
        yield point.joinpath(*parts[:count])


def _limits(folder: Path, kind: str) -> Iterator[SystemMemory]:
    """None of the root, which has no such files, and none where a limit is "max"."""
    stat = dict(re.findall(r"^(\w+) (\d+)$", _text(folder / "memory.stat"), re.MULTILINE))
    droppable = sum(int(stat.get(name, 0)) for name in _DROPPABLE[kind])
    used = _text(folder / _USED[kind]).strip()
    for name in _LIMITS[kind]:
        limit = _text(folder / name).strip()
        if limit.isdecimal() and used.isdecimal():
            held = max(0, int(used) - droppable)
            yield SystemMemory(int(limit), max(0, int(limit) - held))


def _text(path: Path) -> str:
    """A file of the system's; nothing where there is none."""
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _unescaped(path: str) -> str:
    """A path of mountinfo, where spaces and their like are octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)
