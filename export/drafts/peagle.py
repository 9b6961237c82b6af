"""P-EAGLE (arXiv 2602.01469): EAGLE-3 that predicts several tokens in one pass.

The network is EAGLE-3's; see `export.draft_checkpoints.peagle_masks` for its mask tokens. Taps that
are all zero, which a base never outputs, stand for the learned hidden state of a mask token.
"""

from __future__ import annotations

import onnx_ir as ir

from edgellm.export.checkpoints.weights import Weights
from edgellm.export.draft_checkpoints.config import DraftConfig
from edgellm.export.draft_checkpoints.peagle_masks import FEATURE
from edgellm.export.drafts import eagle3
from edgellm.export.onnx.builder import Op

Model = eagle3.Model


class Fuse(eagle3.Fuse):
    """EAGLE-3's `Fuse`, of taps or of the learned hidden state."""

    def __init__(self, config: DraftConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.weights = weights

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the graph."""
        info = self.weights.info(FEATURE)
        assert info is not None
        width = len(info.shape) * (1,)
        stored = self.weights.take(FEATURE, (*width[1:], self.width), op.dtype)
        learned = op.cast(op.parameter(stored), op.dtype)
        row = op.Reshape(learned, op.constant([1, 1, self.width]))
        zero = op.constant(0, op.dtype)
        magnitudes = op.Max(x, op.Sub(zero, x))  # all devices support these
        is_mask = op.GreaterOrEqual(zero, op.ReduceMax(magnitudes, op.constant([2]), keepdims=1))
        return super().__call__(op, op.Where(is_mask, row, x))
