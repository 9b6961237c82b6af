"""P-EAGLE (arXiv 2602.01469): EAGLE-3 that predicts several tokens in one pass.

The network is EAGLE-3's; see `export.draft_checkpoints.peagle_masks` for the rows that it was
trained with. Taps that are all zero, as no base's are, ask for the learned feature of such a row.
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
    """EAGLE-3's, of taps or of the learned feature."""

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
        magnitudes = op.Max(x, op.Sub(zero, x))  # every device has these
        is_mask = op.GreaterOrEqual(zero, op.ReduceMax(magnitudes, op.constant([2]), keepdims=1))
        return super().__call__(op, op.Where(is_mask, row, x))
