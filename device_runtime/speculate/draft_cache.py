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

import numpy as np

from edgellm.device_runtime.arrays import (
    F32,
    I64,
    ImageRows,
    LoadedAdapter,
    RowKey,
)
from edgellm.device_runtime.networks.draft import DraftNetwork, DraftPart
from edgellm.device_runtime.networks.sequence_kv import SequenceKV
from edgellm.device_runtime.prefix_cache.pinned_prefixes import (
    PinnedKV,
    count_common,
    marked,
    row_keys,
)


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


class DraftKVCaches:
    """Makes the KV caches of a draft's sequences; see `prefix_cache.CachedNetwork`."""

    def __init__(
        self,
        *,
        network: DraftNetwork,
        round_rows: int,
        image_ids: ImageIds | None = None,
        max_rows: int = sys.maxsize,
    ) -> None:
        """Keep the limits of passes.

        Args:
            network: the draft.
            round_rows: maximum positions that a round commits; more belong to a prompt.
            image_ids: token ids of image positions, if the base takes images.
            max_rows: maximum positions in a pass.
        """
        self.network, self.image_ids = network, image_ids
        # Of prompts, and of a round or several
        self.max_prompt_rows = network.max_text_tokens or sys.maxsize
        self.max_rows = min(max_rows, self.max_prompt_rows)
        self.round_rows = min(round_rows, self.max_prompt_rows)

    @property
    def max_pass_tokens(self) -> int:
        """See `prefix_cache.CachedNetwork`."""
        return self.network.max_pass_tokens

    def new_kv(self) -> DraftKV:
        """The KV cache of a new, empty sequence."""
        return DraftKV(self, self.network.new_kv())

    def on_shortage(self, evict: Callable[[], bool]) -> None:
        """See `prefix_cache.CachedNetwork`."""
        self.network.on_shortage(evict)


