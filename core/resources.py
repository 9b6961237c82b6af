"""Memory and disk space of this machine, a user's folders, and errors for full disks.

A container's limit counts as the machine's memory (cgroups v1 and v2, Linux). Standard library and
`edgellm.core.errors` only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
    LimitError,
)

NO_TEMPORARY = "no folder for temporary files can be written"
_ROOT = Path("/")
# Files of a memory cgroup, version 1 and 2: its limits, what it uses, and pages of files within
# that, which the kernel drops when memory is scarce.
_LIMITS = {"cgroup": ("memory.limit_in_bytes",), "cgroup2": ("memory.max", "memory.high")}
_USED = {"cgroup": "memory.usage_in_bytes", "cgroup2": "memory.current"}
_DROPPABLE = {
    "cgroup": ("total_inactive_file", "total_active_file"),
    "cgroup2": ("inactive_file", "active_file"),
}


def trim() -> None:
    """Return malloc's free memory to the system (glibc only)."""
    if (function := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        function(0)


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


# ---------------------------------------------------------------------------- a user's folders
def user_folder(variable: str, *parts: str) -> Path:
    """The folder that a variable names, else `parts` of the home folder.

    A user without a home, such as a container's unknown user id, gets `private_folder`.
    """
    if given := os.environ.get(variable):
        return Path(given)
    try:
        return Path.home().joinpath(*parts)
    except RuntimeError:  # neither HOME nor an entry of passwd
        return private_folder().joinpath(*parts)


def private_folder() -> Path:
    """A folder among the temporary files, which no other user can read or write.

    Raises:
        EdgeLLMError: its name is taken by another user, or no temporary file can be written.
    """
    hint = "set HOME to a folder that can be written"
    try:
        folder = Path(tempfile.gettempdir(), f"edgellm-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        fault = NO_TEMPORARY if is_no_temporary(error) else error
        raise EdgeLLMError(f"there is no folder for caches: {fault}", hint=hint) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise EdgeLLMError(f"{folder} is open to other users, so it holds no caches", hint=hint)
    return folder


def is_no_temporary(error: OSError) -> bool:
    """Whether the module tempfile found no folder; its error lists all that it tried."""
    return error.errno == errno.ENOENT and "temporary directory" in str(error.strerror)


def can_write(folder: Path) -> bool:
    """Whether files can be written into a folder, which may not exist yet."""
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


@contextlib.contextmanager
def utf8_path(path: Path) -> Iterator[str]:
    """A path for libraries that take file names as UTF-8, while the block runs.

    A folder whose name is not UTF-8, by itself or by this process's locale, is opened, and the path
    goes through its descriptor (Linux). The file's own name is ASCII.
    """
    if str(path).encode("utf-8", "replace") == os.fsencode(path):
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


# ---------------------------------------------------------------------------- disk space
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HINT = "free some space, or give a folder on another disk"


class NoSpaceError(OSError):
    """The disk has too little free space for the work."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        super().__init__(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        self.num_bytes = num_bytes  # required


def require_space(folder: Path, num_bytes: int) -> None:
    """Check that a folder's disk has `num_bytes` free, before any work.

    Raises:
        NoSpaceError: it has not; `explain_full_disk` reports it like a disk that is full already.
    """
    if num_bytes > shutil.disk_usage(folder).free:
        raise NoSpaceError(folder, num_bytes)


def require_room(path: Path, num_bytes: int) -> None:
    """Find out after a failed write whether a file can have a size; the file grows to it.

    Raises:
        OSError: no; the system's own reason: a full disk, a quota, a limit of a file's size.
    """
    if not hasattr(os, "posix_fallocate"):
        require_space(path.parent, num_bytes - (path.stat().st_size if path.exists() else 0))
    elif num_bytes:
        with path.open("ab") as stream:
            try:
                os.posix_fallocate(stream.fileno(), 0, num_bytes)
            except OSError as error:
                if error.errno in _FULL:  # else the file system has no such call
                    raise OSError(error.errno, os.strerror(error.errno), str(path)) from None


@contextlib.contextmanager
def explain_full_disk(
    folder: Path, *, num_bytes: int = 0, shown: Path | None = None, hint: str = _HINT
) -> Iterator[None]:
    """Report folder and required bytes if the block fills the disk.

    Args:
        folder: where the block writes.
        num_bytes: size in all; 0: unknown, then the size of the written files counts.
        shown: the folder that the user knows, where it is another one.
        hint: for the error.

    Raises:
        LimitError: the disk is full.
    """
    try:
        yield
    except Exception as error:
        if os_error(error) not in _FULL:
            raise
        if os_error(error) == errno.EFBIG:
            raise LimitError(
                f"{os.strerror(errno.EFBIG)} in {shown or folder}: the file system or a limit of "
                "the shell (ulimit -f) allows no file of this size",
                hint="give a folder on another file system; FAT32 holds files below 4 GB",
            ) from None
        # Before the folder is emptied: its files count as free.
        free = shutil.disk_usage(folder).free
        known = error.num_bytes if isinstance(error, NoSpaceError) else num_bytes
        needed = known or f"more than {_used_bytes(folder) + free}"
        raise LimitError(
            f"{os.strerror(os_error(error))} in {shown or folder}: "
            f"{needed} bytes are needed, {free} are free",
            hint=hint,
        ) from None


def os_error(error: BaseException) -> int:
    """Error number of the system call that failed, 0 of any other error; Rust's have it as text."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else 0


def require_regular_files(folder: Path) -> None:
    """Find out before files are opened whether one is a pipe or a device, which may have no end.

    Raises:
        BrokenArtifactError: one is; directories and dangling links are accepted.
    """
    for path in folder.iterdir():
        if path.exists() and not path.is_file() and not path.is_dir():
            raise BrokenArtifactError(
                f"{path} is not a regular file", hint="put the file itself in its place"
            )


def forget(path: Path) -> None:
    """Drop a file from the page cache, so that the next reader can get large pages.

    The page cache otherwise keeps written data in pages as small as the writes were.
    """
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _used_bytes(folder: Path) -> int:
    used = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                used += os.lstat(os.path.join(place, name)).st_blocks * 512
    return used
