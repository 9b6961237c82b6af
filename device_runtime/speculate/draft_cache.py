"""The committed rows of a draft: those in its KV cache, and those that wait to be written there.

Row i pairs the base's feature of token i with the embedding of token i + 1. They outlast an
answer: a prompt that begins alike goes on behind them. While a row waits, its feature is there for
any other token: a prompt without the stop token of the answer before needs no row of the base anew.

A draft that is tried again behind a pause reads the newest rows only: those before are skipped,
and the cache begins behind them, since rotary embeddings see distances alone.
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
    """The token ids of image rows."""

    first: int  # the vocabulary's size
    placeholder: int | None  # what a draft reads instead that takes no image rows

    def for_draft(self, token_ids: I64) -> I64:
        """As the draft reads them."""
        if self.placeholder is None:
            return token_ids
        return np.where(token_ids < self.first, token_ids, self.placeholder)


@dataclass(frozen=True, slots=True)
class MaskRows:
    """What stands behind the newest row of a draft that foresees several tokens in one pass."""

    token_id: int
    count: int


@dataclass(frozen=True, slots=True)
class _Pairs:
    """M rows that wait."""

    keys: list[RowKey]  # of the tokens
    token_ids: I64  # [M], as the draft reads them
    taps: F32  # [M, T*H]; of the token before each

    def __len__(self) -> int:
        return len(self.keys)

    def pieces(self, maximum: int) -> list[_Pairs]:
        """Of at most so many rows."""
        return [
            _Pairs(
                self.keys[at : at + maximum],
                self.token_ids[at : at + maximum],
                self.taps[at : at + maximum],
            )
            for at in range(0, len(self), maximum)
        ]

    def head(self, count: int) -> _Pairs:
        """The first `count` rows."""
        return _Pairs(self.keys[:count], self.token_ids[:count], self.taps[:count])

    def leading_to(self, key: RowKey, token_ids: I64) -> _Pairs:
        """The same, but for the token of the last row, [1]."""
        ids = np.append(self.token_ids[:-1], token_ids)
        return _Pairs([*self.keys[:-1], key], ids, self.taps)

    def tail(self, count: int) -> _Pairs:
        """The last `count` rows, one at least."""
        return _Pairs(self.keys[-count:], self.token_ids[-count:], self.taps[-count:])


class DraftRows:
    """The rows of one answer; like the base's, the record is never ahead of what was written."""

    def __init__(self, cache: CommittedRows, context: Context) -> None:
        """Of an answer to come, in a context without rows."""
        self.context = context
        self._cache = cache
        self._image_keys: Mapping[int, RowKey] = {}
        self._keys: list[RowKey] = []  # of token 0, and of the token of every row up to the newest
        self._skipped = 0  # of these rows, the first, which the cache does not hold
        self._waiting: list[_Pairs] = []

    def fork(self) -> DraftRows:
        """Another with the same rows; both may go on from them."""
        new = DraftRows(self._cache, self._cache.session.fork(self.context))
        new._keys, new._skipped = list(self._keys), self._skipped
        new._waiting = list(self._waiting)
        return new

    @property
    def length(self) -> int:
        """Rows in the cache."""
        return max(len(self._keys) - 1 - self._skipped, 0)

    @property
    def is_behind(self) -> bool:
        """Whether rows wait."""
        return bool(self._waiting)

    def set_images(self, images: ImageRows) -> None:
        """The images of the answer that begins."""
        self._image_keys = images.keys
        self.context.images = images

    def held(self, keys: Sequence[RowKey]) -> int:
        """See `SequenceCache.held`; waiting rows count, the last one with any next token."""
        waiting = itertools.chain.from_iterable(pairs.keys for pairs in self._waiting)
        known = [*self._keys, *waiting]
        common = count_common(known, keys)
        if len(self._keys) <= common < min(len(known), len(keys)):
            return common
        return max(common - 1, 0)

    def begin(self, token_ids: Sequence[int], adapter: LoadedAdapter | None = None) -> None:
        """Forget the answer before, but for the rows of these tokens, as many as they pair up to.

        Args:
            token_ids: the prompt's beginning: the tokens of rows that are `held`, and the next.
            adapter: of the base, whose features the rows are made of.
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
            kept[-1] = kept[-1].leading_to(keys[-1], self._readable(np.array([token_ids[-1]])))
        self._keys = keys[: 1 + min(rows, known)]
        self._skipped = min(self._skipped, len(self._keys) - 1)

    def observe(self, next_token_ids: I64, taps: F32) -> None:
        """Further rows: features [M, T*H] and the token that follows each, int64 [M]."""
        keys = row_keys(next_token_ids.tolist(), self._image_keys)
        self._waiting.append(_Pairs(keys, self._readable(next_token_ids), taps.copy()))

    def _readable(self, token_ids: I64) -> I64:
        image_ids = self._cache.image_ids
        return token_ids if image_ids is None else image_ids.for_draft(token_ids)

    def skip(self, maximum: int) -> None:
        """If more than `maximum` rows wait, the cache begins with the newest `maximum`.

        Not so in a text with images, whose rows must stand where the text has them.
        """
        if not self._image_keys and sum(map(len, self._waiting)) > maximum:
            self._begin_anew(maximum)

    def restart(self, rows: int) -> None:
        """If the cache has no room for what waits, it begins with the newest of that.

        Not before `rows` wait, nor with more than fill half of it, and not in a text with images.
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
        """What to compute so that all that waits is in the cache, as far as it has room.

        Args:
            top_k: candidates behind the last row of a part.
            masks: behind the newest row, as far as the cache has room.

        Yields:
            A part; it counts as computed when the next is asked for.
        """
        waiting, self._waiting = self._batched(), []
        if masks is not None and waiting and len(waiting[-1]) > self._cache.round_rows:
            last = waiting.pop()  # a prompt's passes give one row's candidates
            waiting += [last.head(len(last) - 1), last.tail(1)]
        for at, pairs in enumerate(waiting):
            rows = len(pairs)
            room = self._cache.session.capacity - self.length - rows
            if room < 0:
                self._waiting = waiting[at:]  # for good: this answer goes on without
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
        """What waits, rows of several rounds of plain decoding in one pass."""
        if len(self._waiting) == 1 and len(self._waiting[0]) <= self._cache.round_rows:
            return self._waiting  # of a round, as nearly always
        batches: list[_Pairs] = []
        for is_prompt, group in itertools.groupby(
            self._waiting, lambda pairs: len(pairs) > self._cache.round_rows
        ):
            batch = list(group)
            batches += batch if is_prompt else _joined(batch).pieces(self._cache.max_rows)
        return batches

    def read_rows(self, length: int) -> NDArray[Any]:
        """See `runners.Cache`; writes what waits before, also while drafting pauses.

        But for the newest row, whose feature is worth more: any token may stand behind it. There
        are no rows of a text whose first ones were skipped.
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
        # Of the host, though a device may have it: it outlasts the engine.
        return np.asarray(first[: int(is_next and sum(map(len, self._waiting)) == 1)])

    def write_feature(self, feature: F32, key: RowKey) -> None:
        """See `DraftCache.write_feature`; `begin` says the token."""
        self._waiting = [_Pairs([key], np.zeros(1, np.int64), feature)]

    def write_rows(self, rows: NDArray[Any], keys: Sequence[RowKey]) -> None:
        """See `SequenceCache.write_rows`."""
        session = self._cache.session
        self._keys, self._waiting, self._skipped = [], [], 0
        session.use(self.context)
        session.write_rows(rows)
        self._keys = list(keys[: rows.shape[-2] + 1])


class CommittedRows:
    """The draft's cache: the rows of an answer are the current ones when it begins."""

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
            round_rows: a round commits as many at most; more together are a prompt's.
            image_ids: of a base that takes images.
            max_rows: of a pass.
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
        """See `SequenceCache.held`; rows that wait count."""
        return self.context.held(keys)

    def held_by(self, context: DraftRows, keys: Sequence[RowKey]) -> int:
        """See `SequenceCache.held_by`."""
        return context.held(keys)

    @property
    def least_rows(self) -> int:
        """See `SequenceCache`: drafts have no windows."""
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
