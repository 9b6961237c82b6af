"""Gated delta net (arXiv 2412.06464): linear attention with decay and the delta rule.

S tokens, H value heads, J key heads, each shared by H / J value heads; dk and dv are head sizes. A
head has C decays: one, or one for each channel of its keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.weights import StoredTensor, Weights
from edgellm.export.config.reader import ConfigReader
from edgellm.export.layers.attention import PassState, merge_heads, split_heads
from edgellm.export.layers.recurrent import convolve, floats, keep_matrix
from edgellm.export.onnx.builder import Op
from edgellm.export.onnx.functions.attention import call
from edgellm.export.onnx.functions.delta_rule import gated_delta_rule

_FLOAT = ir.DataType.FLOAT
_EPSILON = 1e-6  # of a key's and a query's length
# Separate convolutions of some checkpoints
CONVOLUTIONS = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSizes:
    """Sizes of a layer."""

    key_heads: int  # J
    value_heads: int  # H
    key_dim: int  # dk
    value_dim: int  # dv
    window: int  # kernel size of the convolution
    by_channel: bool = False  # whether C is dk, not 1

    @classmethod
    def read(cls, reader: ConfigReader) -> DeltaSizes:
        """Sizes from Qwen's configs; raises `UnsupportedModelError` for wrong heads."""
        found = cls(
            key_heads=reader.positive("linear_num_key_heads", 16),
            value_heads=reader.positive("linear_num_value_heads", 32),
            key_dim=reader.positive("linear_key_head_dim", 128),
            value_dim=reader.positive("linear_value_head_dim", 128),
            window=reader.positive("linear_conv_kernel_dim", 4),
        )
        return found.checked()

    def checked(self) -> DeltaSizes:
        """These sizes; raises `UnsupportedModelError` for wrong heads."""
        if self.value_heads % self.key_heads or self.window < 2:
            raise UnsupportedModelError(f"config.json: linear attention of {self}")
        return self

    @property
    def keys(self) -> int:
        """J * dk."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """H * dv."""
        return self.value_heads * self.value_dim

    @property
    def decays(self) -> int:
        """C."""
        return self.key_dim if self.by_channel else 1

    @property
    def convolved(self) -> int:
        """Width of queries, keys and values."""
        return 2 * self.keys + self.values


class DeltaRule:
    """The part between the projections: convolution, delta rule and states."""

    def __init__(self, sizes: DeltaSizes, weights: Weights, rows: str) -> None:
        """`rows`: the symbol of S."""
        self.sizes, self.weights, self.rows = sizes, weights, rows

    def __call__(
        self, op: Op, mixed: ir.Value, a: ir.Value, b: ir.Value, state: PassState, layer: int
    ) -> ir.Value:
        """Mixed [1, S, (2 J dk + H dv)], a [1, S, H * C], b [1, S, H] -> [1, S, H * dv]."""
        sizes, recurrences = self.sizes, state.recurrences
        assert recurrences is not None
        weight = self.taps(op)
        convolved = op.Swish(convolve(recurrences, layer, mixed, weight, sizes.window, self.rows))
        parts = op.constant(np.array([sizes.keys, sizes.keys, sizes.values]))
        q, k, v = op.outputs(3, "Split", floats(op, convolved), parts, axis=-1)
        q = op.Mul(_unit(op, q, sizes.key_dim), op.constant(np.float32(sizes.key_dim**-0.5)))
        k = _unit(op, k, sizes.key_dim)
        g = self.log_decay(op, floats(op, a))
        matrix = recurrences.state(
            layer, "matrix", (1, sizes.value_heads, sizes.key_dim, sizes.value_dim), _FLOAT
        )
        y, deltas = call(
            op,
            gated_delta_rule(by_channel=sizes.by_channel),
            q,
            k,
            v,
            g,
            self.beta(op, floats(op, b)),
            matrix,
            state.tree_mask,
            recurrences.parents,
        )
        keep_matrix(
            recurrences,
            layer,
            matrix,
            (k, deltas, g),
            key_heads=sizes.key_heads,
            decays=sizes.decays,
            rows=self.rows,
        )
        return op.cast(y, op.dtype) if op.dtype != _FLOAT else y

    def taps(self, op: Op) -> ir.Value:
        """Weight of the convolution [2 J dk + H dv, 1, window]."""
        name, shape = "conv1d.weight", (self.sizes.convolved, 1, self.sizes.window)
        if self.weights.info(CONVOLUTIONS[0]) is None:
            return self.parameter(op, name, shape)
        return typed(op, self.weights.take_joined(CONVOLUTIONS, name, shape, op.dtype))

    def beta(self, op: Op, b: ir.Value) -> ir.Value:
        """Shares of the memory that new values replace [1, S, H], from float32 b [1, S, H]."""
        return op.Sigmoid(b)

    def log_decay(self, op: Op, a: ir.Value) -> ir.Value:
        """Logarithms of decays [1, S, H * C] from float32 a [1, S, H * C]."""
        sizes = self.sizes
        rate = op.Neg(op.Exp(floats(op, self.rates(op))))
        bias = floats(op, self.parameter(op, "dt_bias", (sizes.value_heads * sizes.decays,)))
        steps = op.Softplus(op.Add(a, bias))
        if not sizes.by_channel:
            return op.Mul(rate, steps)
        rates = op.Unsqueeze(rate, op.constant([-1]))
        return merge_heads(op, op.Mul(rates, split_heads(op, steps, sizes.decays)))

    def rates(self, op: Op) -> ir.Value:
        """Logarithms of the heads' rates of decay [H]."""
        return self.parameter(op, "A_log", (self.sizes.value_heads,))

    def parameter(self, op: Op, name: str, shape: tuple[int, ...]) -> ir.Value:
        """A parameter in the type of activations."""
        return typed(op, self.weights.take(name, shape, op.dtype))


def typed(op: Op, stored: StoredTensor) -> ir.Value:
    """A parameter in the type of activations, with its shape."""
    value = op.cast(op.parameter(stored), op.dtype)
    value.shape, value.type = ir.Shape(stored.shape), ir.TensorType(op.dtype)
    return value


def _unit(op: Op, x: ir.Value, head_dim: int) -> ir.Value:
    """L2-normalize the heads of [1, S, J * dk]."""
    apart = split_heads(op, x, head_dim)
    squares = op.ReduceSum(op.Mul(apart, apart), op.constant([-1]), keepdims=1)
    length = op.Sqrt(op.Add(squares, op.constant(np.float32(_EPSILON))))
    return op.Reshape(op.Div(apart, length), op.constant([0, 0, -1]))
