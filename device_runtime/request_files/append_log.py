"""Append-only log of lines, which stays intact after interrupts, kills and full disks."""

from __future__ import annotations

import os
import time
from pathlib import Path

from edgellm.core.resources import explain_full_disk


class Journal:
    """A log file, open for appending."""

    def __init__(self, path: Path, *, sync_every_s: float = 0.0) -> None:
        """Open the log, and truncate an incomplete last line.

        Args:
            path: created if missing.
            sync_every_s: maximum seconds of work that a power cut loses. A killed process loses no
                line. 0 syncs to disk at every line, which costs milliseconds.
        """
        self._path, self._sync_every_s = path, sync_every_s
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.ftruncate(self._file, whole)
        self.content = content[:whole]  # what was there
        self._synced_s = time.monotonic()

    def append(self, line: bytes) -> None:
        """Append a line, without its newline; atomic.

        Raises:
            LimitError: the disk is full.
        """
        left = memoryview(line + b"\n")
        size = os.fstat(self._file).st_size
        with explain_full_disk(
            self._path.absolute().parent,
            num_bytes=len(left),
            hint="free some space and run again: the file is intact",
        ):
            try:
                while left:
                    left = left[os.write(self._file, left) :]
                self._sync()
            except BaseException as error:
                if left or isinstance(error, OSError):  # an interrupt takes no whole line
                    os.ftruncate(self._file, size)
                raise

    def _sync(self) -> None:
        now = time.monotonic()
        if now - self._synced_s >= self._sync_every_s:
            os.fsync(self._file)
            self._synced_s = now

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
