"""Feed-forward networks: gated as in Llama (SwiGLU, arXiv 2002.05202), and plain."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import onnx_ir as ir

from edgellm.export.checkpoints.weights import Weights
from edgellm.export.layers.activations import activate
from edgellm.export.layers.linear import Linear
from edgellm.export.onnx.builder import Op


class MLP(Protocol):
    """What stands after attention in a layer."""

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the network; x [1, S, H] -> [1, S, H]."""
        ...


class GatedMLP:
    """`down_proj(activation(gate_proj(x)) * up_proj(x))`."""

    def __init__(
        self,
        *,
        weights: Weights,
        size: int,
        inner_size: int,
        bias: bool,
        activation: str = "silu",
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        gate, up, down = names
        self.gate_proj = Linear(weights / gate, size, inner_size, bias=bias)
        self.up_proj = Linear(weights / up, size, inner_size, bias=bias)
        self.down_proj = Linear(weights / down, inner_size, size, bias=bias)
        self.activation = activation

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the network; x [1, S, H] -> [1, S, H]."""
        gate = activate(op, self.gate_proj(op, x), self.activation)
        return self.down_proj(op, op.Mul(gate, self.up_proj(op, x)))


class FusedGatedMLP:
    """`GatedMLP` with gate and up as one layer."""

    def __init__(
        self,
        *,
        weights: Weights,
        size: int,
        inner_size: int,
        activation: str,
        names: tuple[str, str] = ("gate_up_proj", "down_proj"),
    ) -> None:
        self.gate_up_proj = Linear(weights / names[0], size, 2 * inner_size, bias=False)
        self.down_proj = Linear(weights / names[1], inner_size, size, bias=False)
        self.inner_size = inner_size
        self.activation = activation

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the network; x [1, S, H] -> [1, S, H]."""
        sizes = op.constant(np.full(2, self.inner_size, np.int64))
        gate, up = op.outputs(2, "Split", self.gate_up_proj(op, x), sizes, axis=-1)
        return self.down_proj(op, op.Mul(activate(op, gate, self.activation), up))


class FeedForward:
    """`second(activation(first(x)))`."""

    def __init__(
        self,
        *,
        first: Weights,
        second: Weights,
        sizes: tuple[int, int, int],
        activation: str,
        bias: bool = True,
    ) -> None:
        """`sizes`: input, intermediate, output."""
        self.first = Linear(first, sizes[0], sizes[1], bias=bias)
        self.second = Linear(second, sizes[1], sizes[2], bias=bias)
        self.activation = activation

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the network; x [..., sizes[0]] -> [..., sizes[2]]."""
        return self.second(op, activate(op, self.first(op, x), self.activation))
