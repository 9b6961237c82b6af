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
    RowKey,
)
from edgellm.device_runtime.engine.profile import RESTORE
from edgellm.device_runtime.engine.prompt import Prompt
from edgellm.device_runtime.engine.sequence import Sequence
from edgellm.device_runtime.faults import Confined
from edgellm.device_runtime.kv_cache.prefix_cache import (
    KEPT_BYTES,
    PinnedPrefix,
    PinnedPrefixes,
    SequenceCache,
    count_common,
)
from edgellm.device_runtime.kv_cache.prefix_pool import MAX_FINISHED, Finished, FinishedSequences
from edgellm.device_runtime.networks.decoder import DecoderNetwork

MIN_SHARED = 16  # minimum shared positions that are worth waiting for


class KVCacheManager:
    """The KV caches of the base and its draft, by sequence."""

    def __init__(
        self,
        session: DecoderNetwork,
        prefill_rows: int,
        draft_caches: Sized[SequenceCache] = (),
        *,
        no_images: ImageRows | None = None,
        reuses_context: bool = False,
    ) -> None:
        """Start with empty caches.

        Args:
            session: the base.
            prefill_rows: tokens of a prefill chunk.
            draft_caches: caches of a draft, which follow the base's.
            no_images: the empty image input, for a base that takes images.
            reuses_context: reuse cached positions that a prompt shares with earlier texts.
        """
        self.session, self.prefill_rows = session, prefill_rows
        self._draft_caches, self._no_images = tuple(draft_caches), no_images
        self._reuses_context, self.kept = reuses_context, PinnedPrefixes()
        # Positions of a KV block
        self.page_rows = session.page_rows if session.max_batch_size > 1 else 1
        self.steps_together = session.max_batch_size > 1  # whether sequences share passes
        self._current: Sequence | None = None  # whose KV cache is current
        self._begun: dict[Sequence, tuple[Any, ...]] = {}  # contexts of sequences in all caches
        self._finished = FinishedSequences((session, *self._draft_caches), _max_finished(session))
        for cache in (session, *self._draft_caches):
            cache.on_shortage(self._forget_one)
        for cache in self._draft_caches:
            cache.close(cache.context)  # of timing passes
        self._spare_rows: int | None = None  # positions that eviction would free; None: unknown

    @property
    def free_rows(self) -> int:
        """Free positions for further sequences; unlimited if the host keeps copies.

        Includes those of finished sequences, which can be evicted.
        """
        if not self.steps_together:
            return sys.maxsize
        self._retire()
        free = self.session.free_rows or 0
        if not self._finished.all:
            return free
        if self._spare_rows is None:
            contexts = [one.contexts[0] for one in self._finished.all]
            self._spare_rows = self.session.free_rows_without(contexts) - free
        return free + self._spare_rows

    @property
    def usage(self) -> float:
        """Share of the KV cache used by running sequences; from any thread."""
        session = self.session
        if not self.steps_together:
            return session.num_rows / session.capacity
        over = [one.contexts[0] for one in self._finished.all]
        over += [contexts[0] for one, contexts in list(self._begun.items()) if one.is_over]
        page, maximum = session.page_rows, session.max_batch_size
        rows = -(-session.capacity // page) * page * maximum
        return 1 - session.free_rows_without(over) / rows

    def close(self) -> None:
        """Release the caches, so that their memory is freed at once."""
        for cache in (self.session, *self._draft_caches):
            cache.on_shortage(lambda: False)

    def _forget_one(self) -> bool:
        self._spare_rows = None
        return self._finished.forget_one()

    def admit(self, sequence: Sequence) -> None:
        """Make a sequence's KV cache current; free of cost if sequences share blocks."""
        if self._current is sequence:
            return
        self._current = None  # of no sequence, if one of the following fails
        if sequence.context is None:
            self._retire()
            self._begin(sequence)
        else:
            self.session.use(sequence.context)
        self._current = sequence

    def use_scratch(self) -> None:
        """Switch to a scratch KV cache, so that other computations affect no sequence."""
        self.session.use(self.session.new_context())
        self._current = None

    def release(self, sequence: Sequence) -> None:
        """Swap out the KV cache of a sequence, so that others can use its blocks."""
        if self._current is sequence:
            self._current = None
        if sequence.context is not None:
            self.session.save(sequence.context)

    def should_wait(self, sequence: Sequence, others: Iterable[Sequence]) -> bool:
        """Whether to wait for the next pass, which computes a prefix that a sequence can reuse.

        Args:
            sequence: may have started.
            others: other sequences of the pass.
        """
        if not self._reuses_context or sequence.context is not None:
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
            contexts, self._spare_rows = self._begun.pop(sequence), None
            if sequence.drafter is not None:
                with Confined(sequence.warn):
                    sequence.drafter.drop()
            # The KV cache of a failed sequence may hold anything, such as NaN.
            if self._reuses_context and sequence.num_rows and sequence.failure is None:
                keys = sequence.keys[: sequence.num_rows + 1]
                self._finished.add(Finished(keys, contexts))
            else:
                self._close(contexts)

    def _begin(self, sequence: Sequence) -> None:
        drafter, no_images = sequence.drafter, self._no_images
        held, contexts = self._contexts_for(sequence)
        self._begun[sequence] = contexts
        sequence.context = contexts[0]
        for cache, context in zip(self._caches, contexts, strict=True):
            cache.use(context)
        self.set_up(sequence.prompt)
        if drafter is not None:
            drafter.set_adapter(sequence.prompt.adapter)
        if drafter is not None and no_images is not None:
            drafter.set_images(sequence.prompt.images or no_images)
        sequence.reused = sequence.num_rows = self._restored(sequence, held)
        sequence.profile.prompt_tokens.append(len(sequence.prompt.token_ids))
        sequence.profile.reused_tokens.append(sequence.reused)

    def _contexts_for(self, sequence: Sequence) -> tuple[int, tuple[Any, ...]]:
        """The reused length of the prompt, and the contexts that the sequence continues."""
        self._spare_rows = None
        self._close_unknown()
        held, found = self._best(sequence)
        if isinstance(found, Finished):
            if not self.steps_together or (held and held >= len(found.keys) - 1):
                return held, self._finished.take(found)
            if held:
                self._finished.use(found)
            found = found.contexts
        if found is not None and held:
            return held, self._fork(found)
        return 0, tuple(cache.new_context() for cache in self._caches)

    def _best(self, sequence: Sequence) -> tuple[int, Finished | tuple[Any, ...] | None]:
        """The longest cached prefix of a prompt, in all caches that it needs, and its owner."""
        if not self._reuses_context:
            return 0, None
        keys = sequence.prompt.keys
        needed = len(self._caches) if sequence.drafter is not None else 1
        best: tuple[int, Finished | tuple[Any, ...] | None] = (-1, None)
        for found in (*self._finished.all, *self._begun.values()):
            contexts = found.contexts if isinstance(found, Finished) else found
            pairs = zip(self._caches[:needed], contexts, strict=False)
            held = min(cache.held_by(context, keys) for cache, context in pairs)
            if held > best[0] or (held == best[0] and isinstance(found, Finished)):
                best = held, found
        return max(best[0], 0), best[1]

    def _close_unknown(self) -> None:
        """Free a current context that belongs to no sequence."""
        known = [contexts[0] for contexts in self._begun.values()]
        known += [one.contexts[0] for one in self._finished.all]
        if self.session.context not in known:
            self.session.close(self.session.context)

    def _fork(self, contexts: tuple[Any, ...]) -> tuple[Any, ...]:
        """Fork contexts, in all caches or in none."""
        made: list[Any] = []
        try:
            for cache, context in zip(self._caches, contexts, strict=True):
                made.append(cache.fork(context))
        except BaseException:
            for cache, context in zip(self._caches, made, strict=False):
                cache.close(context)
            raise
        return tuple(made)

    def _close(self, contexts: tuple[Any, ...]) -> None:
        for cache, context in zip(self._caches, contexts, strict=True):
            cache.close(context)

    def end(self, sequence: Sequence) -> None:
        """Mark the end of the output of a sequence that has just stepped.

        Its newest token may be a stop token, which the next prompt need not contain.
        """
        self.session.end_text(len(sequence.keys) - 1)

    def end_prompt(self, sequence: Sequence) -> None:
        """Cache the whole prompt when the first output token is known.

        A later prompt may diverge here, since templates drop the reasoning of earlier turns.
        Window layers free these positions during decoding, so they are forked.
        """
        if not (self._reuses_context and self.session.pass_rows):
            return
        contexts, self._spare_rows = self._begun[sequence], None
        self._finished.add(Finished(sequence.keys, self._fork(contexts)))

    def set_up(self, prompt: Prompt) -> None:
        """Set a prompt's images and adapter in the base, before prefill.

        Raises:
            RequestError: see `require_loaded`.
        """
        require_loaded(prompt.adapter)
        self.session.context.adapter = prompt.adapter
        if self._no_images is not None:
            self.session.set_images(prompt.images or self._no_images)

    def is_to_keep(self, sequence: Sequence, length: int) -> bool:
        """Whether `keep` is due: at the end, or before window layers free positions."""
        is_last_chance = self.session.pass_rows and sequence.num_rows >= length
        return sequence.finish_reason is not None or bool(is_last_chance)

    def keep(self, sequence: Sequence, length: int) -> list[str]:
        """Pin the first `length` positions of a sequence that has just stepped for later prompts.

        Returns:
            Warnings for the user.
        """
        if not length:
            return ["nothing was pinned: the prompt has no separate system prompt"]
        contexts = self._make_current(sequence)
        if length < self.session.least_rows and not self.kept.knows(sequence.prompt.keys[:length]):
            return ["the system prompt is not pinned: its window positions were already freed"]
        if not self._copy(contexts, sequence.prompt.keys[: length + 1]):
            return [f"the system prompt takes more than {self.kept.limit_bytes} bytes: not kept"]
        return []

    def _make_current(self, sequence: Sequence) -> tuple[Any, ...]:
        """Make a sequence's contexts current in all caches."""
        self._current, contexts = sequence, self._begun[sequence]
        for cache, context in zip(self._caches, contexts, strict=True):
            cache.use(context)
        return contexts

    def _copy(self, contexts: tuple[Any, ...], keys: list[RowKey]) -> bool:
        """Pin copies of positions, see `PinnedPrefixes.keep`."""
        for cache, context in zip(self._caches, contexts, strict=True):
            cache.use(context)
        return self.kept.keep(keys, self._caches)

    @property
    def _caches(self) -> tuple[Any, ...]:
        return self.session, *self._draft_caches

    @property
    def num_caches(self) -> int:
        """Number of caches: the base's, and those of a draft."""
        return 1 + len(self._draft_caches)

    def contexts(self) -> list[PinnedPrefix]:
        """Pinned prefixes and the KV cache of all sequences; no pass may run meanwhile.

        Leaves out those that another one contains.
        """
        self._retire()
        for one in self._finished.all:
            self._copy(one.contexts, one.keys)
        for sequence, contexts in self._begun.items():
            if sequence.num_rows:
                self._copy(contexts, sequence.keys[: sequence.num_rows + 1])
        self._current = None
        found = self.kept.all
        return [
            one for one in found
            if not any(other is not one and other.holds(one) for other in found)
        ]  # fmt: skip

    def _restored(self, sequence: Sequence, held: int) -> int:
        """Positions of the prompt that are cached or restored; never its last."""
        keys = sequence.prompt.keys
        caches = self._caches if sequence.drafter is not None else (self.session,)
        usable, kept = self.kept.find(keys, len(caches))
        if kept is not None and usable > held:
            with sequence.profile.stage(RESTORE):
                kept.restore(usable, caches)
            held = usable
        return self.session.begin_text(len(keys), min(held, len(keys) - 1), sequence.marks)


def _max_finished(session: DecoderNetwork) -> int:
    """Maximum finished sequences to cache; states of recurrent layers use memory outside blocks."""
    if session.max_batch_size == 1:  # the single cache holds the latest, and where its prompt ended
        return 2 if session.pass_rows else 1
    states = session.state_bytes
    return min(
        MAX_FINISHED, max(session.max_batch_size, KEPT_BYTES // states if states else sys.maxsize)
    )


def require_loaded(adapter: LoadedAdapter | None) -> None:
    """Raise `RequestError` for an adapter that was unloaded after the request arrived."""
    if adapter is not None and not adapter.is_loaded:
        raise RequestError(f"the adapter {adapter.name!r} was unloaded")
