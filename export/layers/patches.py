"""Encoders of whole images: a stream of patches [1, P, d] with 2-D rotary positions.

Shapes: P patches of one image, d width, D head_dim, W windows of Z slots. The stream keeps the
input's order; windows are gathered for attention only.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm.export.checkpoints.weights import Weights
from edgellm.export.onnx.builder import Op
from edgellm.export.onnx.functions.attention import call, linear

MASKED = {ir.DataType.FLOAT: -1e30, ir.DataType.FLOAT16: -3e4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Indices of patches for attention in windows."""

    slots: ir.Value  # int64 [W * Z]
    rows: ir.Value  # int64 [P]
    mask: ir.Value  # [W, 1, Z, Z], additive
    size: int  # Z

    @classmethod
    def prepare(cls, op: Op, slots: ir.Value, mask: ir.Value, rows: ir.Value, size: int) -> Windows:
        """Append nodes that windowed layers share; `mask` bool [W, Z] is true for real patches."""
        with op.scope("windows"):
            shut = op.constant(MASKED[op.dtype], op.dtype)
            additive = op.Where(mask, op.constant(0, op.dtype), shut)
            columns = op.Unsqueeze(additive, op.constant([1, 2]))  # [W, 1, 1, Z]
            # Both ONNX Runtime and TensorRT broadcast a mask over heads, but not over its rows.
            full = op.Expand(columns, op.constant([1, 1, size, 1]))
            return cls(slots=slots, rows=rows, mask=full, size=size)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchState:
    """Values that all layers of a run share."""

    op: Op
    num_heads: int
    size: int  # d
    cos: ir.Value  # [1, P, D / 2]
    sin: ir.Value
    windows: Windows | None
    scale: float | None = None  # of the scores; None: 1 / sqrt(D)

    def attend(self, q: ir.Value, k: ir.Value, v: ir.Value, *, windowed: bool) -> ir.Value:
        """Apply RoPE, then attend to all patches or to those of the window; all [1, P, d]."""
        q, k = (
            self.op.RotaryEmbedding(x, self.cos, self.sin, num_heads=self.num_heads) for x in (q, k)
        )
        if not windowed or self.windows is None:
            return attend(self.op, q, k, v, self.num_heads, scale=self.scale)
        return self._attend_in_windows(self.windows, q, k, v)

    def _attend_in_windows(
        self, windows: Windows, q: ir.Value, k: ir.Value, v: ir.Value
    ) -> ir.Value:
        op = self.op
        apart = op.constant([-1, windows.size, self.size])
        q, k, v = (op.Reshape(op.Gather(x, windows.slots, axis=1), apart) for x in (q, k, v))
        y = attend(op, q, k, v, self.num_heads, windows.mask, scale=self.scale)  # [W, Z, d]
        return op.Gather(op.Reshape(y, op.constant([1, -1, self.size])), windows.rows, axis=1)


class PatchEmbedding:
    """Patch convolution as a linear layer over the flattened patch."""

    def __init__(self, *, weights: Weights, kernel: tuple[int, ...], size: int, bias: bool) -> None:
        """`kernel`: channels, frames, rows and columns of a patch."""
        self.weights = weights
        self.kernel = kernel
        self.size = size
        self.bias = bias

    def __call__(self, op: Op, patches: ir.Value) -> ir.Value:
        """Append the layer; patches [P, K] with K the kernel's product -> [1, P, size]."""
        with op.scope(self.weights.prefix.rstrip(".")):
            stored = self.weights.take("weight", (self.size, *self.kernel), op.dtype)
            flat = dataclasses.replace(stored, shape=(self.size, math.prod(self.kernel)))
            x = op.Unsqueeze(patches, op.constant([0]))
            x = call(op, linear(), x, op.parameter(flat))
            if self.bias:
                stored = self.weights.take("bias", (self.size,), op.dtype)
                x = op.Add(x, op.cast(op.parameter(stored), op.dtype))
            return x


