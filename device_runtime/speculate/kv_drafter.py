"""Drafters whose network reads the committed text into a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.device_runtime.arrays import (
    F32,
    I64,
    ImageRows,
    LoadedAdapter,
)
from edgellm.device_runtime.speculate.draft_cache import CommittedRows
from edgellm.device_runtime.speculate.drafter import (
    LEAST_RETRIAL_ROWS,
    RETRIAL_ROWS,
    SpecState,
    TreeDrafter,
)
from edgellm.device_runtime.speculate.policy.tree_policy import TreeLimits


class KVDrafter(TreeDrafter):
    """Hands committed rows to the cache; a subclass computes them."""

    def __init__(self, rows: CommittedRows, learned: SpecState, limits: TreeLimits) -> None:
        """Nothing is computed yet; `rows` are the draft's, for the others see `TreeDrafter`."""
        super().__init__(learned, limits, image_ids=rows.image_ids)
        self._rows, self._own = rows, rows.context  # its own; others may be current
        self._adapter: LoadedAdapter | None = None

    def begin(self, token_ids: Sequence[int]) -> None:
        """See `DraftRows.begin`; the current rows are its own from now on."""
        super().begin(token_ids)
        self._own = self._rows.context
        self._own.begin(token_ids, self._adapter)

    def set_adapter(self, adapter: LoadedAdapter | None) -> None:
        """See `Drafter.set_adapter`."""
        self._adapter = adapter

    def set_images(self, images: ImageRows) -> None:
        """The images of the answer that begins."""
        self._rows.context.set_images(images)

    def observe(self, next_token_ids: I64, taps: F32) -> None:
        """Committed rows: features [M, T*H] and the token that follows each, int64 [M]."""
        self._own.observe(next_token_ids, taps)

    def _skip_what_was_missed(self) -> None:
        """A network that is tried again reads the newest rows only."""
        if self._controller.is_retrial:
            self._own.skip(max(RETRIAL_ROWS // self.batch_load.answers, LEAST_RETRIAL_ROWS))
