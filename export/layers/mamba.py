"""Mamba 2 (arXiv 2405.21060): selective SSM, decaying state with input-dependent B, C and dt.

S tokens, H heads of size P, G groups of heads that share B and C of size N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.reader import ConfigReader
from edgellm.export.layers.attention import PassState, merge_heads, split_heads
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.recurrent import convolve, floats, keep_matrix
from edgellm.export.onnx.builder import Op
from edgellm.export.onnx.functions.attention import call
from edgellm.export.onnx.functions.delta_rule import decaying_rule

_FLOAT = ir.DataType.FLOAT
_UNBOUNDED = (math.inf, {"__float__": "Infinity"})  # in JSON, and as transformers writes it


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSizes:
    """Sizes of a layer."""

    heads: int  # H
    head_dim: int  # P
    groups: int  # G
    state: int  # N
    window: int  # kernel size of the convolution
    conv_bias: bool = True
    in_bias: bool = False  # of the first projection
    out_bias: bool = False  # of the last

    @classmethod
    def read(cls, reader: ConfigReader, inner: int, out_bias: str) -> MambaSizes:
        """Sizes from Granite's and Falcon's configs.

        Args:
            reader: of config.json.
            inner: H * P.
            out_bias: config key of the last projection's bias.

        Raises:
            UnsupportedModelError: heads do not match the width.
        """
        reader.skip("mamba_chunk_size", "mamba_expand")
        expect_unbounded(reader)
        heads = reader.positive("mamba_n_heads", 128)
        reader.expect("mamba_d_head", "auto", inner // heads)
        found = cls(
            heads=heads,
            head_dim=inner // heads,
            groups=reader.positive("mamba_n_groups", 1),
            state=reader.positive("mamba_d_state", 256),
            window=reader.positive("mamba_d_conv", 4),
            conv_bias=reader.read("mamba_conv_bias", bool, True),
            in_bias=reader.read("mamba_proj_bias", bool, False),
            out_bias=reader.read(out_bias, bool, False),
        )
        if found.inner != inner:
            raise UnsupportedModelError(f"config.json: {heads} heads of a Mamba layer of {inner}")
        return found

    def __post_init__(self) -> None:
        """Raise `UnsupportedModelError` if groups do not divide heads."""
        if self.heads % self.groups or self.window < 2:
            raise UnsupportedModelError(f"config.json: a Mamba layer of {self}")

    @property
    def inner(self) -> int:
        """H * P."""
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """G * N."""
        return self.groups * self.state


def expect_unbounded(reader: ConfigReader) -> None:
    """Reject configs with limits of the time step."""
    reader.expect("time_step_limit", *([0.0, maximum] for maximum in _UNBOUNDED))


NO_MAMBA = MambaSizes(heads=1, head_dim=1, groups=1, state=1, window=2)  # of configs without Mamba


class Mamba2:
    """Projection, convolution, scan, gated norm, projection."""

    def __init__(
        self, *, sizes: MambaSizes, weights: Weights, hidden: int, epsilon: float, rows: str
    ) -> None:
        """`rows`: the symbol of S."""
        self.sizes, self.weights, self.epsilon, self.rows = sizes, weights, epsilon, rows
        projected = 2 * sizes.inner + 2 * sizes.shared + sizes.heads
        self.in_proj = Linear(weights / "in_proj", hidden, projected, bias=sizes.in_bias)
        self.out_proj = Linear(weights / "out_proj", sizes.inner, hidden, bias=sizes.out_bias)

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, hidden] -> [1, S, hidden]."""
        sizes = self.sizes
        convolved = sizes.inner + 2 * sizes.shared
        widths = op.constant(np.array([sizes.inner, convolved, sizes.heads]))
        gate, mixed, steps = op.outputs(3, "Split", self.project(op, x), widths, axis=-1)
        mixed = self._convolved(op, mixed, state, layer)
        widths = op.constant(np.array([sizes.inner, sizes.shared, sizes.shared]))
        values, k, q = op.outputs(3, "Split", floats(op, mixed), widths, axis=-1)
        y = self._scan(op, (values, k, q), floats(op, steps), state, layer)
        y = op.cast(y, op.dtype) if op.dtype != _FLOAT else y
        return self.out_proj(op, self.gated(op, y, gate))

    def project(self, op: Op, x: ir.Value) -> ir.Value:
        """Gates, what is convolved and steps, concatenated."""
        return self.in_proj(op, x)

    def gated(self, op: Op, y: ir.Value, gate: ir.Value) -> ir.Value:
        """Gated norm before the last projection, [1, S, H * P]."""
        return self.normed(op, op.Mul(y, op.Swish(gate)))

    def _convolved(self, op: Op, mixed: ir.Value, state: PassState, layer: int) -> ir.Value:
        sizes, recurrences = self.sizes, state.recurrences
        assert recurrences is not None
        width = sizes.inner + 2 * sizes.shared
        weight = self._parameter(op, "conv1d.weight", (width, 1, sizes.window))
        y = convolve(recurrences, layer, mixed, weight, sizes.window, self.rows)
        if sizes.conv_bias:
            y = op.Add(y, self._parameter(op, "conv1d.bias", (width,)))
        return op.Swish(y)

    def _scan(
        self,
        op: Op,
        rows: tuple[ir.Value, ir.Value, ir.Value],
        steps: ir.Value,
        state: PassState,
        layer: int,
    ) -> ir.Value:
        """Values [1, S, H * P], B and C [1, S, G * N] -> [1, S, H * P]."""
        sizes, recurrences = self.sizes, state.recurrences
        assert recurrences is not None
        values, k, q = rows
        rate, bias, skip = (
            floats(op, self._parameter(op, name, (sizes.heads,)))
            for name in ("A_log", "dt_bias", "D")
        )
        step = op.Softplus(op.Add(steps, bias))  # [1, S, H]
        g = op.Mul(step, op.Neg(op.Exp(rate)))
        apart, last = split_heads(op, values, sizes.head_dim), op.constant([-1])
        d = merge_heads(op, op.Mul(apart, op.Unsqueeze(step, last)))
        shape = (1, sizes.heads, sizes.state, sizes.head_dim)
        matrix = recurrences.state(layer, "matrix", shape, _FLOAT)
        y = call(op, decaying_rule(), q, k, d, g, matrix, state.tree_mask, recurrences.parents)
        keep_matrix(recurrences, layer, matrix, (k, d, g), key_heads=sizes.groups, rows=self.rows)
        return op.Add(y, merge_heads(op, op.Mul(apart, op.Unsqueeze(skip, last))))

    def normed(self, op: Op, y: ir.Value) -> ir.Value:
        """Normalize each group of heads."""
        size = self.sizes.inner // self.sizes.groups
        ones = op.constant(np.ones(size), op.dtype)
        groups = split_heads(op, y, size)
        normed = merge_heads(op, op.RMSNormalization(groups, ones, axis=-1, epsilon=self.epsilon))
        return op.Mul(normed, self._parameter(op, "norm.weight", (self.sizes.inner,)))

    def _parameter(self, op: Op, name: str, shape: tuple[int, ...]) -> ir.Value:
        value = op.cast(op.parameter(self.weights.take(name, shape, op.dtype)), op.dtype)
        value.shape, value.type = ir.Shape(shape), ir.TensorType(op.dtype)
        return value
