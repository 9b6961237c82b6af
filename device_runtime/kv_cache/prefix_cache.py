"""Prefix cache: keys of cached positions, and pinned prefixes.

The KV of a position depends on its token, on all tokens before it, and on their positions. So the
common prefix of the keys of a cache and of a prompt is the number of positions they share. The key
of an image token is a hash of the image; which of its tokens it is follows from earlier keys.
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

KEPT_BYTES = 256 << 20  # of pinned prefixes


def row_keys(token_ids: Iterable[int], image_keys: Mapping[int, RowKey]) -> list[RowKey]:
    """Keys of tokens: the ids, or the image keys of placeholder ids."""
    return [image_keys.get(token_id, token_id) for token_id in token_ids]


def marked(keys: Sequence[RowKey], adapter: LoadedAdapter | None) -> list[RowKey]:
    """Keys of a text with an adapter: the first key names it, so all positions depend on it."""
    if adapter is None or not keys:
        return [*keys]
    return [f"{adapter.mark} {keys[0]}", *keys[1:]]


def count_common(ones: Sequence[RowKey], others: Sequence[RowKey]) -> int:
    """Length of the common prefix."""
    maximum = min(len(ones), len(others))
    if ones[:maximum] == others[:maximum]:
        return maximum
    pairs = enumerate(zip(ones, others, strict=False))
    return next((at for at, (one, other) in pairs if one != other), maximum)


class SequenceCache(Protocol):
    """A KV cache of several sequences, with the keys of their positions.

    Reads, writes and comparisons apply to the current sequence.
    """

    @property
    def context(self) -> Any:
        """The current sequence's context."""
        ...

    def new_context(self) -> Any:
        """The context of a new, empty sequence."""
        ...

    def use(self, context: Any, /) -> None:
        """Make a context current."""
        ...

    def fork(self, context: Any, /) -> Any:
        """Copy a context, sharing its positions; both may be extended."""
        ...

    def close(self, context: Any, /) -> None:
        """Free a context; it is not extended any more."""
        ...

    def on_shortage(self, forget_one: Callable[[], bool]) -> None:
        """Register an eviction callback; it returns True if it freed blocks."""
        ...

    def held(self, keys: Sequence[RowKey]) -> int:
        """Positions shared with a prompt of these keys, if it can be continued from there."""
        ...

    def held_by(self, context: Any, keys: Sequence[RowKey], /) -> int:
        """The same for any sequence; 0 if a prompt could not be continued from there."""
        ...

    def read_rows(self, length: int) -> NDArray[Any]:
        """See `runners.Cache`."""
        ...

    @property
    def least_rows(self) -> int:
        """The smallest prefix length, other than 0, from which a prompt can be continued.

        With fewer positions, window layers would attend to positions that were freed.
        """
        ...

    def write_rows(self, rows: NDArray[Any], keys: Sequence[RowKey], least_rows: int = 0) -> None:
        """Replace the content by `rows` from `read_rows`.

        Args:
            rows: the first positions of what was read.
            keys: of a prompt with this prefix.
            least_rows: of the cache when it was read.
        """
        ...


@runtime_checkable
class StatefulCache(SequenceCache, Protocol):
    """The KV cache of a base, which may also have states of recurrent layers."""

    def read_states(self, length: int) -> tuple[NDArray[Any], ...]:
        """Copies of the states after the first `length` positions; () without such layers."""
        ...

    def write_states(self, states: tuple[NDArray[Any], ...], length: int) -> None:
        """Restore states from `read_states`, after `length` positions, which are written."""
        ...


