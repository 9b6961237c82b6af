"""Activations between the layers of a feed-forward network, by transformers' names."""

from __future__ import annotations

import onnx_ir as ir

from edgellm.export.onnx.builder import Op


def activate(op: Op, x: ir.Value, activation: str) -> ir.Value:
    """X after one of `ACTIVATIONS`."""
    if activation in ("silu", "swish"):
        return op.Swish(x)
    if activation == "relu2":
        positive = op.Max(x, op.constant(0, op.dtype))
        return op.Mul(positive, positive)
    if activation == "quick_gelu":
        return op.Mul(x, op.Sigmoid(op.Mul(x, op.constant(1.702, op.dtype))))
    return op.Gelu(x, approximate="tanh" if activation == "gelu_pytorch_tanh" else "none")
