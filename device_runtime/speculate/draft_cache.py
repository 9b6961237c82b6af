"""The committed rows of a draft: those in its KV cache, and those that wait to be written there.

Row i pairs the base's feature of token i with the embedding of token i + 1. All drafters of a
draft share them, and they outlast an answer: a prompt that begins alike goes on behind them.

A draft that is tried again behind a pause reads the newest rows only: those before are skipped,
and the cache begins behind them, since rotary embeddings see distances alone.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.device_runtime.engine.prefix_cache import count_common, marked, row_keys
from edgellm.device_runtime.sessions import F32, I64, ImageRows, LoadedAdapter, RowKey
from edgellm.device_runtime.sessions.contexts import Context
from edgellm.device_runtime.sessions.draft import DraftResult, DraftSession


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
class _Pairs:
    """M rows that wait."""

    keys: list[RowKey]  # of the tokens
    token_ids: I64  # [M], as the draft reads them
    taps: F32  # [M, T*H]; of the token before each

    def __len__(self) -> int:
        return len(self.keys)

    def pieces(self, most: int) -> list[_Pairs]:
        """Of at most so many rows."""
        return [
            _Pairs(
                self.keys[at : at + most], self.token_ids[at : at + most], self.taps[at : at + most]
            )
            for at in range(0, len(self), most)
        ]

    def head(self, count: int) -> _Pairs:
        """The first `count` rows."""
        return _Pairs(self.keys[:count], self.token_ids[:count], self.taps[:count])

    def tail(self, count: int) -> _Pairs:
        """The last `count` rows, one at least."""
        return _Pairs(self.keys[-count:], self.token_ids[-count:], self.taps[-count:])


@dataclass(frozen=True, slots=True)
class SavedRows:
    """The rows of an answer, while another drafts."""

    keys: list[RowKey]
    skipped: int
    waiting: list[_Pairs]
    context: Context


class CommittedRows:
    """See the module; like the base's, the record is never ahead of what was written."""

    def __init__(
        self,
        session: DraftSession,
        round_rows: int,
        image_ids: ImageIds | None = None,
        *,
        most_rows: int = sys.maxsize,
    ) -> None:
        """Start with an empty cache.

        Args:
            session: the draft.
            round_rows: a round commits as many at most; more together are a prompt's.
            image_ids: of a base that takes images.
            most_rows: of a pass.
        """
        self.session, self.image_ids = session, image_ids
        self._round_rows, self._most_rows = round_rows, most_rows
        self._image_keys: Mapping[int, RowKey] = {}
        self._keys: list[RowKey] = []  # of token 0, and of the token of every row up to the newest
        self._skipped = 0  # of these rows, the first, which the cache does not hold
        self._waiting: list[_Pairs] = []

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
        self.session.set_images(images)

    def held(self, keys: Sequence[RowKey]) -> int:
        """See `RowCache.held`; rows that wait count."""
        waiting = itertools.chain.from_iterable(pairs.keys for pairs in self._waiting)
        return max(count_common([*self._keys, *waiting], keys) - 1, 0)

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
        self._keys = keys[: 1 + min(rows, known)]
        self._skipped = min(self._skipped, len(self._keys) - 1)

    def observe(self, next_token_ids: I64, taps: F32) -> None:
        """Further rows: features [M, T*H] and the token that follows each, int64 [M]."""
        keys = row_keys(next_token_ids.tolist(), self._image_keys)
        if self.image_ids is not None:
            next_token_ids = self.image_ids.for_draft(next_token_ids)
        self._waiting.append(_Pairs(keys, next_token_ids, taps.copy()))

    def skip(self, most: int) -> None:
        """If more than `most` rows wait, the cache begins with the newest `most`.

        Not so in a text with images, whose rows must stand where the text has them.
        """
        if self._image_keys or sum(map(len, self._waiting)) <= most:
            return
        waiting = _joined(self._waiting)
        left_out = len(waiting) - most
        self._keys += waiting.keys[:left_out]
        self._skipped = len(self._keys) - 1
        self._waiting = [waiting.tail(most)]

    def write(
        self, top_k: int, *, asks: bool = False
    ) -> Iterator[tuple[int, Callable[[], DraftResult]]]:
        """Write what waits into the cache, as far as it has room.

        Args:
            top_k: candidates of a row.
            asks: the host does not wait for a pass before it calls for its result.

        Yields:
            The rows of a pass and its result, until the next pass: `top_k` candidates behind the
            last of them.
        """
        waiting, self._waiting = self._batched(), []
        for at, pairs in enumerate(waiting):
            rows = len(pairs)
            if self.length + rows > self.session.capacity:
                self._waiting = waiting[at:]  # for good: this answer goes on without
                return
            hidden, last = self.session.fuse(pairs.taps), np.array([rows - 1])
            if asks:
                found = self.session.ask(pairs.token_ids, hidden, self.length, last, top_k=top_k)
            else:
                result = self.session.run(pairs.token_ids, hidden, self.length, last, top_k=top_k)
                found = partial(_itself, result)
            self._keys += pairs.keys
            yield rows, found

    def _batched(self) -> list[_Pairs]:
        """What waits, rows of several rounds of plain decoding in one pass."""
        if len(self._waiting) == 1 and len(self._waiting[0]) <= self._round_rows:
            return self._waiting  # of a round, as nearly always
        batches: list[_Pairs] = []
        for is_prompt, group in itertools.groupby(
            self._waiting, lambda pairs: len(pairs) > self._round_rows
        ):
            batch = list(group)
            batches += batch if is_prompt else _joined(batch).pieces(self._most_rows)
        return batches

    def read_rows(self, length: int) -> NDArray[Any]:
        """See `runners.Cache`; writes what waits before, also while drafting pauses.

        There are none of a text whose first rows were skipped.
        """
        if length > self._skipped + self.length:
            for _ in self.write(top_k=1):
                pass
        return self.session.read_rows(0 if self._skipped else min(length, self.length))

    @property
    def least_rows(self) -> int:
        """See `RowCache`: drafts have no windows."""
        return 0

    def write_rows(self, rows: NDArray[Any], keys: Sequence[RowKey], least_rows: int = 0) -> None:
        """See `RowCache.write_rows`."""
        del least_rows
        self._keys, self._waiting, self._skipped = [], [], 0
        self.session.write_rows(rows)
        self._keys = list(keys[: rows.shape[-2] + 1])

    def take_out(self) -> SavedRows:
        """The rows of the answer that steps aside; what waits is not computed.

        Another answer may go on behind the same rows.
        """
        waiting = list(self._waiting)
        saved = SavedRows(list(self._keys), self._skipped, waiting, self.session.context)
        self.session.use(self.session.fork())
        return saved

    def put_back(self, saved: SavedRows) -> None:
        """Go on with the rows of an answer that stepped aside."""
        self._keys, self._waiting = [], []
        self.session.close(self.session.context)
        self.session.use(saved.context)
        self._keys, self._waiting = list(saved.keys), list(saved.waiting)
        self._skipped = saved.skipped

    def drop(self, saved: SavedRows) -> None:
        """Nobody goes on with these rows."""
        self.session.close(saved.context)


def _itself(result: DraftResult) -> DraftResult:
    return result


def _joined(batch: list[_Pairs]) -> _Pairs:
    return _Pairs(
        [key for pairs in batch for key in pairs.keys],
        np.concatenate([pairs.token_ids for pairs in batch]),
        np.concatenate([pairs.taps for pairs in batch]),
    )
