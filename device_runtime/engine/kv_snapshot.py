"""KV snapshots: prefix cache entries on disk, which a restarted server loads.

A file holds one prefix: a line with the hash of the rest, a JSON line with keys and engine hashes,
and the arrays. Damaged files, and those of other engines, are reported and left alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.core.errors import EdgeLLMError
from edgellm.core.resources import explain_full_disk
from edgellm.device_runtime.prefix_cache.pinned_prefixes import PinnedKV, PinnedPrefix

_MAGIC = b"edgellm context 1 "
_SUFFIX = ".context"


@dataclass(frozen=True, slots=True)
class FoundSnapshot:
    """Snapshots of a folder that match an engine."""

    contexts: list[PinnedPrefix]  # the most recently used is the last
    ignored: list[str]  # file names and reasons, for the user


@dataclass(frozen=True, slots=True)
class SnapshotFolder:
    """The snapshot folder of an engine."""

    folder: Path
    engines: Mapping[str, str]  # see `artifact.hash_engines`

    def prepare(self) -> None:
        """Create the folder; raises `EdgeLLMError` if it is not writable."""
        probe = self.folder / f".{time.time_ns()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise EdgeLLMError(
                f"--slotSavePath {self.folder}: {error.strerror}", hint="give another folder"
            ) from None

    def load(self, num_networks: int) -> FoundSnapshot:
        """All intact snapshots of this engine.

        Args:
            num_networks: that a snapshot must have: the base, and a draft if one is used.
        """
        contexts: list[PinnedPrefix] = []
        ignored: list[str] = []
        for path in sorted(self.folder.glob(f"*{_SUFFIX}"), key=lambda one: one.stat().st_mtime_ns):
            found = self._fitting(path, num_networks)
            if isinstance(found, PinnedPrefix):
                contexts.append(found)
            else:
                ignored.append(f"{path} is ignored: {found}")
        return FoundSnapshot(contexts, ignored)

    def save(self, contexts: Iterable[PinnedPrefix]) -> int:
        """Write snapshots, and delete older ones of this engine that are not among them.

        Returns the number of snapshots.

        Raises:
            LimitError: the disk is full; earlier files are intact.
        """
        names: set[str] = set()
        for context in contexts:
            base, *drafts = context.parts
            rows = [part.values for part in context.parts]
            features = [part.feature for part in drafts]
            head = {
                "engines": dict(self.engines), "keys": context.keys, "least_rows": base.min_length,
                "rows": [*map(_form, rows)], "states": [*map(_form, base.states)],
                "features": [*map(_form, features)],
                "draft_least_rows": [draft.min_length for draft in drafts],
                "skipped_drafts": [draft.is_skipped for draft in drafts],
            }  # fmt: skip
            line = json.dumps(head).encode() + b"\n"
            name = hashlib.sha256(line).hexdigest()[:32] + _SUFFIX
            names.add(name)
            arrays = (*rows, *base.states, *features)
            self._write(name, line, [np.ascontiguousarray(array) for array in arrays])
        for path in self.folder.glob(f"*{_SUFFIX}"):
            if path.name not in names and self._is_own(path):
                path.unlink()
        return len(names)

    def _write(self, name: str, head: bytes, rows: list[np.ndarray[Any, Any]]) -> None:
        digest = hashlib.sha256(head)
        for array in rows:
            digest.update(array.view(np.uint8).data)
        temporary = self.folder / f".{name}.{time.time_ns()}"
        size = sum(array.nbytes for array in rows)
        with explain_full_disk(self.folder, num_bytes=size):
            try:
                with temporary.open("wb") as stream:
                    stream.write(_MAGIC + digest.hexdigest().encode() + b"\n" + head)
                    for array in rows:
                        stream.write(array.view(np.uint8).data)
                temporary.replace(self.folder / name)
            finally:
                temporary.unlink(missing_ok=True)

    def _fitting(self, path: Path, num_networks: int) -> PinnedPrefix | str:
        """A snapshot, or the reason why it is not used."""
        try:
            return self._read(path, num_networks)
        except _UnfitError as error:
            return str(error)

    def _read(self, path: Path, num_networks: int) -> PinnedPrefix:
        head, payload = self._open(path)
        arrays, begin = [], 0
        rows, states = len(head["rows"]), len(head.get("states", ()))
        for one in (*head["rows"], *head.get("states", ()), *head.get("features", ())):
            dtype, shape = np.dtype(one["dtype"]), tuple(one["shape"])
            array = np.frombuffer(payload, dtype, math.prod(shape), begin)
            arrays.append(array.reshape(shape))
            begin += array.nbytes
        if rows != num_networks:
            raise _UnfitError("it was saved with other flags of speculation")
        own = tuple(arrays[rows : rows + states])
        parts = [PinnedKV(values=arrays[0], states=own, min_length=head.get("least_rows", 0))]
        features = arrays[rows + states :] or [np.zeros((0, 0), np.float32)] * (rows - 1)
        least = head.get("draft_least_rows") or [0] * (rows - 1)
        skipped = head.get("skipped_drafts") or [False] * (rows - 1)
        drafts = zip(arrays[1:rows], features, least, skipped, strict=True)
        parts += [
            PinnedKV(values=values, feature=feature, min_length=min_length, is_skipped=is_skipped)
            for values, feature, min_length, is_skipped in drafts
        ]
        return PinnedPrefix(tuple(head["keys"]), tuple(parts))

    def _open(self, path: Path) -> tuple[dict[str, Any], bytes]:
        """Header and arrays; raises `_UnfitError`."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise _UnfitError(str(error.strerror)) from None
        first, _, rest = content.partition(b"\n")
        if not first.startswith(_MAGIC):
            raise _UnfitError("it is not a context")
        if first.removeprefix(_MAGIC) != hashlib.sha256(rest).hexdigest().encode():
            raise _UnfitError("it is damaged")
        line, _, payload = rest.partition(b"\n")
        head = json.loads(line)
        if head["engines"] != dict(self.engines):
            raise _UnfitError("it is of another engine")
        return head, payload

    def _is_own(self, path: Path) -> bool:
        try:
            self._open(path)
        except _UnfitError:
            return False
        return True


def _form(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"dtype": array.dtype.name, "shape": array.shape}


class _UnfitError(Exception):
    """The reason why a file is not used."""
