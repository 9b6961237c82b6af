"""File locks, and temporary folders that are locked by the run that writes them.

A lock ends with its process, so leftovers of a killed run differ from the folder of a live one.
Standard library and `edgellm.core.errors` only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from edgellm.core.errors import EdgeLLMError

_LOCK, _FILES = "lock", "files"
_PARTIAL = ".partial-"  # in names of unfinished folders
_MARK = b"a run of edgellm\n"  # in locks, which foreign files lack


@contextlib.contextmanager
def hold(path: Path, fault: str, hint: str) -> Iterator[None]:
    """Lock a file while the block runs; a missing file is created.

    Raises:
        EdgeLLMError: another process holds it (message `fault`, with `hint`), or it cannot be
            opened.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise EdgeLLMError(f"cannot write {path}: {error.strerror}") from None
    try:
        if _lock(descriptor) is False:
            raise EdgeLLMError(fault, hint=hint)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def wait(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Lock a file while the block runs, after the process that holds it; creates a missing file.

    `on_wait`: called once, before a wait.

    Raises:
        EdgeLLMError: the file cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise EdgeLLMError(f"cannot write {path}: {error.strerror}") from None
    try:
        if _lock(descriptor) is False:
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A folder of unfinished work, marked by a lock."""

    folder: Path
    lock: int | None  # descriptor; None where the file system has no locks
    made: tuple[Path, ...] = ()  # created parents, innermost first; empty ones are removed

    @property
    def files(self) -> Path:
        """The folder of its files."""
        return self.folder / _FILES

    def remove(self) -> None:
        """Remove the folder, after the work is finished or abandoned."""
        _remove(self.folder)
        if self.lock is not None:
            os.close(self.lock)
        with contextlib.suppress(OSError):
            for folder in self.made:
                folder.rmdir()


def begin(output: Path) -> Unfinished:
    """Create a folder of unfinished work on the file system of `output`; remove dead ones.

    Raises:
        EdgeLLMError: another run writes `output`, or its parent cannot be written.
    """
    home = _home(output.absolute())
    prefix = f".{output.absolute().name}{_PARTIAL}"
    made = tuple(itertools.takewhile(lambda each: not each.exists(), (home, *home.parents)))
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _alone(home):
            _sweep(home, prefix, output)
            return dataclasses.replace(_make(home, prefix), made=made)
    except OSError as error:
        raise EdgeLLMError(
            f"cannot write into {home}: {error.strerror}", hint="give another output folder"
        ) from None


def sweep(home: Path) -> None:
    """Remove what killed runs left in a folder, of all outputs."""
    with _alone(home):
        for folder in home.iterdir():
            _remove_dead(folder)


def _home(output: Path) -> Path:
    """The output's parent, or the output itself if that is a mount point."""
    if output.is_dir() and (
        output.stat().st_dev != output.parent.stat().st_dev or not os.access(output.parent, os.W_OK)
    ):
        return output
    if output.is_dir() and not os.access(output, os.W_OK):
        raise EdgeLLMError(f"cannot write into {output}", hint="give another output folder")
    return output.parent


def _make(home: Path, prefix: str) -> Unfinished:
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=home))
    folder.chmod(0o755)
    (folder / _FILES).mkdir()
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    if _lock(lock):
        os.write(lock, _MARK)
        return Unfinished(folder, lock)
    os.close(lock)
    (folder / _LOCK).unlink()  # a folder without a lock never counts as dead
    return Unfinished(folder, None)


def _sweep(home: Path, prefix: str, output: Path) -> None:
    """Remove what killed runs of an output left; raises if a run is alive."""
    for folder in home.iterdir():
        if folder.name.startswith(prefix) and _remove_dead(folder) is False:
            raise EdgeLLMError(
                f"another run is writing {output}",
                hint="wait for it, or give another output folder",
            )


def _remove_dead(folder: Path) -> bool | None:
    """Remove a folder of a killed run: False if its run is alive, None if it is not edgellm's."""
    if _PARTIAL not in folder.name:
        return None
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        is_free = _lock(lock)
        if is_free and os.read(lock, len(_MARK) + 1) == _MARK:
            _remove(folder)
        return is_free
    finally:
        os.close(lock)


def _remove(folder: Path) -> None:
    """Remove the lock last, so that a later run can finish a killed removal."""
    shutil.rmtree(folder / _FILES, ignore_errors=True)
    with contextlib.suppress(OSError):
        (folder / _LOCK).unlink(missing_ok=True)
        folder.rmdir()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let runs that write into a folder start one at a time."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems lock no folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Whether the lock was free and is ours now; None where the file system has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True
