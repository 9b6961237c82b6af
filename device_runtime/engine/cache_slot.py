"""The KV caches of an engine: whose rows they hold, and what of them is not computed again."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Sized

from edgellm.device_runtime.engine.prefix_cache import KeptContexts, KeptRows, RowCache
from edgellm.device_runtime.engine.profile import RESTORE
from edgellm.device_runtime.engine.prompt import Prompt
from edgellm.device_runtime.engine.sequence import Sequence
from edgellm.device_runtime.sessions import ImageRows
from edgellm.device_runtime.sessions.contexts import Context
from edgellm.device_runtime.sessions.decoder import DecoderSession


class CacheSlot:
    """Whose rows are where, in the caches of the base and of its draft."""

    def __init__(
        self,
        session: DecoderSession,
        prefill_rows: int,
        draft_caches: Sized[RowCache] = (),
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
        self._reuses_context, self.kept = reuses_context, KeptContexts()
        # Whether sequences that step side by side share a pass
        self.steps_together = session.most_parts > 1
        # Rows that a sequence gets at a time
        self.page_rows = session.page_rows if self.steps_together else 1
        self._holder: Sequence | None = None  # whose rows session and draft are about
        self._begun: list[Sequence] = []  # whose rows are somewhere

    @property
    def free_rows(self) -> int:
        """Rows that further sequences may have; any number where the host keeps copies."""
        if not self.steps_together:
            return sys.maxsize
        self._retire()
        return self.session.free_rows or 0

    @property
    def usage(self) -> float:
        """Share of the rows that are in use."""
        session = self.session
        if not self.steps_together:
            return session.num_rows / session.capacity
        return 1 - (session.free_rows or 0) / (session.capacity * session.most_parts)

    def admit(self, sequence: Sequence) -> None:
        """Turn to the rows of a sequence; costs nothing where sequences share pages."""
        if self._holder is sequence:
            return
        before = self._holder
        self.evict()
        if sequence.context is None:
            self._take_context(sequence, before)
            self._begin(sequence)
        else:
            self.session.use(sequence.context)
            if sequence.drafter is not None:
                sequence.drafter.swap_in()
        self._holder = sequence

    def evict(self) -> None:
        """The sequence that drafts steps aside: others are about to."""
        holder = self._holder
        goes_on = holder is not None and (self.steps_together or not holder.is_over)
        if holder is not None and holder.drafter is not None and goes_on:
            holder.drafter.swap_out()
        self._holder = None

    def release(self, sequence: Sequence) -> None:
        """Copy the rows of a sequence, so that others may have them."""
        if self._holder is sequence:
            self.evict()
        if sequence.context is not None:
            self.session.save(sequence.context)

    def _take_context(self, sequence: Sequence, before: Sequence | None) -> None:
        """Where its rows go: those of the sequence before may be of use to it."""
        session = self.session
        if before is None:
            sequence.context = session.context
        elif before.is_over:
            sequence.context, before.context = before.context, None
        elif self._reuses_context:
            sequence.context = session.fork()
        else:
            sequence.context = Context()
        assert sequence.context is not None
        self._retire()
        session.use(sequence.context)
        self._begun.append(sequence)

    def _retire(self) -> None:
        """Give the rows of answers that are over back, but for those that the next may use."""
        for sequence in [one for one in self._begun if one.is_over and one is not self._holder]:
            self._begun.remove(sequence)
            if sequence.drafter is not None:
                sequence.drafter.drop()
            if sequence.context is not None:
                self.session.close(sequence.context)

    def _begin(self, sequence: Sequence) -> None:
        self.set_images(sequence.prompt)
        if sequence.drafter is not None and self._no_images is not None:
            sequence.drafter.set_images(sequence.prompt.images or self._no_images)
        sequence.reused = sequence.num_rows = self._reuse(sequence)
        sequence.profile.prompt_tokens.append(len(sequence.prompt.token_ids))
        sequence.profile.reused_tokens.append(sequence.reused)

    def set_images(self, prompt: Prompt) -> None:
        """Tell the base what image rows of a prompt stand for, before it is read."""
        if self._no_images is not None:
            self.session.set_images(prompt.images or self._no_images)

    def keep(self, sequence: Sequence, length: int) -> list[str]:
        """Keep the first `length` rows of a sequence that has just stepped for later prompts.

        Returns:
            What is to be said to the user.
        """
        if not length:
            return ["nothing was kept: there is no system prompt of its own"]
        self.admit(sequence)
        caches = self.session, *self._draft_caches
        if not self.kept.keep(sequence.prompt.keys[: length + 1], caches):
            return [f"the system prompt takes more than {self.kept.limit_bytes} bytes: not kept"]
        return []

    @property
    def num_caches(self) -> int:
        """The base's, and those of a draft."""
        return 1 + len(self._draft_caches)

    def contexts(self) -> list[KeptRows]:
        """What is kept, and the rows of the latest answer; no pass may run meanwhile.

        Beginnings of others are left out.
        """
        if self._holder is not None and self._holder.num_rows:
            keys = self._holder.keys[: self._holder.num_rows + 1]
            self.kept.keep(keys, (self.session, *self._draft_caches))
        found = self.kept.all
        return [
            one for one in found
            if not any(other is not one and other.holds(one) for other in found)
        ]  # fmt: skip

    def _reuse(self, sequence: Sequence) -> int:
        """Rows of the prompt that the caches hold or get back; its last is always computed."""
        keys = sequence.prompt.keys
        drafts = self._draft_caches if sequence.drafter is not None else ()
        caches: list[RowCache] = [self.session, *drafts]
        held = min(cache.held(keys) for cache in caches) if self._reuses_context else 0
        usable, kept = self.kept.find(keys, len(caches))
        if kept is not None and usable > held:
            with sequence.profile.stage(RESTORE):
                kept.restore(usable, caches)
            held = usable
        return min(held, len(keys) - 1)
