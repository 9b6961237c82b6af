"""The KV cache of a draft: computed positions, and committed positions that wait for a pass.

Position i pairs the base's hidden state of token i with the embedding of token i + 1. Positions
outlast a request: a prompt with an equal prefix reuses them. A waiting position can still take
another next token. So a prompt without the last request's stop token recomputes no base position.

After a pause the draft computes only the newest positions and skips those before. Its cache then
begins with the newest, since RoPE depends only on distances.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.device_runtime.arrays import (
    F32,
    I64,
    ImageRows,
    LoadedAdapter,
    RowKey,
)
from edgellm.device_runtime.kv_cache.prefix_cache import count_common, marked, row_keys
from edgellm.device_runtime.networks.draft import DraftNetwork, DraftPart
from edgellm.device_runtime.networks.sequence_kv import Context


@dataclass(frozen=True, slots=True)
class ImageIds:
    """The token ids of image positions."""

    first: int  # the vocabulary's size
    placeholder: int | None  # token id for drafts without image embeddings; None: has them

    def for_draft(self, token_ids: I64) -> I64:
        """The token ids that the draft takes."""
        if self.placeholder is None:
            return token_ids
        return np.where(token_ids < self.first, token_ids, self.placeholder)


@dataclass(frozen=True, slots=True)
class MaskRows:
    """Mask tokens after the newest position, for drafts that predict several tokens in a pass."""

    token_id: int
    count: int


@dataclass(frozen=True, slots=True)
class _Pairs:
    """M positions that wait for a pass."""

    keys: list[RowKey]  # of the tokens
    token_ids: I64  # [M], as the draft takes them
    taps: F32  # [M, T*H]; hidden states of the token before each

    def __len__(self) -> int:
        return len(self.keys)

    def chunks(self, maximum: int) -> list[_Pairs]:
        """Chunks of at most `maximum` positions."""
        return [
            _Pairs(
                self.keys[at : at + maximum],
                self.token_ids[at : at + maximum],
                self.taps[at : at + maximum],
            )
            for at in range(0, len(self), maximum)
        ]

    def head(self, count: int) -> _Pairs:
        """The first `count` positions."""
        return _Pairs(self.keys[:count], self.token_ids[:count], self.taps[:count])

    def leading_to(self, key: RowKey, token_ids: I64) -> _Pairs:
        """A copy whose last position has another next token, int64 [1]."""
        ids = np.append(self.token_ids[:-1], token_ids)
        return _Pairs([*self.keys[:-1], key], ids, self.taps)

    def tail(self, count: int) -> _Pairs:
        """The last `count` positions; `count` >= 1."""
        return _Pairs(self.keys[-count:], self.token_ids[-count:], self.taps[-count:])


class DraftRows:
    """The draft's positions of one sequence; keys are recorded only after a write."""

    def __init__(self, cache: CommittedRows, context: Context) -> None:
        """An empty sequence in an empty context."""
        self.context = context
        self._cache = cache
        self._image_keys: Mapping[int, RowKey] = {}
        self._keys: list[RowKey] = []  # of token 0, and of every position's next token
        self._skipped = 0  # first positions that the cache does not hold
        self._waiting: list[_Pairs] = []

    def fork(self) -> DraftRows:
        """A copy with the same positions; both can be extended."""
        new = DraftRows(self._cache, self._cache.session.fork(self.context))
        new._keys, new._skipped = list(self._keys), self._skipped
        new._waiting = list(self._waiting)
        return new

    @property
    def length(self) -> int:
        """Positions in the cache."""
        return max(len(self._keys) - 1 - self._skipped, 0)

    @property
    def has_waiting(self) -> bool:
        """Whether positions wait for a pass."""
        return bool(self._waiting)

    def set_images(self, images: ImageRows) -> None:
        """Set the images of the sequence that begins."""
        self._image_keys = images.keys
        self.context.images = images

    def held(self, keys: Sequence[RowKey]) -> int:
        """See `SequenceCache.held`; waiting positions count, the last with any next token."""
        waiting = itertools.chain.from_iterable(pairs.keys for pairs in self._waiting)
        known = [*self._keys, *waiting]
        common = count_common(known, keys)
        if len(self._keys) <= common < min(len(known), len(keys)):
            return common
        return max(common - 1, 0)

    def begin(self, token_ids: Sequence[int], adapter: LoadedAdapter | None = None) -> None:
        """Truncate the sequence to the positions of these tokens.

        Args:
            token_ids: the prompt's prefix: the tokens of positions that are `held`, and the next.
            adapter: the base's adapter, with which the hidden states were computed.
        """
        rows, known = len(token_ids) - 1, self._skipped + self.length
        room, kept = rows - known, []
        for pairs in self._waiting:
            if room > 0:
                kept.append(pairs.head(room))
                room -= len(pairs)
        self._waiting = kept
        keys = marked(row_keys(token_ids, self._image_keys), adapter)
        if kept and room <= 0:
            kept[-1] = kept[-1].leading_to(keys[-1], self._for_draft(np.array([token_ids[-1]])))
        self._keys = keys[: 1 + min(rows, known)]
        self._skipped = min(self._skipped, len(self._keys) - 1)

    def observe(self, next_token_ids: I64, taps: F32) -> None:
        """Append positions: hidden states [M, T*H] and each one's next token, int64 [M]."""
        keys = row_keys(next_token_ids.tolist(), self._image_keys)
        self._waiting.append(_Pairs(keys, self._for_draft(next_token_ids), taps.copy()))

    def _for_draft(self, token_ids: I64) -> I64:
        image_ids = self._cache.image_ids
        return token_ids if image_ids is None else image_ids.for_draft(token_ids)

    def skip(self, maximum: int) -> None:
        """If more than `maximum` positions wait, restart the cache with the newest `maximum`.

        Texts with images skip nothing, since image positions are absolute.
        """
        if not self._image_keys and sum(map(len, self._waiting)) > maximum:
            self._begin_anew(maximum)

    def restart(self, rows: int) -> None:
        """If the waiting positions exceed the cache, restart it with the newest of them.

        At least `rows` must wait. At most half of the cache is filled. Texts with images never
        restart.
        """
        waiting, capacity = sum(map(len, self._waiting)), self._cache.session.capacity
        if waiting >= rows and self.length + waiting > capacity and not self._image_keys:
            self._begin_anew(min(waiting, max(rows, capacity // 2)))

    def _begin_anew(self, rows: int) -> None:
        waiting = _joined(self._waiting)
        left_out = len(waiting) - rows
        self._keys += waiting.keys[:left_out]
        self._skipped = len(self._keys) - 1
        self._waiting = [waiting.tail(rows)]

    def parts(self, top_k: int, masks: MaskRows | None = None) -> Iterator[DraftPart]:
        """The passes that compute the waiting positions, as far as the cache has room.

        Args:
            top_k: candidates after the last position of a part.
            masks: mask tokens after the newest position, as far as the cache has room.

        Yields:
            A part; it counts as computed when the next is requested.
        """
        waiting, self._waiting = self._batched(), []
        if masks is not None and waiting and len(waiting[-1]) > self._cache.round_rows:
            last = waiting.pop()  # a prompt's passes return candidates of one position
            waiting += [last.head(len(last) - 1), last.tail(1)]
        for at, pairs in enumerate(waiting):
            rows = len(pairs)
            room = self._cache.session.capacity - self.length - rows
            if room < 0:
                self._waiting = waiting[at:]  # final: this sequence continues without the draft
                return
            last = np.array([rows - 1])
            part = DraftPart(
                self.context, pairs.token_ids, self.length, last, top_k, taps=pairs.taps
            )
            if masks is not None and at + 1 == len(waiting):
                part = part.with_masks(masks.token_id, min(masks.count, room))
            yield part
            self._keys += pairs.keys

    def _batched(self) -> list[_Pairs]:
        """The waiting positions in batches; those of several plain tokens share a pass."""
        if len(self._waiting) == 1 and len(self._waiting[0]) <= self._cache.round_rows:
            return self._waiting  # one round: the common case
        batches: list[_Pairs] = []
        for is_prompt, group in itertools.groupby(
            self._waiting, lambda pairs: len(pairs) > self._cache.round_rows
        ):
            batch = list(group)
            batches += batch if is_prompt else _joined(batch).chunks(self._cache.max_rows)
        return batches

    def read_rows(self, length: int) -> NDArray[Any]:
        """See `runners.Cache`; computes the waiting positions first, also while drafting pauses.

        The newest position keeps waiting, since any token may follow its hidden state. If first
        positions were skipped, the result is empty.
        """
        session = self._cache.session
        if length > self._skipped + self.length:
            *before, last = self._waiting
            newest = last.tail(1)
            self._waiting = [*before, last.head(len(last) - 1)] if len(last) > 1 else before
            for part in self.parts(top_k=1):
                session.run_many([part])
            self._waiting.append(newest)
        session.use(self.context)
        return session.read_rows(0 if self._skipped else min(length, self.length))

    def read_feature(self, length: int) -> F32:
        """See `DraftCache.read_feature`."""
        if not self._waiting:
            return np.zeros((0, 0), np.float32)
        first = self._waiting[0].taps
        is_next = not self._skipped and self.length + 1 == length
        # A host array, since it outlasts the engine.
        return np.asarray(first[: int(is_next and sum(map(len, self._waiting)) == 1)])

    def write_feature(self, feature: F32, key: RowKey) -> None:
        """See `DraftCache.write_feature`; `begin` sets the token."""
        self._waiting = [_Pairs([key], np.zeros(1, np.int64), feature)]

    def write_rows(self, rows: NDArray[Any], keys: Sequence[RowKey]) -> None:
        """See `SequenceCache.write_rows`."""
        session = self._cache.session
        self._keys, self._waiting, self._skipped = [], [], 0
        session.use(self.context)
        session.write_rows(rows)
        self._keys = list(keys[: rows.shape[-2] + 1])


class CommittedRows:
    """The draft's cache of all sequences; `context` is the current sequence."""

    def __init__(
        self,
        session: DraftNetwork,
        round_rows: int,
        image_ids: ImageIds | None = None,
        *,
        max_rows: int = sys.maxsize,
    ) -> None:
        """Start with an empty cache.

        Args:
            session: the draft.
            round_rows: maximum positions that a round commits; more belong to a prompt.
            image_ids: token ids of image positions, if the base takes images.
            max_rows: maximum positions in a pass.
        """
        self.session, self.image_ids = session, image_ids
        self.round_rows, self.max_rows = round_rows, max_rows
        self.context = DraftRows(self, session.context)

    def new_context(self) -> DraftRows:
        """See `SequenceCache.new_context`."""
        return DraftRows(self, self.session.new_context())

    def use(self, context: DraftRows) -> None:
        """See `SequenceCache.use`."""
        self.context = context

    def fork(self, context: DraftRows) -> DraftRows:
        """See `SequenceCache.fork`."""
        return context.fork()

    def close(self, context: DraftRows) -> None:
        """See `SequenceCache.close`."""
        self.session.close(context.context)

    def on_shortage(self, forget_one: Callable[[], bool]) -> None:
        """See `SequenceCache.on_shortage`."""
        self.session.on_shortage(forget_one)

    def held(self, keys: Sequence[RowKey]) -> int:
        """See `SequenceCache.held`; waiting positions count."""
        return self.context.held(keys)

    def held_by(self, context: DraftRows, keys: Sequence[RowKey]) -> int:
        """See `SequenceCache.held_by`."""
        return context.held(keys)

    @property
    def least_rows(self) -> int:
        """See `SequenceCache`; drafts have no sliding windows."""
        return 0

    def read_rows(self, length: int) -> NDArray[Any]:
        """See `SequenceCache.read_rows`."""
        return self.context.read_rows(length)

    def read_feature(self, length: int) -> F32:
        """See `DraftCache.read_feature`."""
        return self.context.read_feature(length)

    def write_feature(self, feature: F32, key: RowKey) -> None:
        """See `DraftCache.write_feature`."""
        self.context.write_feature(feature, key)

    def write_rows(self, rows: NDArray[Any], keys: Sequence[RowKey], least_rows: int = 0) -> None:
        """See `SequenceCache.write_rows`."""
        del least_rows
        self.context.write_rows(rows, keys)


def _joined(batch: list[_Pairs]) -> _Pairs:
    return _Pairs(
        [key for pairs in batch for key in pairs.keys],
        np.concatenate([pairs.token_ids for pairs in batch]),
        np.concatenate([pairs.taps for pairs in batch]),
    )