@runtime_checkable
class DraftCache(SequenceCache, Protocol):
    """The KV cache of a draft; its newest position may still wait for the next token."""

    def read_feature(self, length: int) -> NDArray[Any]:
        """Hidden states [1, T*H] of the last of `length` positions, else [0, T*H].

        Only if `read_rows` left that position out.
        """
        ...

    def write_feature(self, feature: NDArray[Any], key: RowKey) -> None:
        """Restore hidden states from `read_feature`; `key` is that of the token after them."""
        ...


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A pinned prefix of a prompt: copies of its KV and states."""

    keys: tuple[RowKey, ...]  # and the key of the token after them
    rows: tuple[NDArray[Any], ...]  # KV of the base, and of the draft if there is one
    states: tuple[NDArray[Any], ...] = ()  # of recurrent layers, after all positions of the base
    least_rows: int = 0  # minimum length from which a prompt can be continued
    features: tuple[NDArray[Any], ...] = ()  # hidden states for drafts, of zero or one position

    @property
    def num_bytes(self) -> int:
        """Size of all arrays."""
        return sum(array.nbytes for array in (*self.rows, *self.states, *self.features))

    @property
    def length(self) -> int:
        """Positions that all caches have."""
        return min(self.rows[0].shape[-2], *map(sum, self._drafted()), sys.maxsize)

    def _drafted(self) -> list[tuple[int, int]]:
        """KV positions of each draft, and positions with only hidden states."""
        waiting = map(len, self.features or [()] * len(self.rows))
        return [(rows.shape[-2], more) for rows, more in zip(self.rows[1:], waiting, strict=False)]

    def holds(self, other: PinnedPrefix) -> bool:
        """Whether it can replace another, which is a prefix of it."""
        if self.states:  # which cannot be truncated
            return False
        own = other.keys[:-1]
        if len(self.rows) != len(other.rows) or self.least_rows > other.least_rows:
            return False
        return self.keys[: len(own)] == own != self.keys[:-1]

    def usable(self, keys: Sequence[RowKey], num_caches: int) -> int:
        """Positions shared with a prompt, in the first `num_caches`."""
        common = count_common(self.keys, keys)
        found = min(common, self.rows[0].shape[-2])
        for rows, waiting in self._drafted()[: num_caches - 1]:
            # A draft's position also depends on the next token; hidden states do not.
            drafted = rows + waiting if waiting and common > rows else min(common - 1, rows)
            found = min(found, max(drafted, 0))
        if found < self.least_rows or (self.states and found < self.rows[0].shape[-2]):
            return 0
        return found

    def restore(self, length: int, caches: Sequence[SequenceCache]) -> None:
        """Write the first `length` positions into the caches, the base's first."""
        for cache, rows in zip(caches, self.rows, strict=False):
            cache.write_rows(rows[..., :length, :], self.keys, self.least_rows)
        for cache, rows, feature in zip(caches[1:], self.rows[1:], self.features, strict=False):
            if len(feature) and length > rows.shape[-2] and isinstance(cache, DraftCache):
                cache.write_feature(feature, self.keys[length])
        if self.states and isinstance(caches[0], StatefulCache):
            caches[0].write_states(self.states, length)


class PinnedPrefixes:
    """Pinned prefixes of prompts, in the order of their last use (LRU)."""

    def __init__(self, limit_bytes: int = KEPT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._kept: OrderedDict[tuple[RowKey, ...], PinnedPrefix] = OrderedDict()

    def keep(self, keys: Sequence[RowKey], caches: Sequence[SequenceCache]) -> bool:
        """Pin the positions of all `keys` but the last; evict the least recently used.

        Returns:
            False if this prefix alone exceeds the limit, or is not complete in the caches; then
            nothing is pinned or evicted.
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
        """Whether this prefix is pinned."""
        return tuple(name) in self._kept

    def add(self, kept: PinnedPrefix) -> bool:
        """Pin a prefix that was read from caches; as `keep`."""
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
        """All pinned prefixes; the most recently used is the last."""
        return list(self._kept.values())

    def find(self, keys: Sequence[RowKey], num_caches: int) -> tuple[int, PinnedPrefix | None]:
        """The pinned prefix with the most usable positions for a prompt, and their number."""
        found = [(kept.usable(keys, num_caches), name) for name, kept in self._kept.items()]
        usable, name = max(found, key=lambda pair: pair[0], default=(0, ()))
        if not usable:
            return 0, None
        self._kept.move_to_end(name)
        return usable, self._kept[name]
