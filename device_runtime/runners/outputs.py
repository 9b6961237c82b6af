"""Outputs of a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from numpy.typing import NDArray

# Outputs of one pass by graph I/O name, in host memory, floats as float32. Arrays are fetched when
# first read, which must be before the runner's next pass.
Outputs = Mapping[str, NDArray[Any]]


class FetchedOutputs(Mapping[str, NDArray[Any]]):
    """See `Outputs`; reading after the next pass raises `ValueError`."""

    __slots__ = ("_fetch", "_fetched", "_is_latest", "_names")

    def __init__(self, names: Collection[str], fetch: Callable[[str], NDArray[Any]]) -> None:
        self._names, self._fetch = names, fetch
        self._fetched: dict[str, NDArray[Any]] = {}
        self._is_latest = True

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._fetched:
            self.require_latest(name)
            self._fetched[name] = self._fetch(name)
        return self._fetched[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def require_latest(self, name: str) -> None:
        """Raise `ValueError` if the next pass has overwritten the memory of `name`."""
        if not self._is_latest:
            raise ValueError(f"{name} of a pass is read after the next one")

    def expire(self) -> None:
        """Mark the outputs as overwritten by the next pass."""
        self._is_latest = False
