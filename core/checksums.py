"""Checksums of an engine's files against its manifest, with a cache of earlier checks.

A full check is recorded next to the files, or in the user's cache where their folder cannot be
written, with what the file system says of each. While that stays the same, a file is not read
again. It guards against damage, not against an attacker, who can change the manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from edgellm.core.artifact import cache_folder, hash_file, replace_file, verify_sizes
from edgellm.core.errors import BrokenArtifactError
from edgellm.core.manifest import MANIFEST_NAME, FileRecord

RECORD_NAME = ".checked.json"
_Entry = list[int | str]  # size, times of the last change in ns, inode, sha256


class FileCheck:
    """Checks files in other threads while the block loads them.

    A failed check takes precedence over errors of the block. An interrupted block does not wait.
    """

    def __init__(self, folder: Path, files: dict[str, FileRecord], verify: bool | None) -> None:
        """`verify`: True reads all files, False none, None those that changed since a check."""
        self._folder, self._files, self._verify = folder, files, verify
        self._stop = threading.Event()
        self._entries: dict[str, _Entry] = {}
        self._found: dict[str, Future[FileRecord]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> None:
        """Start; raises `BrokenArtifactError` if a file is missing or has another size."""
        verify_sizes(self._folder, self._files)
        if self._verify is False:
            return
        self._entries = _entries(self._folder, self._files)
        stale = self._files.keys() if self._verify else _stale(self._folder, self._entries)
        if stale:
            self._pool = ThreadPoolExecutor(os.cpu_count(), "sha256")
        for name in stale:
            assert self._pool is not None
            path = self._folder / name
            self._found[name] = self._pool.submit(hash_file, path, self._stop.is_set)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the hashes; raises `BrokenArtifactError` if one differs."""
        if self._pool is None:
            return
        try:
            if kind is None or issubclass(kind, Exception):
                self._require_equal()
                _remember(self._folder, self._entries)
        finally:
            self._stop.set()
            self._pool.shutdown(cancel_futures=True)

    def _require_equal(self) -> None:
        for name, found in self._found.items():
            if found.result().sha256 != self._files[name].sha256:
                raise BrokenArtifactError(
                    f"{self._folder / name} was changed: its sha256 differs from {MANIFEST_NAME}",
                    hint="copy or make the folder again",
                ) from None


def remember(folder: Path, files: dict[str, FileRecord]) -> None:
    """Record that these files, just written, match their manifest."""
    _remember(folder, _entries(folder, files))


def _entries(folder: Path, files: dict[str, FileRecord]) -> dict[str, _Entry]:
    """File system metadata of the files, with their expected hashes."""
    found: dict[str, _Entry] = {}
    for name, record in files.items():
        stat = (folder / name).stat()
        # A copy keeps mtime and perhaps the inode number, never ctime.
        times = stat.st_mtime_ns, stat.st_ctime_ns
        found[name] = [stat.st_size, *times, stat.st_ino, record.sha256]
    return found


def _stale(folder: Path, entries: dict[str, _Entry]) -> list[str]:
    """Files that changed since the last full check."""
    known = [_read(path) for path in _places(folder)]
    return [name for name, entry in entries.items() if all(k.get(name) != entry for k in known)]


def _places(folder: Path) -> tuple[Path, Path]:
    """Paths of the two possible records of a check."""
    name = hashlib.sha256(str(folder.resolve()).encode("utf-8", "surrogateescape")).hexdigest()
    return folder / RECORD_NAME, cache_folder() / "checked" / f"{name[:32]}.json"


def _read(path: Path) -> dict[str, _Entry]:
    try:
        raw = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}


def _remember(folder: Path, entries: dict[str, _Entry]) -> None:
    for path in _places(folder):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps(entries, indent=1) + "\n")
        except OSError:
            continue  # not writable; without any record the next load reads the files again
        return