class DraftKV:
    """The draft's positions of one sequence; see `prefix_cache.CachedSequence`.

    Keys are recorded only after a write.
    """

    def __init__(self, caches: DraftKVCaches, kv: SequenceKV) -> None:
        """An empty sequence with an empty `kv`."""
        self.kv = kv
        self._caches = caches
        self._image_keys: Mapping[int, RowKey] = {}
        self._keys: list[RowKey] = []  # of token 0, and of every position's next token
        self._skipped = 0  # first positions that the cache does not hold
        self._waiting: list[_Pairs] = []

    def fork(self) -> DraftKV:
        """See `CachedSequence`."""
        new = DraftKV(self._caches, self.kv.fork())
        new._keys, new._skipped = list(self._keys), self._skipped
        new._waiting = list(self._waiting)
        return new

    def free(self) -> None:
        """See `CachedSequence`."""
        self.kv.free()

    @property
    def length(self) -> int:
        """Positions in the cache."""
        return max(len(self._keys) - 1 - self._skipped, 0)

    @property
    def min_length(self) -> int:
        """See `CachedSequence`."""
        return self._skipped + self.kv.min_length if self.kv.min_length else 0

    @property
    def has_waiting(self) -> bool:
        """Whether positions wait for a pass."""
        return bool(self._waiting)

    def set_images(self, images: ImageRows) -> None:
        """Set the images of the sequence that begins."""
        self._image_keys = images.keys
        self.kv.images = images

    def num_cached(self, keys: Sequence[RowKey]) -> int:
        """See `CachedSequence`; waiting positions count, the last with any next token."""
        waiting = itertools.chain.from_iterable(pairs.keys for pairs in self._waiting)
        known = [*self._keys, *waiting]
        common = count_common(known, keys)
        is_waiting = len(self._keys) <= common < min(len(known), len(keys))
        found = common if is_waiting else max(common - 1, 0)
        return found if found >= self.min_length else 0

    def begin(self, token_ids: Sequence[int], adapter: LoadedAdapter | None = None) -> None:
        """Truncate the sequence to the positions of these tokens.

        Args:
            token_ids: the prompt's prefix: the tokens of positions that are cached, and the next.
            adapter: the base's adapter, with which the hidden states were computed.
        """
        rows, known = len(token_ids) - 1, self._skipped + self.length
        self._waiting, _ = _split(self._waiting, max(rows - known, 0))
        keys, kept = marked(row_keys(token_ids, self._image_keys), adapter), self._waiting
        if kept and sum(map(len, kept)) == rows - known:
            kept[-1] = kept[-1].leading_to(keys[-1], self._for_draft(np.array([token_ids[-1]])))
        self._keys = keys[: 1 + min(rows, known)]
        self._skipped = min(self._skipped, len(self._keys) - 1)
        self.kv.truncate(self.length)

    def observe(self, next_token_ids: I64, taps: F32) -> None:
        """Append positions: hidden states [M, T*H] and each one's next token, int64 [M]."""
        keys = row_keys(next_token_ids.tolist(), self._image_keys)
        self._waiting.append(_Pairs(keys, self._for_draft(next_token_ids), taps.copy()))

    def _for_draft(self, token_ids: I64) -> I64:
        image_ids = self._caches.image_ids
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
        waiting, capacity = sum(map(len, self._waiting)), self._caches.network.capacity
        if waiting >= rows and self.length + waiting > capacity and not self._image_keys:
            self._begin_anew(min(waiting, max(rows, capacity // 2)))

    def _begin_anew(self, rows: int) -> None:
        waiting = _joined(self._waiting)
        left_out = len(waiting) - rows
        self._keys += waiting.keys[:left_out]
        self._skipped = len(self._keys) - 1
        self.kv.truncate(0)
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
        if masks is not None and waiting and len(waiting[-1]) > self._caches.round_rows:
            last = waiting.pop()  # a prompt's passes return candidates of one position
            waiting += [last.head(len(last) - 1), last.tail(1)]
        for at, pairs in enumerate(waiting):
            rows = len(pairs)
            room = self._caches.network.capacity - self.length - rows
            if room < 0:
                self._waiting = waiting[at:]  # final: this sequence continues without the draft
                return
            last = np.array([rows - 1])
            part = DraftPart(
                kv=self.kv,
                token_ids=pairs.token_ids,
                write_index=self.length,
                output_rows=last,
                top_k=top_k,
                taps=pairs.taps,
            )
            if masks is not None and at + 1 == len(waiting):
                part = part.with_masks(masks.token_id, min(masks.count, room))
            yield part
            self._keys += pairs.keys

    def _batched(self) -> list[_Pairs]:
        """The waiting positions in batches; those of several plain tokens share a pass."""
        caches = self._caches
        if len(self._waiting) == 1 and len(self._waiting[0]) <= caches.round_rows:
            return self._waiting  # one round: the common case
        batches: list[_Pairs] = []
        for is_prompt, group in itertools.groupby(
            self._waiting, lambda pairs: len(pairs) > caches.round_rows
        ):
            if is_prompt:
                batches += [part for each in group for part in each.chunks(caches.max_prompt_rows)]
            else:
                batches += _joined(list(group)).chunks(caches.max_rows)
        return batches

    def pin(self, keys: Sequence[RowKey]) -> PinnedKV:
        """See `CachedSequence`; computes waiting positions first, also while drafting pauses.

        The newest position keeps waiting, since any token may follow its hidden state. So do those
        after the prefix, whose passes would free its windows. If first positions were skipped, no
        values are copied.
        """
        length = min(len(keys) - 1, self.num_cached(keys))
        room = length - self._skipped - self.length
        if room > 0:
            count = min(room, sum(map(len, self._waiting)) - 1)
            self._waiting, later = _split(self._waiting, count)
            for part in self.parts(top_k=1):
                self._caches.network.run_batch([part])
            self._waiting += later
        values = self.kv.read(0 if self._skipped else min(length, self.length))
        return PinnedKV(
            values=values,
            feature=self._waiting_feature(length),
            min_length=self.kv.min_length if values.shape[-2] else 0,
            is_skipped=bool(self._skipped),
        )

    def _waiting_feature(self, length: int) -> F32:
        """Hidden states [1, T*H] of the last of `length` positions, if it waits; else [0, T*H]."""
        if not self._waiting:
            return np.zeros((0, 0), np.float32)
        first = self._waiting[0].taps
        is_next = not self._skipped and self.length + 1 == length
        # A host array, since it outlasts the engine.
        return np.asarray(first[: int(is_next and sum(map(len, self._waiting)) == 1)])

    def restore(self, pinned: PinnedKV, length: int, keys: Sequence[RowKey]) -> None:
        """See `CachedSequence`; `begin` sets the token after a waiting position."""
        values = pinned.values[..., :length, :]
        self._keys, self._waiting, self._skipped = [], [], 0
        if pinned.is_skipped:
            self.kv.truncate(0)
            self._keys, self._skipped = list(keys[: length + 1]), length
            return
        self.kv.write(values, min_length=pinned.min_length)
        self._keys = list(keys[: values.shape[-2] + 1])
        if len(pinned.feature) and length > pinned.values.shape[-2]:
            self._waiting = [_Pairs([keys[length]], np.zeros(1, np.int64), pinned.feature)]


def _split(waiting: list[_Pairs], count: int) -> tuple[list[_Pairs], list[_Pairs]]:
    """The first `count` positions, and the others."""
    first: list[_Pairs] = []
    others: list[_Pairs] = []
    for pairs in waiting:
        here = min(count, len(pairs))
        count -= here
        if here:
            first.append(pairs.head(here))
        if here < len(pairs):
            others.append(pairs.tail(len(pairs) - here))
    return first, others


def _joined(batch: list[_Pairs]) -> _Pairs:
    return _Pairs(
        [key for pairs in batch for key in pairs.keys],
        np.concatenate([pairs.token_ids for pairs in batch]),
        np.concatenate([pairs.taps for pairs in batch]),
    )
