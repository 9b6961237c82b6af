"""Errors for full disks, with the folder and the bytes.

Standard library and `edgellm.core.errors` only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from edgellm.core.errors import (
    BrokenArtifactError,
    LimitError,
)

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
                if error.errno in _FULL:  # else the file system cannot tell
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
