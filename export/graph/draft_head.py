"""The head of a draft, with or without the retrieval of candidates by a low-rank head."""

from __future__ import annotations

import onnx_ir as ir

from edgellm.export.checkpoints.weights import Weights
from edgellm.export.draft_checkpoints.low_rank_head import DOWN, UP, LowRankHead
from edgellm.export.graph.draft import likeliest
from edgellm.export.layers.embedding import Embedding
from edgellm.export.layers.linear import Linear
from edgellm.export.onnx.builder import Op


class DraftHead:
    """A linear layer over the draft vocabulary, or its rows of the retrieved candidates.

    Scores of candidates are exact: the low-rank head only chooses the rows.
    """

    def __init__(
        self,
        *,
        weights: Weights,
        size: int,
        count: int,
        low_rank: LowRankHead | None,
        name: str = "lm_head",
    ) -> None:
        """`count`: the draft vocabulary; `name`: of the head's weight, below `weights`."""
        self.low_rank = low_rank
        if low_rank is None:
            self.linear = Linear(weights / name, size, count, bias=False)
            return
        self.rows = Embedding(weights=weights / name, vocab_size=count, size=size)
        self.down = Linear(weights / DOWN, size, low_rank.rank, bias=False)
        self.up = Linear(weights / UP, low_rank.rank, count, bias=False)

    def __call__(self, op: Op, x: ir.Value) -> tuple[ir.Value, ...]:
        """X [1, R, D] -> logits [1, R, N] and, with a low-rank head, their ids int64 [1, R, N].

        Ids are the draft's.
        """
        if self.low_rank is None:
            return (self.linear(op, x),)
        approximate = self.up(op, self.down(op, x))
        _, ids = likeliest(op, approximate, op.constant([self.low_rank.num_candidates]))
        last = op.constant([3])
        logits = op.MatMul(self.rows(op, ids), op.Unsqueeze(x, last))  # [1, R, N, 1]
        return op.Squeeze(logits, last), ids
