"""The KV caches of an engine: whose rows they hold, and what of them is not computed again."""

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

LEAST_SHARED = 16  # rows for which it is worth to wait until another has computed them


class KVCacheManager:
    """Whose rows are where, in the caches of the base and of its draft."""

    def __init__(
        self,
        session: DecoderNetwork,
        prefill_rows: int,
        draft_caches: Sized[SequenceCache] = (),
        *,
        no_images: ImageRows | None = None,
        reuses_context: bool = False,
    ) -> None:
        """Begin with caches that hold nobody's rows.

        Args:
            session: the base.
            prefill_rows: rows of a pass while a prompt is read.
            draft_caches: of a draft, whose rows go with the base's.
            no_images: of a base that takes images.
            reuses_context: begin behind the rows that a prompt shares with what is there.
        """
        self.session, self.prefill_rows = session, prefill_rows
        self._draft_caches, self._no_images = tuple(draft_caches), no_images
        self._reuses_context, self.kept = reuses_context, PinnedPrefixes()
        # Rows that a sequence gets at a time
        self.page_rows = session.page_rows if session.max_batch_size > 1 else 1
        self.steps_together = session.max_batch_size > 1  # a pass for all that step side by side
        self._holder: Sequence | None = None  # whose rows the session is about
        self._begun: dict[Sequence, tuple[Any, ...]] = {}  # their contexts in all caches
        self._finished = FinishedSequences((session, *self._draft_caches), _max_finished(session))
        for cache in (session, *self._draft_caches):
            cache.on_shortage(self._forget_one)
        for cache in self._draft_caches:
            cache.close(cache.context)  # rows of passes that were measured
        self._spare_rows: int | None = None  # that are free but for finished answers; None: changed

    @property
    def free_rows(self) -> int:
        """Rows that further sequences may have; any number where the host keeps copies.

        Those of finished answers are among them.
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
        """Share of the rows that are in use by answers that are not over; from any thread."""
        session = self.session
        if not self.steps_together:
            return session.num_rows / session.capacity
        over = [one.contexts[0] for one in self._finished.all]
        over += [contexts[0] for one, contexts in list(self._begun.items()) if one.is_over]
        page, maximum = session.page_rows, session.max_batch_size
        rows = -(-session.capacity // page) * page * maximum
        return 1 - session.free_rows_without(over) / rows

    def close(self) -> None:
        """Let go of the caches, so that their memory is given back at once."""
        for cache in (self.session, *self._draft_caches):
            cache.on_shortage(lambda: False)

    def _forget_one(self) -> bool:
        self._spare_rows = None
        return self._finished.forget_one()

    def admit(self, sequence: Sequence) -> None:
        """Turn to the rows of a sequence; costs nothing where sequences share pages."""
        if self._holder is sequence:
            return
        self._holder = None  # of no sequence, should one of the following fail
        if sequence.context is None:
            self._retire()
            self._begin(sequence)
        else:
            self.session.use(sequence.context)
        self._holder = sequence

    def stand_aside(self) -> None:
        """Turn to rows of nobody: whoever computes now disturbs no answer."""
        self.session.use(self.session.new_context())
        self._holder = None

    def release(self, sequence: Sequence) -> None:
        """Copy the rows of a sequence, so that others may have them."""
        if self._holder is sequence:
            self._holder = None
        if sequence.context is not None:
            self.session.save(sequence.context)

    def waits(self, sequence: Sequence, beside: Iterable[Sequence]) -> bool:
        """Whether the coming pass computes rows for others that a sequence can begin behind.

        Args:
            sequence: may have begun.
            beside: that share the pass.
        """
        if not self._reuses_context or sequence.context is not None:
            return False
        reading = [one for one in beside if one.is_reading]
        if not reading:
            return False
        keys = sequence.prompt.keys
        common = max(count_common(one.prompt.keys, keys) for one in reading)
        return common - self._best(sequence)[0] >= LEAST_SHARED

    def _retire(self) -> None:
        """Let go of answers that are over; the next may use their rows."""
        for sequence in [one for one in self._begun if one.is_over]:
            contexts, self._spare_rows = self._begun.pop(sequence), None
            if sequence.drafter is not None:
                with Confined(sequence.warn):
                    sequence.drafter.drop()
            # Rows of one that failed may be anything, such as what is no number.
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
        """Rows of the prompt that are there, and what goes on behind them."""
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
        """Rows of a prompt that others have, in all caches that it needs, and who has most."""
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
        """Rows that others than sequences have computed."""
        known = [contexts[0] for contexts in self._begun.values()]
        known += [one.contexts[0] for one in self._finished.all]
        if self.session.context not in known:
            self.session.close(self.session.context)

    def _fork(self, contexts: tuple[Any, ...]) -> tuple[Any, ...]:
        """Others with the same rows, in all caches or in none."""
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
        """The answer is complete, all rows of which a sequence has that has just stepped.

        Its newest token may be a stop token, which the next prompt need not have.
        """
        self.session.end_text(len(sequence.keys) - 1)

    def end_prompt(self, sequence: Sequence) -> None:
        """All rows of its prompt are there, and the answer's first token is known.

        A later prompt may part here, as where a template leaves the reasoning of earlier turns
        out. Windows give these rows back while the answer grows: they are kept apart.
        """
        if not (self._reuses_context and self.session.pass_rows):
            return
        contexts, self._spare_rows = self._begun[sequence], None
        self._finished.add(Finished(sequence.keys, self._fork(contexts)))

    def set_up(self, prompt: Prompt) -> None:
        """Tell the base what image rows of a prompt stand for, and its adapter, before it is read.

        Raises:
            RequestError: see `require_loaded`.
        """
        require_loaded(prompt.adapter)
        self.session.context.adapter = prompt.adapter
        if self._no_images is not None:
            self.session.set_images(prompt.images or self._no_images)

    def is_to_keep(self, sequence: Sequence, length: int) -> bool:
        """Whether `keep` is due: at the end, or before windows give rows back."""
        is_last_chance = self.session.pass_rows and sequence.num_rows >= length
        return sequence.finish_reason is not None or bool(is_last_chance)

    def keep(self, sequence: Sequence, length: int) -> list[str]:
        """Keep the first `length` rows of a sequence that has just stepped for later prompts.

        Returns:
            What is to be said to the user.
        """
        if not length:
            return ["nothing was kept: there is no system prompt of its own"]
        contexts = self._turn_to(sequence)
        if length < self.session.least_rows and not self.kept.knows(sequence.prompt.keys[:length]):
            return ["the system prompt is not kept: the answer went on behind a longer text"]
        if not self._copy(contexts, sequence.prompt.keys[: length + 1]):
            return [f"the system prompt takes more than {self.kept.limit_bytes} bytes: not kept"]
        return []

    def _turn_to(self, sequence: Sequence) -> tuple[Any, ...]:
        """Make its rows the current ones of all caches."""
        self._holder, contexts = sequence, self._begun[sequence]
        for cache, context in zip(self._caches, contexts, strict=True):
            cache.use(context)
        return contexts

    def _copy(self, contexts: tuple[Any, ...], keys: list[RowKey]) -> bool:
        """Keep copies of rows, see `PinnedPrefixes.keep`."""
        for cache, context in zip(self._caches, contexts, strict=True):
            cache.use(context)
        return self.kept.keep(keys, self._caches)

    @property
    def _caches(self) -> tuple[Any, ...]:
        return self.session, *self._draft_caches

    @property
    def num_caches(self) -> int:
        """The base's, and those of a draft."""
        return 1 + len(self._draft_caches)

    def contexts(self) -> list[PinnedPrefix]:
        """What is kept, and the rows of answers; no pass may run meanwhile.

        Beginnings of others are left out.
        """
        self._retire()
        for one in self._finished.all:
            self._copy(one.contexts, one.keys)
        for sequence, contexts in self._begun.items():
            if sequence.num_rows:
                self._copy(contexts, sequence.keys[: sequence.num_rows + 1])
        self._holder = None
        found = self.kept.all
        return [
            one for one in found
            if not any(other is not one and other.holds(one) for other in found)
        ]  # fmt: skip

    def _restored(self, sequence: Sequence, held: int) -> int:
        """Rows of the prompt that are there, or come back; its last is always computed."""
        keys = sequence.prompt.keys
        caches = self._caches if sequence.drafter is not None else (self.session,)
        usable, kept = self.kept.find(keys, len(caches))
        if kept is not None and usable > held:
            with sequence.profile.stage(RESTORE):
                kept.restore(usable, caches)
            held = usable
        return self.session.begin_text(len(keys), min(held, len(keys) - 1), sequence.marks)


def _max_finished(session: DecoderNetwork) -> int:
    """Answers whose rows stay; the states of recurrent layers take memory that no page counts."""
    if (
        session.max_batch_size == 1
    ):  # in the one cache there are the latest, and where its prompt ended
        return 2 if session.pass_rows else 1
    states = session.state_bytes
    return min(
        MAX_FINISHED, max(session.max_batch_size, KEPT_BYTES // states if states else sys.maxsize)
    )


def require_loaded(adapter: LoadedAdapter | None) -> None:
    """Raises `RequestError` for an adapter that was unloaded since somebody asked for it."""
    if adapter is not None and not adapter.is_loaded:
        raise RequestError(f"the adapter {adapter.name!r} was unloaded")
