"""Root-mean-square normalization (arXiv 1910.07467; ONNX RMSNormalization-23) and layer norm."""

from __future__ import annotations

import onnx_ir as ir

from edgellm.export.op import Op
from edgellm.export.weights import Weights


class RMSNorm:
    """`x / rms(x) * weight` over the last axis, computed in float32."""

    def __init__(self, weights: Weights, size: int, epsilon: float) -> None:
        self.weights = weights
        self.size = size
        self.epsilon = epsilon

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the layer; x [..., size] -> [..., size]."""
        with op.scope(self.weights.prefix.rstrip(".")):
            stored = self.weights.take("weight", (self.size,), op.dtype)
            weight = op.cast(op.parameter(stored), op.dtype)
            return op.RMSNormalization(x, weight, axis=-1, epsilon=self.epsilon)


class LayerNorm:
    """`(x - mean(x)) / deviation(x) * weight + bias` over the last axis, computed in float32."""

    def __init__(self, weights: Weights, size: int, epsilon: float) -> None:
        self.weights = weights
        self.size = size
        self.epsilon = epsilon

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the layer; x [..., size] -> [..., size]."""
        with op.scope(self.weights.prefix.rstrip(".")):
            weight, bias = (
                op.cast(op.parameter(self.weights.take(name, (self.size,), op.dtype)), op.dtype)
                for name in ("weight", "bias")
            )
            return op.LayerNormalization(x, weight, bias, axis=-1, epsilon=self.epsilon)
