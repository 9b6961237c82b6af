"""Root-mean-square normalization (arXiv 1910.07467; ONNX RMSNormalization-23) and layer norm."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm.export.checkpoints.weights import StoredTensor, Weights
from edgellm.export.onnx.builder import Op


class RMSNorm:
    """`x / rms(x) * weight` over the last axis, computed in float32."""

    def __init__(self, weights: Weights, size: int, epsilon: float) -> None:
        self.weights = weights
        self.size = size
        self.epsilon = epsilon

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the layer; x [..., size] -> [..., size]."""
        with op.scope(self.weights.prefix.rstrip(".")):
            weight = op.cast(op.parameter(self._weight(op)), op.dtype)
            return op.RMSNormalization(x, weight, axis=-1, epsilon=self.epsilon)

    def _weight(self, op: Op) -> StoredTensor:
        return self.weights.take("weight", (self.size,), op.dtype)


class UnweightedRMSNorm:
    """`x / rms(x)` over the last axis, computed in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        self.size = size
        self.epsilon = epsilon

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the layer; x [..., size] -> [..., size]."""
        ones = op.constant(np.ones(self.size), op.dtype)
        return op.RMSNormalization(x, ones, axis=-1, epsilon=self.epsilon)


class ShiftedRMSNorm(RMSNorm):
    """`x / rms(x) * (1 + weight)`, as Gemma stores its norms."""

    def _weight(self, op: Op) -> StoredTensor:
        return self.weights.take_shifted("weight", (self.size,), op.dtype, 1.0)


class LayerNorm:
    """`(x - mean(x)) / deviation(x) * weight + bias` over the last axis, computed in float32."""

    parameters = ("weight", "bias")

    def __init__(self, weights: Weights, size: int, epsilon: float) -> None:
        self.weights = weights
        self.size = size
        self.epsilon = epsilon

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the layer; x [..., size] -> [..., size]."""
        with op.scope(self.weights.prefix.rstrip(".")):
            values = (
                op.cast(op.parameter(self.weights.take(name, (self.size,), op.dtype)), op.dtype)
                for name in self.parameters
            )
            return op.LayerNormalization(x, *values, axis=-1, epsilon=self.epsilon)


class UnbiasedLayerNorm(LayerNorm):
    """Layer norm without a bias."""

    parameters = ("weight",)
