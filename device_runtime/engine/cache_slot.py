"""The KV caches of an engine: whose rows they hold, and what of them is not computed again."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Sized
from typing import Any

from numpy.typing import NDArray

from edgellm.device_runtime.engine.prefix_cache import KeptContexts, RowCache
from edgellm.device_runtime.engine.profile import RESTORE
from edgellm.device_runtime.engine.prompt import Prompt
from edgellm.device_runtime.engine.sequence import Sequence
from edgellm.device_runtime.sessions import ImageRows
from edgellm.device_runtime.sessions.decoder import DecoderSession


class CacheSlot:
    """The caches of the base and of its draft, for one sequence at a time."""

    steps_together = False  # sequences that step side by side take a pass each, in turn
    page_rows = 1  # in which sequences get rows
    free_rows = sys.maxsize  # that further sequences may have: the host keeps copies

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
        self._holder: Sequence | None = None

    def admit(self, sequence: Sequence) -> None:
        """Let a sequence have the caches; costs nothing where it has them."""
        if self._holder is sequence:
            return
        self.evict()
        self.set_images(sequence.prompt)
        if sequence.rows is None:
            self._begin(sequence)
        else:
            self._swap_in(sequence, sequence.rows)
        self._holder = sequence

    def evict(self) -> None:
        """Copy the rows of the sequence that has the caches: others are about to be written."""
        holder = self._holder
        if holder is not None and not holder.is_over:
            if holder.drafter is not None:
                holder.drafter.swap_out()
            holder.rows = self.session.read_rows(holder.num_rows)
        self._holder = None

    @property
    def usage(self) -> float:
        """Share of the rows that are in use."""
        return self.session.num_rows / self.session.capacity

    def release(self, sequence: Sequence) -> None:
        """Copy the rows of a sequence, so that others may have them."""
        if self._holder is sequence:
            self.evict()

    def _swap_in(self, sequence: Sequence, rows: NDArray[Any]) -> None:
        self.session.write_rows(rows, sequence.keys)
        if sequence.drafter is not None:
            sequence.drafter.swap_in()
        sequence.rows = None

    def _begin(self, sequence: Sequence) -> None:
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
        """Keep the first `length` rows of a sequence, which has the caches, for later prompts.

        Returns:
            What is to be said to the user.
        """
        if not length:
            return ["nothing was kept: there is no system prompt of its own"]
        caches = self.session, *self._draft_caches
        if not self.kept.keep(sequence.prompt.keys[: length + 1], caches):
            return [f"the system prompt takes more than {self.kept.limit_bytes} bytes: not kept"]
        return []

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
