"""Blocks of audio encoders as Whisper has them (arXiv 2212.04356).

Shapes: B windows, F frames of a window, A positions of a window in the encoder, H width.
"""

from __future__ import annotations

import onnx_ir as ir

from edgellm.export.checkpoints.weights import Weights
from edgellm.export.layers.activations import activate
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.mlp import FeedForward
from edgellm.export.layers.norm import LayerNorm
from edgellm.export.layers.patches import attend
from edgellm.export.onnx.builder import Op

EPSILON = 1e-5  # of layer norms; no config has it
_KERNEL = 3  # of a convolution, in frames and mel bins


class Attention:
    """The linear layers of attention; Whisper's keys have no bias."""

    def __init__(self, weights: Weights, size: int, *, key_bias: bool = False) -> None:
        self.q_proj = Linear(weights / "q_proj", size, size, bias=True)
        self.k_proj = Linear(weights / "k_proj", size, size, bias=key_bias)
        self.v_proj = Linear(weights / "v_proj", size, size, bias=True)
        self.out_proj = Linear(weights / "out_proj", size, size, bias=True)


class Convolution:
    """Convolution over frames, or over mel bins and frames, and its activation."""

    def __init__(
        self, *, weights: Weights, channels: tuple[int, int], stride: int, num_axes: int = 1
    ) -> None:
        """`channels`: in and out. `num_axes`: 1 for frames, 2 with mel bins."""
        self.weights, self.channels, self.stride = weights, channels, stride
        self.num_axes = num_axes

    def __call__(self, op: Op, x: ir.Value, activation: str) -> ir.Value:
        """Append the layer; x [B, in, ..., frames] -> [B, out, ..., frames / stride]."""
        (inner, outer), axes = self.channels, self.num_axes
        with op.scope(self.weights.prefix.rstrip(".")):
            shapes = ("weight", (outer, inner, *[_KERNEL] * axes)), ("bias", (outer,))
            weight, bias = (
                op.cast(op.parameter(self.weights.take(name, shape, op.dtype)), op.dtype)
                for name, shape in shapes
            )
            given = {
                "kernel_shape": [_KERNEL] * axes,
                "pads": [1] * 2 * axes,
                "strides": [self.stride] * axes,
            }
            return activate(op, op.Conv(x, weight, bias, **given), activation)


class EncoderLayer:
    """Pre-norm block: self-attention, feed-forward network."""

    def __init__(
        self,
        *,
        weights: Weights,
        size: int,
        num_heads: int,
        inner_size: int,
        activation: str,
        key_bias: bool = False,
    ) -> None:
        self.num_heads = num_heads
        self.self_attn = Attention(weights / "self_attn", size, key_bias=key_bias)
        self.self_attn_layer_norm, self.final_layer_norm = (
            LayerNorm(weights / name, size, EPSILON)
            for name in ("self_attn_layer_norm", "final_layer_norm")
        )
        self.mlp = FeedForward(
            first=weights / "fc1",
            second=weights / "fc2",
            sizes=(size, inner_size, size),
            activation=activation,
        )

    def forward(self, op: Op, x: ir.Value, mask: ir.Value | None = None) -> ir.Value:
        """X [B, A, H] -> [B, A, H]; `mask` [B, 1, A, A] is additive."""
        own, h = self.self_attn, self.self_attn_layer_norm(op, x)
        q, k, v = own.q_proj(op, h), own.k_proj(op, h), own.v_proj(op, h)
        x = op.Add(x, own.out_proj(op, attend(op, q, k, v, self.num_heads, mask)))
        return op.Add(x, self.mlp(op, self.final_layer_norm(op, x)))


class WindowEncoder:
    """Whisper's encoder: convolutions, learned positions, blocks and final norm."""

    def __init__(
        self,
        *,
        weights: Weights,
        num_mel_bins: int,
        num_positions: int,
        size: int,
        depth: int,
        num_heads: int,
        inner_size: int,
        activation: str,
    ) -> None:
        """`num_positions` of a window; `inner_size` and `activation` of feed-forward networks."""
        self.convolutions = [
            Convolution(weights=weights / name, channels=(inner, size), stride=stride)
            for name, inner, stride in (("conv1", num_mel_bins, 1), ("conv2", size, 2))
        ]
        self.embed_positions = weights / "embed_positions"
        self.shape = num_positions, size
        self.layers = [
            EncoderLayer(
                weights=weights / f"layers.{index}",
                size=size,
                num_heads=num_heads,
                inner_size=inner_size,
                activation=activation,
            )
            for index in range(depth)
        ]
        self.layer_norm = LayerNorm(weights / "layer_norm", size, EPSILON)

    def forward(self, op: Op, features: ir.Value) -> ir.Value:
        """Features [B, mel bins, F] -> hidden states [B, A, H]."""
        x = features
        for each in self.convolutions:
            x = each(op, x, "gelu")
        x = op.Transpose(x, perm=[0, 2, 1])
        with op.scope("embed_positions"):
            table = op.parameter(self.embed_positions.take("weight", self.shape, op.dtype))
            x = op.Add(x, op.cast(table, op.dtype))
        for index, layer in enumerate(self.layers):
            with op.scope(f"layers.{index}"):
                x = layer.forward(op, x)
        return self.layer_norm(op, x)
