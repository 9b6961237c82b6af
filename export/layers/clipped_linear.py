"""Linear layers of Gemma 4's encoders, with bounds of their inputs and outputs."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from edgellm.core.errors import BrokenArtifactError
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.layers.linear import Linear
from edgellm.export.onnx.builder import Op


class ClippedLinear:
    """A linear layer, whose inputs and outputs may be clipped to bounds of the checkpoint."""

    def __init__(self, weights: Weights, sizes: tuple[int, int], *, is_clipped: bool) -> None:
        """`sizes`: input, output."""
        self.weights, self.is_clipped = weights, is_clipped
        self.linear = Linear(weights / "linear", *sizes, bias=False)

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the layer; x [..., in] -> [..., out]."""
        return self._clipped(op, self.linear(op, self._clipped(op, x, "input")), "output")

    def _clipped(self, op: Op, x: ir.Value, side: str) -> ir.Value:
        if not self.is_clipped:
            return x
        least, maximum = (self.weights.number(f"{side}_{end}") for end in ("min", "max"))
        if not least <= maximum:
            raise BrokenArtifactError(
                f"{self.weights.prefix}{side}_min = {least} is not below {side}_max = {maximum}",
                hint="the checkpoint is damaged; fetch it again",
            )
        with op.scope(self.weights.prefix.rstrip(".")):
            return clip(op, x, least, maximum)


def clip(op: Op, x: ir.Value, least: float, maximum: float) -> ir.Value:
    """X between bounds; no node if they are infinite or beyond the activations' type."""
    if math.isinf(least) and math.isinf(maximum):
        return x
    limits = np.finfo(op.dtype.numpy())
    bounds = max(least, float(limits.min)), min(maximum, float(limits.max))
    return op.Clip(x, *(op.constant(bound, op.dtype) for bound in bounds))
