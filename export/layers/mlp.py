"""The gated feed-forward network of Llama (SwiGLU, arXiv 2002.05202)."""

from __future__ import annotations

import onnx_ir as ir

from edgellm.export.layers.linear import Linear
from edgellm.export.op import Op
from edgellm.export.weights import Weights


class GatedMLP:
    """`down_proj(swish(gate_proj(x)) * up_proj(x))`."""

    def __init__(self, weights: Weights, size: int, inner_size: int, *, bias: bool) -> None:
        self.gate_proj = Linear(weights / "gate_proj", size, inner_size, bias=bias)
        self.up_proj = Linear(weights / "up_proj", size, inner_size, bias=bias)
        self.down_proj = Linear(weights / "down_proj", inner_size, size, bias=bias)

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the network; x [1, S, H] -> [1, S, H]."""
        gate = op.Swish(self.gate_proj(op, x))
        return self.down_proj(op, op.Mul(gate, self.up_proj(op, x)))
