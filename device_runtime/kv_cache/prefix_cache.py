"""What the rows of a KV cache stand for, so that no prompt computes a row that is there already.

A row depends on its own token, on all before it, and on their positions. So the keys of a cache's
rows, compared with those of a prompt from the beginning, tell how many rows the two have in
common. A row of an image has the image's content for a key: which row it is, and where it and
what follows stand, is told by the rows before.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from edgellm.device_runtime.arrays import (
    LoadedAdapter,
    RowKey,
)

KEPT_BYTES = 256 << 20  # of system prompts' rows


def row_keys(token_ids: Iterable[int], image_keys: Mapping[int, RowKey]) -> list[RowKey]:
    """What tokens stand for: themselves, or the images that `image_keys` says."""
    return [image_keys.get(token_id, token_id) for token_id in token_ids]


def marked(keys: Sequence[RowKey], adapter: LoadedAdapter | None) -> list[RowKey]:
    """The keys of a text from its beginning as those of an adapter: all rows follow the first."""
    if adapter is None or not keys:
        return [*keys]
    return [f"{adapter.mark} {keys[0]}", *keys[1:]]


def count_common(ones: Sequence[RowKey], others: Sequence[RowKey]) -> int:
    """Keys from the beginning that are equal."""
    maximum = min(len(ones), len(others))
    if ones[:maximum] == others[:maximum]:
        return maximum
    pairs = enumerate(zip(ones, others, strict=False))
    return next((at for at, (one, other) in pairs if one != other), maximum)


class SequenceCache(Protocol):
    """A KV cache of several sequences that knows what their rows stand for.

    Rows are read, written and compared of the current one.
    """

    @property
    def context(self) -> Any:
        """The current sequence's."""
        ...

    def new_context(self) -> Any:
        """Of another sequence, without rows."""
        ...

    def use(self, context: Any, /) -> None:
        """Make it the current one."""
        ...

    def fork(self, context: Any, /) -> Any:
        """Another with the same rows, which both may go on from."""
        ...

    def close(self, context: Any, /) -> None:
        """Nobody goes on behind these rows."""
        ...

    def on_shortage(self, forget_one: Callable[[], bool]) -> None:
        """Have somebody asked for room when there is none, who says whether he gave rows back."""
        ...

    def held(self, keys: Sequence[RowKey]) -> int:
        """Rows that are those of a prompt with these keys, if it can go on behind them."""
        ...

    def held_by(self, context: Any, keys: Sequence[RowKey], /) -> int:
        """The same of any sequence, none where a prompt could not go on behind so many."""
        ...

    def read_rows(self, length: int) -> NDArray[Any]:
        """See `runners.Cache`."""
        ...

    @property
    def least_rows(self) -> int:
        """The fewest rows that a prompt can go on behind, but for none.

        Behind fewer than these windows see rows that were given back.
        """
        ...

    def write_rows(self, rows: NDArray[Any], keys: Sequence[RowKey], least_rows: int = 0) -> None:
        """Make `rows`, which `read_rows` gave, the only ones.

        Args:
            rows: the first ones of what was read.
            keys: of a prompt that begins so.
            least_rows: of the cache when it was read.
        """
        ...


@runtime_checkable
class StatefulCache(SequenceCache, Protocol):
    """That of a base, whose recurrent layers may have states besides."""

    def read_states(self, length: int) -> tuple[NDArray[Any], ...]:
        """Copies of those behind the first `length` rows; () where no layer has any."""
        ...

    def write_states(self, states: tuple[NDArray[Any], ...], length: int) -> None:
        """Those that `read_states` gave, behind as many rows, which are written."""
        ...


