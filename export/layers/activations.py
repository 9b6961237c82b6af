"""Activations between the layers of a feed-forward network, by transformers' names."""

from __future__ import annotations

import numpy as np
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


def softplus(op: Op, x: ir.Value) -> ir.Value:
    """`log(1 + exp(x))` of float32 x, by operators that all backends have."""
    bound = op.constant(np.float32(20))  # above it, x is the result
    curve = op.Log(op.Add(op.Exp(op.Min(x, bound)), op.constant(np.float32(1))))
    return op.Max(curve, x)
