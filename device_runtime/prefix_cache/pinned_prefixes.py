"""Prefix cache: keys of cached positions, and pinned prefixes.

The KV of a position depends on its token, on all tokens before it, and on their positions. So the
common prefix of the keys of a cache and of a prompt is the number of positions they share. The key
of an image token is a hash of the image; which of its tokens it is follows from earlier keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm.device_runtime.arrays import (
    LoadedAdapter,
    RowKey,
)

PINNED_BYTES = 256 << 20  # of pinned prefixes


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedKV:
    """A host copy of a sequence's first positions in one network."""

    values: NDArray[Any]  # see `KVCache.read`
    states: tuple[NDArray[Any], ...] = ()  # of recurrent layers, after all positions
    # Hidden states [1, T*H] for the position after the others, if it waits for the next token
    feature: NDArray[Any] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    min_length: int = 0  # from which a prompt can be continued
    is_skipped: bool = False  # a draft left out the first positions; it begins after the prefix

    @property
    def length(self) -> int:
        """Positions, with the one that waits."""
        return self.values.shape[-2] + len(self.feature)

    @property
    def num_bytes(self) -> int:
        """Size of all arrays."""
        return sum(array.nbytes for array in (self.values, *self.states, self.feature))


class CachedSequence(Protocol):
    """The KV cache of one sequence in a network, of the base or of a draft."""

    @property
    def min_length(self) -> int:
        """The smallest prefix length, other than 0, from which a prompt can be continued.

        With fewer positions, window layers would attend to positions that were freed.
        """
        ...

    def fork(self) -> CachedSequence:
        """A copy that shares the positions; both may be extended."""
        ...

    def free(self) -> None:
        """Free all memory; the sequence is not extended any more."""
        ...

    def num_cached(self, keys: Sequence[RowKey]) -> int:
        """Positions shared with a prompt of these keys, if it can be continued from there."""
        ...

    def pin(self, keys: Sequence[RowKey]) -> PinnedKV:
        """Copy the positions that are shared with a prompt to the host.

        Args:
            keys: of these positions and of the next token.
        """
        ...

    def restore(self, pinned: PinnedKV, length: int, keys: Sequence[RowKey]) -> None:
        """Replace the content by the first `length` positions of what `pin` returned.

        Args:
            pinned: of a sequence with this prefix.
            length: at most `pinned.length`.
            keys: as for `pin`.
        """
        ...


class CachedNetwork(Protocol):
    """Makes the KV caches of one network's sequences."""

    @property
    def max_pass_tokens(self) -> int:
        """See `KVPool`; 0: no positions are freed while a sequence runs."""
        ...

    def new_kv(self) -> CachedSequence:
        """The KV cache of a new, empty sequence."""
        ...

    def on_shortage(self, evict: Callable[[], bool]) -> None:
        """Register an eviction callback; it returns True if it freed blocks."""
        ...


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A pinned prefix of a prompt: copies of its KV and states."""

    keys: tuple[RowKey, ...]  # and the key of the token after them
    parts: tuple[PinnedKV, ...]  # of the base, and of the draft if there is one

    @property
    def num_bytes(self) -> int:
        """Size of all arrays."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def length(self) -> int:
        """Positions that all networks have."""
        return min(part.length for part in self.parts if not part.is_skipped)

    def holds(self, other: PinnedPrefix) -> bool:
        """Whether it can replace another, which is a prefix of it."""
        if self.parts[0].states:  # which cannot be truncated
            return False
        own = other.keys[:-1]
        if len(self.parts) != len(other.parts):
            return False
        if any(a.min_length > b.min_length for a, b in zip(self.parts, other.parts, strict=True)):
            return False
        return self.keys[: len(own)] == own != self.keys[:-1]

    def usable(self, keys: Sequence[RowKey], num_networks: int) -> int:
        """Positions shared with a prompt, in the first `num_networks`."""
        base, *drafts = self.parts[:num_networks]
        common = count_common(self.keys, keys)
        found = min(common, base.length)
        for draft in drafts:
            if draft.is_skipped:
                continue
            # A draft's position also depends on the next token; hidden states do not.
            values = draft.values.shape[-2]
            is_waiting = len(draft.feature) and common > values
            found = min(found, max(draft.length if is_waiting else min(common - 1, values), 0))
        least = max(part.min_length for part in (base, *drafts))
        if found < least or (base.states and found < base.length):
            return 0
        return found

    def restore(self, length: int, sequences: Sequence[CachedSequence]) -> None:
        """Write the first `length` positions, the base's first."""
        for sequence, part in zip(sequences, self.parts, strict=False):
            sequence.restore(part, length, self.keys)


class PinnedPrefixes:
    """Pinned prefixes of prompts, in the order of their last use (LRU)."""

    def __init__(self, limit_bytes: int = PINNED_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._pinned: OrderedDict[tuple[RowKey, ...], PinnedPrefix] = OrderedDict()

    def pin(self, keys: Sequence[RowKey], sequences: Sequence[CachedSequence]) -> bool:
        """Pin the positions of all `keys` but the last; evict the least recently used.

        Args:
            keys: of a sequence.
            sequences: its KV caches in the base and in the draft.

        Returns:
            False if this prefix alone exceeds the limit, or is not complete in the caches; then
            nothing is pinned or evicted.
        """
        name, length = tuple(keys[:-1]), len(keys) - 1
        known = self._pinned.get(name)
        if known is not None and known.length == length:
            self._pinned.move_to_end(name)
            return True
        min_length = max(one.min_length for one in sequences)
        if sequences[0].num_cached(name) < min_length:
            return False
        return self.add(PinnedPrefix(tuple(keys), tuple(one.pin(keys) for one in sequences)))

    def knows(self, name: Sequence[RowKey]) -> bool:
        """Whether this prefix is pinned."""
        return tuple(name) in self._pinned

    def add(self, prefix: PinnedPrefix) -> bool:
        """Pin a prefix that was copied before; returns as `pin`."""
        if prefix.num_bytes > self.limit_bytes:
            return False
        name = prefix.keys[:-1]
        self._pinned[name] = prefix
        self._pinned.move_to_end(name)
        used = sum(one.num_bytes for one in self._pinned.values())
        while used > self.limit_bytes:
            used -= self._pinned.popitem(last=False)[1].num_bytes
        return True

    @property
    def all(self) -> list[PinnedPrefix]:
        """All pinned prefixes; the most recently used is the last."""
        return list(self._pinned.values())

    def find(self, keys: Sequence[RowKey], num_networks: int) -> tuple[int, PinnedPrefix | None]:
        """The pinned prefix with the most usable positions for a prompt, and their number."""
        found = [(one.usable(keys, num_networks), name) for name, one in self._pinned.items()]
        usable, name = max(found, key=lambda pair: pair[0], default=(0, ()))
        if not usable:
            return 0, None
        self._pinned.move_to_end(name)
        return usable, self._pinned[name]