@runtime_checkable
class DraftCache(SequenceCache, Protocol):
    """That of a draft, whose newest row may wait for the token behind, as a feature of the base."""

    def read_feature(self, length: int) -> NDArray[Any]:
        """That of the last of `length` rows, [1, T*H] if `read_rows` left it out, else [0, T*H]."""
        ...

    def write_feature(self, feature: NDArray[Any], key: RowKey) -> None:
        """What `read_feature` gave, behind all rows; `key` of the token that it leads to."""
        ...


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """The rows of the beginning of a prompt."""

    keys: tuple[RowKey, ...]  # and that of the token behind them
    rows: tuple[NDArray[Any], ...]  # of the base, and of the draft if there is one
    states: tuple[NDArray[Any], ...] = ()  # of recurrent layers, behind all rows of the base
    least_rows: int = 0  # fewer of them cannot be gone on from
    features: tuple[NDArray[Any], ...] = ()  # of drafts, each of no row or one behind its rows

    @property
    def num_bytes(self) -> int:
        """Of all rows."""
        return sum(array.nbytes for array in (*self.rows, *self.states, *self.features))

    @property
    def length(self) -> int:
        """Rows that all caches have."""
        return min(self.rows[0].shape[-2], *map(sum, self._drafted()), sys.maxsize)

    def _drafted(self) -> list[tuple[int, int]]:
        """Rows of each draft, and those for which there is a feature only."""
        waiting = map(len, self.features or [()] * len(self.rows))
        return [(rows.shape[-2], more) for rows, more in zip(self.rows[1:], waiting, strict=False)]

    def holds(self, other: PinnedPrefix) -> bool:
        """Whether it serves wherever another does, which it begins with."""
        if self.states:  # which cannot go back to fewer
            return False
        own = other.keys[:-1]
        if len(self.rows) != len(other.rows) or self.least_rows > other.least_rows:
            return False
        return self.keys[: len(own)] == own != self.keys[:-1]

    def usable(self, keys: Sequence[RowKey], num_caches: int) -> int:
        """Rows that are those of a prompt, in the first `num_caches`."""
        common = count_common(self.keys, keys)
        found = min(common, self.rows[0].shape[-2])
        for rows, waiting in self._drafted()[: num_caches - 1]:
            # A row of the draft holds the token behind it, too; a feature goes with any.
            drafted = rows + waiting if waiting and common > rows else min(common - 1, rows)
            found = min(found, max(drafted, 0))
        if found < self.least_rows or (self.states and found < self.rows[0].shape[-2]):
            return 0
        return found

    def restore(self, length: int, caches: Sequence[SequenceCache]) -> None:
        """Write the first `length` rows into the caches, the base's first."""
        for cache, rows in zip(caches, self.rows, strict=False):
            cache.write_rows(rows[..., :length, :], self.keys, self.least_rows)
        for cache, rows, feature in zip(caches[1:], self.rows[1:], self.features, strict=False):
            if len(feature) and length > rows.shape[-2] and isinstance(cache, DraftCache):
                cache.write_feature(feature, self.keys[length])
        if self.states and isinstance(caches[0], StatefulCache):
            caches[0].write_states(self.states, length)


class PinnedPrefixes:
    """Beginnings of prompts whose rows are kept, in the order of their last use."""

    def __init__(self, limit_bytes: int = KEPT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._kept: OrderedDict[tuple[RowKey, ...], PinnedPrefix] = OrderedDict()

    def keep(self, keys: Sequence[RowKey], caches: Sequence[SequenceCache]) -> bool:
        """Keep what the caches hold of the rows of all `keys` but the last; forget the oldest.

        Returns:
            False if these rows alone exceed the limit, or are not all there: nothing is kept,
            nothing is forgotten.
        """
        name, length = tuple(keys[:-1]), len(keys) - 1
        known = self._kept.get(name)
        if known is not None and known.length == length:
            self._kept.move_to_end(name)
            return True
        least_rows = max(cache.least_rows for cache in caches)
        base, *drafts = caches
        held = base.held(name)
        if held < least_rows:
            return False
        drafted, features = [], []
        for cache in drafts:
            rows = min(length, cache.held(keys))
            drafted.append(cache.read_rows(rows))
            if isinstance(cache, DraftCache):
                features.append(cache.read_feature(rows))
        saved = base.read_rows(held), *drafted
        states = base.read_states(held) if isinstance(base, StatefulCache) else ()
        return self.add(PinnedPrefix(tuple(keys), saved, states, least_rows, tuple(features)))

    def knows(self, name: Sequence[RowKey]) -> bool:
        """Whether rows of this beginning are kept."""
        return tuple(name) in self._kept

    def add(self, kept: PinnedPrefix) -> bool:
        """Keep rows that somebody read; as `keep`."""
        name = kept.keys[:-1]
        if kept.num_bytes > self.limit_bytes:
            return False
        self._kept[name] = kept
        self._kept.move_to_end(name)
        used = sum(kept.num_bytes for kept in self._kept.values())
        while used > self.limit_bytes:
            used -= self._kept.popitem(last=False)[1].num_bytes
        return True

    @property
    def all(self) -> list[PinnedPrefix]:
        """What is kept; the one that was used last is the last."""
        return list(self._kept.values())

    def find(self, keys: Sequence[RowKey], num_caches: int) -> tuple[int, PinnedPrefix | None]:
        """What serves a prompt with these keys best: how many of its rows are usable."""
        found = [(kept.usable(keys, num_caches), name) for name, kept in self._kept.items()]
        usable, name = max(found, key=lambda pair: pair[0], default=(0, ()))
        if not usable:
            return 0, None
        self._kept.move_to_end(name)
        return usable, self._kept[name]
