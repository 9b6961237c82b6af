"""KV cache manager: admits, preempts and forks sequences, and reuses prefixes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from collections.abc import Sequence as Sized
from typing import Any

from edgellm.core.errors import RequestError
from edgellm.device_runtime.arrays import (
    ImageRows,
    LoadedAdapter,
)
from edgellm.device_runtime.engine.profile import RESTORE
from edgellm.device_runtime.engine.prompt import Prompt
from edgellm.device_runtime.engine.sequence import Sequence
from edgellm.device_runtime.networks.decoder import DecoderNetwork
from edgellm.device_runtime.networks.sequence_kv import SequenceKV
from edgellm.device_runtime.prefix_cache.pinned_prefixes import (
    PINNED_BYTES,
    CachedNetwork,
    CachedSequence,
    PinnedPrefix,
    PinnedPrefixes,
    count_common,
)
from edgellm.device_runtime.prefix_cache.prefix_cache import (
    MAX_FINISHED,
    CachedPrefix,
    PrefixCache,
)
from edgellm.device_runtime.request_faults import Confined

MIN_SHARED = 16  # minimum shared positions that are worth waiting for


class KVCacheManager:
    """The KV caches of the base and its draft, by sequence."""

    def __init__(
        self,
        *,
        base: DecoderNetwork,
        prefill_rows: int,
        drafts: Sized[CachedNetwork] = (),
        no_images: ImageRows | None = None,
        reuses_context: bool = False,
    ) -> None:
        """Start with empty caches.

        Args:
            base: the base network.
            prefill_rows: tokens of a prefill chunk.
            drafts: networks of a draft whose KV caches follow the base's.
            no_images: the empty image input, for a base that takes images.
            reuses_context: reuse cached positions that a prompt shares with earlier texts.
        """
        self.base, self.prefill_rows = base, prefill_rows
        self._networks: tuple[Any, ...] = (base, *drafts)
        self._frees_positions = any(network.max_pass_tokens for network in self._networks)
        self._no_images, self._reuses_context = no_images, reuses_context
        self.pinned = PinnedPrefixes()
        self.steps_together = base.max_batch_size > 1  # whether sequences share passes
        self.block_size = base.block_size if self.steps_together else 1  # positions of a KV block
        self._begun: dict[Sequence, tuple[Any, ...]] = {}  # KV caches in all networks
        self._finished = PrefixCache(_max_finished(base, frees_positions=self._frees_positions))
        for network in self._networks:
            network.on_shortage(self._evict)
        self._spare: int | None = None  # positions that eviction would free; None: unknown

    @property
    def num_free(self) -> int:
        """Free positions for further sequences; unlimited if the host keeps copies.

        Includes those of finished sequences, which can be evicted.
        """
        if not self.steps_together:
            return sys.maxsize
        self._retire()
        free = self.base.num_free
        if not self._finished.all:
            return free
        if self._spare is None:
            self._spare = self.base.num_free_without([one.kvs[0] for one in self._finished.all])
            self._spare -= free
        return free + self._spare

    @property
    def usage(self) -> float:
        """Share of the KV cache used by running sequences; from any thread."""
        base, begun = self.base, list(self._begun.items())
        if not self.steps_together:
            running = [kvs[0] for one, kvs in begun if not one.is_over]
            return max((len(kv.keys) for kv in running), default=0) / base.capacity
        over = [one.kvs[0] for one in self._finished.all]
        over += [kvs[0] for one, kvs in begun if one.is_over]
        whole = -(-base.capacity // base.block_size) * base.block_size * base.max_batch_size
        return 1 - base.num_free_without(over) / whole

    def close(self) -> None:
        """Release the caches, so that their memory is freed at once."""
        for network in self._networks:
            network.on_shortage(lambda: False)

    def _evict(self) -> bool:
        self._spare = None
        return self._finished.evict()

    def admit(self, sequence: Sequence) -> None:
        """Give a sequence its KV caches, with the cached prefix of its prompt."""
        if sequence.kv is None:
            self._retire()
            self._begin(sequence)

    def release(self, sequence: Sequence) -> None:
        """Swap out the KV cache of a sequence, so that others can use its blocks."""
        if sequence.kv is not None:
            sequence.kv.swap_out()

    def should_wait(self, sequence: Sequence, others: Iterable[Sequence]) -> bool:
        """Whether to wait for the next pass, which computes a prefix that a sequence can reuse.

        Args:
            sequence: may have started.
            others: other sequences of the pass.
        """
        if not self._reuses_context or sequence.kv is not None:
            return False
        reading = [one for one in others if one.is_prefilling]
        if not reading:
            return False
        keys = sequence.prompt.keys
        common = max(count_common(one.prompt.keys, keys) for one in reading)
        return common - self._best(sequence)[0] >= MIN_SHARED

    def _retire(self) -> None:
        """Move finished sequences to the prefix cache, or free their blocks."""
        for sequence in [one for one in self._begun if one.is_over]:
            kvs, self._spare = self._begun.pop(sequence), None
            if sequence.drafter is not None:
                with Confined(sequence.warn):
                    sequence.drafter.drop()
            # The KV cache of a failed sequence may hold anything, such as NaN.
            if self._reuses_context and sequence.num_rows and sequence.failure is None:
                self._finished.add(CachedPrefix(sequence.keys[: sequence.num_rows + 1], kvs))
            else:
                _free(kvs)

    def _begin(self, sequence: Sequence) -> None:
        drafter, no_images = sequence.drafter, self._no_images
        held, kvs = self._kvs_for(sequence)
        self._begun[sequence] = kvs
        sequence.kv = kvs[0]
        self.set_up(kvs[0], sequence.prompt)
        if drafter is not None:
            for kv in kvs[1:]:
                drafter.use_kv(kv)
            drafter.set_adapter(sequence.prompt.adapter)
            if no_images is not None:
                drafter.set_images(sequence.prompt.images or no_images)
        sequence.reused = sequence.num_rows = self._restored(sequence, kvs, held)
        sequence.profile.prompt_tokens.append(len(sequence.prompt.token_ids))
        sequence.profile.reused_tokens.append(sequence.reused)

    def _kvs_for(self, sequence: Sequence) -> tuple[int, tuple[Any, ...]]:
        """The reused length of the prompt, and the KV caches that the sequence continues."""
        self._spare = None
        held, found = self._best(sequence)
        if isinstance(found, CachedPrefix):
            if not self.steps_together or (held and held >= len(found.keys) - 1):
                return held, self._finished.take(found)
            if held:
                self._finished.use(found)
            found = found.kvs
        if found is not None and held:
            return held, _fork(found)
        return 0, tuple(network.new_kv() for network in self._networks)

    def _best(self, sequence: Sequence) -> tuple[int, CachedPrefix | tuple[Any, ...] | None]:
        """The longest cached prefix of a prompt, in all caches that it needs, and its owner."""
        if not self._reuses_context:
            return 0, None
        keys = sequence.prompt.keys
        needed = len(self._networks) if sequence.drafter is not None else 1
        best: tuple[int, CachedPrefix | tuple[Any, ...] | None] = (-1, None)
        for found in (*self._finished.all, *self._begun.values()):
            kvs = found.kvs if isinstance(found, CachedPrefix) else found
            held = _reach(min(kv.num_cached(keys) for kv in kvs[:needed]), kvs[:needed])
            if held > best[0] or (held == best[0] and isinstance(found, CachedPrefix)):
                best = held, found
        return max(best[0], 0), best[1]

    def end(self, sequence: Sequence) -> None:
        """Mark the end of the output of a sequence that has just stepped.

        Its newest token may be a stop token, which the next prompt need not contain.
        """
        assert sequence.kv is not None
        sequence.kv.end(len(sequence.keys) - 1)

    def end_prompt(self, sequence: Sequence) -> None:
        """Cache the whole prompt when the first output token is known, before the next pass.

        A later prompt may diverge here, since templates drop the reasoning of earlier turns.
        Window layers free these positions during decoding, so they are forked.
        """
        if not (self._reuses_context and self._frees_positions):
            return
        self._spare = None
        self._finished.add(CachedPrefix(sequence.keys, _fork(self._begun[sequence])))

    def set_up(self, kv: SequenceKV, prompt: Prompt) -> None:
        """Set a prompt's images and adapter in a KV cache of the base, before prefill.

        Raises:
            RequestError: see `require_loaded`.
        """
        require_loaded(prompt.adapter)
        kv.adapter = prompt.adapter
        if self._no_images is not None:
            kv.images = prompt.images or self._no_images

    def is_pin_due(self, sequence: Sequence, length: int) -> bool:
        """Whether `pin` is due: at the end, or before window layers free positions."""
        is_last_chance = self._frees_positions and sequence.num_rows >= length
        return sequence.finish_reason is not None or is_last_chance

    def pin(self, sequence: Sequence, length: int) -> list[str]:
        """Pin the first `length` positions of a sequence that has just stepped for later prompts.

        Returns:
            Warnings for the user.
        """
        if not length:
            return ["nothing was pinned: the prompt has no separate system prompt"]
        kvs, keys = self._begun[sequence], sequence.prompt.keys
        if not _reach(length, kvs) and not self.pinned.knows(keys[:length]):
            return ["the system prompt is not pinned: its window positions were already freed"]
        if not self.pinned.pin(keys[: length + 1], kvs):
            return [f"the system prompt takes more than {self.pinned.limit_bytes} bytes: not kept"]
        return []

    @property
    def num_networks(self) -> int:
        """Number of networks with KV caches: the base, and those of a draft."""
        return len(self._networks)

    def all_prefixes(self) -> list[PinnedPrefix]:
        """Pinned prefixes and the KV cache of all sequences; no pass may run meanwhile.

        Leaves out those that another one contains.
        """
        self._retire()
        for one in self._finished.all:
            self.pinned.pin(one.keys, one.kvs)
        for sequence, kvs in self._begun.items():
            if sequence.num_rows:
                self.pinned.pin(sequence.keys[: sequence.num_rows + 1], kvs)
        found = self.pinned.all
        return [
            one for one in found
            if not any(other is not one and other.holds(one) for other in found)
        ]  # fmt: skip

    def _restored(self, sequence: Sequence, kvs: tuple[Any, ...], held: int) -> int:
        """Positions of the prompt that are cached or restored; never its last."""
        keys, base = sequence.prompt.keys, kvs[0]
        used = kvs if sequence.drafter is not None else (base,)
        usable, pinned = self.pinned.find(keys, len(used))
        if pinned is not None and usable > held:
            with sequence.profile.stage(RESTORE):
                pinned.restore(usable, used)
            held = usable
        return _reach(base.begin(len(keys), min(held, len(keys) - 1), sequence.marks), used)


def _reach(length: int, kvs: Iterable[CachedSequence]) -> int:
    """The length, if all of these can be continued from there; else 0."""
    return length if all(length >= kv.min_length for kv in kvs) else 0


def _free(kvs: tuple[Any, ...]) -> None:
    for kv in kvs:
        kv.free()


def _fork(kvs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Fork the KV caches of a sequence, in all networks or in none."""
    made: list[Any] = []
    try:
        for kv in kvs:
            made.append(kv.fork())  # noqa: PERF401 - those that were made are freed on an error
    except BaseException:
        _free(tuple(made))
        raise
    return tuple(made)


def _max_finished(base: DecoderNetwork, *, frees_positions: bool) -> int:
    """Maximum finished sequences to cache; states of recurrent layers use memory outside blocks."""
    if base.max_batch_size == 1:  # the single cache holds the latest, and where its prompt ended
        return 2 if frees_positions else 1
    states = base.state_bytes
    return min(
        MAX_FINISHED, max(base.max_batch_size, PINNED_BYTES // states if states else sys.maxsize)
    )


def require_loaded(adapter: LoadedAdapter | None) -> None:
    """Raise `RequestError` for an adapter that was unloaded after the request arrived."""
    if adapter is not None and not adapter.is_loaded:
        raise RequestError(f"the adapter {adapter.name!r} was unloaded")
