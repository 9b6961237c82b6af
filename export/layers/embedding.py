"""Token embedding and the output head that may share its table."""

from __future__ import annotations

import onnx_ir as ir

from edgellm.export.op import Op
from edgellm.export.weights import Weights


class Embedding:
    """Rows of a table [vocab_size, size] by token id, times `scale`."""

    def __init__(
        self, weights: Weights, vocab_size: int, size: int, scale: float | None = None
    ) -> None:
        self.weights = weights
        self.shape = (vocab_size, size)
        self.scale = scale

    def __call__(self, op: Op, token_ids: ir.Value) -> ir.Value:
        """Append the look-up; token_ids int64 [...] -> [..., size]."""
        with op.scope(self.weights.prefix.rstrip(".")):
            table = op.parameter(self.weights.take("weight", self.shape, op.dtype))
            rows = op.Gather(table, token_ids, axis=0)
            # Cast after the look-up: a cast table would be folded into a second, larger copy.
            rows = rows if table.dtype == op.dtype else op.Cast(rows, to=int(op.dtype))
            return rows if self.scale is None else op.Mul(rows, op.constant(self.scale, op.dtype))
