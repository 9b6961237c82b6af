"""Heads over a scripted base, see `scripted_sessions`."""

from __future__ import annotations

import numpy as np
from scripted_sessions import FEATURES, Draft, StrictBase


class StrictHeads:
    """See `edgellm.device_runtime.networks.heads.HeadsNetwork`.

    The feature must be of the newest row of the base's cache, unless several sequences swap it
    out in turn. A head assumes that the base takes its likeliest tokens up to the head's own
    position.
    """

    def __init__(
        self, base: StrictBase, draft: Draft, num_heads: int, *, is_shared: bool = False
    ) -> None:
        self.base, self.draft, self.num_heads = base, draft, num_heads
        self.is_shared = is_shared
        self.passes, self.max_batch_size = 0, 1

    def run_batch(self, parts):
        return [self._candidates(*part) for part in parts]

    def _candidates(self, feature, top_k):
        context = FEATURES[int(feature[0])]
        held = tuple(token for token, _ in self.base.rows[: self.base.valid])
        assert self.is_shared or context == held
        self.passes += 1
        ids = np.zeros((self.num_heads, top_k), np.int64)
        log_probs = np.zeros((self.num_heads, top_k), np.float32)
        for head in range(self.num_heads):
            context = (*context, int(self.base.logits_of(context).argmax()))
            candidates, chances = self.draft(context)
            ids[head], log_probs[head] = candidates[:top_k], np.log(chances[:top_k])
        return ids, log_probs
