"""A block draft over a scripted base, see `scripted_sessions`."""

from __future__ import annotations

import numpy as np
from scripted_sessions import Draft, StrictDraft

from edgellm.core.errors import LimitError
from edgellm.core.model_spec import BlockSpec
from edgellm.device_runtime.networks.draft import DraftResult


class StrictBlocks(StrictDraft):
    """See `edgellm.device_runtime.networks.block.BlockNetwork`.

    Features must be those of the text. A position of the block assumes that the base takes the
    likeliest tokens up to it; with links it predicts a token for each candidate before it.
    """

    def __init__(
        self,
        capacity: int,
        draft: Draft,
        size: int = 6,
        *,
        from_newest: bool = False,
        is_causal: bool = False,
        links: int = 0,
    ) -> None:
        super().__init__(capacity - size, draft)
        self.block = BlockSpec(
            size=size, mask_token_id=0, from_newest=from_newest, is_causal=is_causal, links=links
        )
        self.passes = 0

    def _run_part(self, part):
        self.current = part.kv
        assert part.hidden is part.position_ids is part.tree_mask is None
        if part.write_index + len(part.token_ids) > self.capacity:
            raise LimitError("rows exceed the capacity")
        self._extend(part.token_ids, self.fuse(part.taps), part.write_index, None)
        self.passes += 1
        return self._predict(len(part.output_rows), part.top_k)

    def _predict(self, rows, top_k):
        shape = rows, top_k
        ids, log_probs = np.zeros(shape, np.int64), np.full(shape, -9, np.float32)
        width = min(top_k, max(self.block.links, 1))
        links = np.full((rows, width, width), -9, np.float32)
        context, before = tuple(self.text), None
        for row in range(0 if self.block.from_newest else 1, rows):
            candidates, chances = self.draft(context)
            ids[row], log_probs[row] = candidates[:top_k], np.log(chances[:top_k])
            for rank in range(width):
                own = context if before is None else (*context[:-1], int(before[rank]))
                known = dict(zip(*self.draft(own), strict=True))
                links[row, rank] = np.log([known.get(int(one), 1e-9) for one in ids[row, :width]])
            context, before = (*context, candidates[0]), ids[row]
        none = np.zeros((rows, 0), np.float32)
        return DraftResult(ids, log_probs, none, links if self.block.links else None)
