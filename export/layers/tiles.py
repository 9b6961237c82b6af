"""Encoders of square tiles [N, 3, E, E]: patches by convolution, attention inside each tile.

Shapes: N tiles, d width, side patches along each side of a tile.
"""

from __future__ import annotations

import onnx_ir as ir

from edgellm.export.checkpoints.weights import Weights
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.patches import attend
from edgellm.export.onnx.builder import Op


class TilePatches:
    """Patch convolution; pixels after the last whole patch are unused."""

    def __init__(self, weights: Weights, patch_size: int, size: int) -> None:
        self.weights = weights
        self.patch_size = patch_size
        self.size = size

    def __call__(self, op: Op, tiles: ir.Value) -> ir.Value:
        """Append the layer; tiles [N, 3, E, E] -> [N, side * side, size]."""
        patch = [self.patch_size, self.patch_size]
        with op.scope(self.weights.prefix.rstrip(".")):
            weight, bias = (
                op.cast(op.parameter(self.weights.take(name, shape, op.dtype)), op.dtype)
                for name, shape in (("weight", (self.size, 3, *patch)), ("bias", (self.size,)))
            )
            maps = op.Conv(tiles, weight, bias, kernel_shape=patch, strides=patch)
            rows = op.Reshape(maps, op.constant([0, self.size, -1]))
            return op.Transpose(rows, perm=[0, 2, 1])


class TileAttention:
    """Self-attention of the patches of a tile, with a layer each for q, k and v."""

    def __init__(
        self, *, weights: Weights, size: int, num_heads: int, bias: bool, output: str
    ) -> None:
        """`bias`: of q, k and v; `output`: name of the last layer in the checkpoint."""
        self.num_heads = num_heads
        self.q_proj = Linear(weights / "q_proj", size, size, bias=bias)
        self.k_proj = Linear(weights / "k_proj", size, size, bias=bias)
        self.v_proj = Linear(weights / "v_proj", size, size, bias=bias)
        self.output = Linear(weights / output, size, size, bias=True)

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the layer; x [N, patches, d] -> the same shape."""
        q, k = self.normalize(op, self.q_proj(op, x), self.k_proj(op, x))
        return self.output(op, attend(op, q, k, self.v_proj(op, x), self.num_heads))

    def normalize(self, op: Op, q: ir.Value, k: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Hook for encoders that normalize queries and keys."""
        del op
        return q, k


def pixel_shuffle(op: Op, x: ir.Value, side: int, factor: int, size: int) -> ir.Value:
    """Blocks of factor * factor patches concatenated in one row each (arXiv 1609.05158, inverted).

    x [N, side * side, size] -> [N, (side / factor) ** 2, factor * factor * size].
    """
    with op.scope("pixel_shuffle"):
        blocks = side // factor
        apart = op.Reshape(x, op.constant([-1, blocks, factor, blocks, factor * size]))
        together = op.Transpose(apart, perm=[0, 1, 3, 2, 4])
        return op.Reshape(together, op.constant([-1, blocks * blocks, factor * factor * size]))