def attend(
    op: Op,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    num_heads: int,
    mask: ir.Value | None = None,
    *,
    scale: float | None = None,
) -> ir.Value:
    """Bidirectional attention; all [batch, rows, d], `mask` additive, `scale` of the scores."""
    inputs = (q, k, v) if mask is None else (q, k, v, mask)
    given = {} if scale is None else {"scale": scale}
    return op.Attention(*inputs, q_num_heads=num_heads, kv_num_heads=num_heads, **given)


def rotary_tables(
    op: Op, positions: ir.Value, head_dim: int, theta: float, *, by_turns: bool = False
) -> tuple[ir.Value, ir.Value]:
    """Cos and sin [1, P, head_dim / 2] of rows (the first half) and columns (the second).

    Args:
        op: the recorder.
        positions: int64 [P, 2].
        head_dim: a multiple of 4; pair i of an axis has frequency `theta ** (-4 * i / head_dim)`.
        theta: the base.
        by_turns: the frequencies between, `theta ** (-(4 * i + 2) / head_dim)`, for columns.
    """
    with op.scope("rotary"):
        steps = np.arange(0, head_dim // 2, 2, dtype=np.float32)
        steps = np.stack([steps, steps + 1]) if by_turns else steps
        exponents = steps / np.float32(head_dim // 2)
        inv_freq = (np.float32(1) / np.float32(theta) ** exponents).astype(np.float32)
        place = op.Unsqueeze(op.Cast(positions, to=int(ir.DataType.FLOAT)), op.constant([2]))
        angles = op.Mul(place, op.constant(inv_freq))  # [P, 2, D / 4]
        angles = op.Reshape(angles, op.constant([1, -1, head_dim // 2]))
        tables = op.Cos(angles), op.Sin(angles)
        if op.dtype == ir.DataType.FLOAT:
            return tables
        return op.Cast(tables[0], to=int(op.dtype)), op.Cast(tables[1], to=int(op.dtype))


def interpolate(op: Op, table: ir.Value, index: ir.Value, weight: ir.Value) -> ir.Value:
    """Rows of `table` [positions, d] interpolated by index and weight [4, P] -> [1, P, d]."""
    shares = op.Unsqueeze(op.cast(weight, op.dtype), op.constant([2]))  # [4, P, 1]
    neighbours = op.Gather(table, index, axis=0)  # [4, P, d]
    if table.dtype != op.dtype:  # after the look-up, as in `Embedding`
        neighbours = op.Cast(neighbours, to=int(op.dtype))
    return op.ReduceSum(op.Mul(neighbours, shares), op.constant([0]), keepdims=1)


def average_blocks(
    op: Op, x: ir.Value, count: int, size: int, dtype: ir.DataType | None = None
) -> ir.Value:
    """Averages of `count` consecutive rows: [..., size] -> [blocks, size].

    `dtype`: of x; default: that of activations.
    """
    apart = op.Reshape(x, op.constant([-1, count, size]))
    # A product, since not all backends reduce over an axis
    shares = op.constant(np.full((1, 1, count), 1 / count), dtype or op.dtype)
    return op.Reshape(op.MatMul(shares, apart), op.constant([-1, size]))


def frames_first(op: Op, patches: ir.Value, frames: int, patch_size: int) -> ir.Value:
    """Patches [P, 3 * frames * p * p] -> [1, P, frames * 3 * p * p]."""
    apart = op.Reshape(patches, op.constant([-1, 3, frames, patch_size**2]))
    exchanged = op.Transpose(apart, perm=[0, 2, 1, 3])
    return op.Reshape(exchanged, op.constant([1, -1, 3 * frames * patch_size**2]))


def channels_last(op: Op, patches: ir.Value, patch_size: int) -> ir.Value:
    """Patches of one frame [P, 3 * p * p] -> [1, P, p * p * 3]."""
    apart = op.Reshape(patches, op.constant([-1, 3, patch_size**2]))
    pixels = op.Transpose(apart, perm=[0, 2, 1])
    return op.Reshape(pixels, op.constant([1, -1, 3 * patch_size**2]))
