"""Drafters with a network that has its own KV cache of the committed tokens."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.device_runtime.arrays import (
    F32,
    I64,
    ImageRows,
    LoadedAdapter,
)
from edgellm.device_runtime.speculate.draft_cache import DraftKV, DraftKVCaches
from edgellm.device_runtime.speculate.drafter import (
    LEAST_RETRIAL_ROWS,
    RETRIAL_ROWS,
    SpecState,
    TreeDrafter,
)
from edgellm.device_runtime.speculate.policy.tree_policy import TreeLimits


class KVDrafter(TreeDrafter):
    """Adds committed positions to the draft's KV cache; a subclass computes them."""

    def __init__(self, caches: DraftKVCaches, learned: SpecState, limits: TreeLimits) -> None:
        """Compute nothing; `caches` are the draft's, for the others see `TreeDrafter`."""
        super().__init__(learned, limits, image_ids=caches.image_ids)
        self._network, self._kv = caches.network, caches.new_kv()
        self._adapter: LoadedAdapter | None = None

    def begin(self, token_ids: Sequence[int]) -> None:
        """See `DraftKV.begin`."""
        super().begin(token_ids)
        self._kv.begin(token_ids, self._adapter)

    def use_kv(self, kv: DraftKV) -> None:
        """See `Drafter.use_kv`."""
        self._kv = kv

    def set_adapter(self, adapter: LoadedAdapter | None) -> None:
        """See `Drafter.set_adapter`."""
        self._adapter = adapter

    def set_images(self, images: ImageRows) -> None:
        """Set the images of the sequence that begins."""
        self._kv.set_images(images)

    def observe(self, next_token_ids: I64, taps: F32) -> None:
        """Committed positions: hidden states [M, T*H] and each one's next token, int64 [M]."""
        self._kv.observe(next_token_ids, taps)

    def _skip_what_was_missed(self) -> None:
        """After a pause, prefill only the newest positions."""
        if self._controller.is_retrial:
            self._kv.skip(max(RETRIAL_ROWS // self.batch_load.answers, LEAST_RETRIAL_ROWS))
