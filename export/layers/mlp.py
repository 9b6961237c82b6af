"""Feed-forward networks: the gated one of Llama (SwiGLU, arXiv 2002.05202) and the plain one."""

from __future__ import annotations

import onnx_ir as ir

from edgellm.export.layers.linear import Linear
from edgellm.export.op import Op
from edgellm.export.weights import Weights

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "quick_gelu")


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


class FeedForward:
    """`second(activation(first(x)))`, both layers with biases."""

    def __init__(
        self, first: Weights, second: Weights, sizes: tuple[int, int, int], activation: str
    ) -> None:
        """`sizes`: of the input, between the layers, of the output; one of `ACTIVATIONS`."""
        self.first = Linear(first, sizes[0], sizes[1], bias=True)
        self.second = Linear(second, sizes[1], sizes[2], bias=True)
        self.activation = activation

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the network; x [..., sizes[0]] -> [..., sizes[2]]."""
        return self.second(op, _activate(op, self.first(op, x), self.activation))


def _activate(op: Op, x: ir.Value, activation: str) -> ir.Value:
    if activation == "quick_gelu":
        return op.Mul(x, op.Sigmoid(op.Mul(x, op.constant(1.702, op.dtype))))
    return op.Gelu(x, approximate="tanh" if activation == "gelu_pytorch_tanh" else "none")
