"""Rows of a block that a draft predicts in one pass, and DFlash2's convolution over them.

S rows of a pass, R rows of its block, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm.export.checkpoints.weights import Weights
from edgellm.export.layers.linear import Linear
from edgellm.export.onnx.builder import Op


@dataclass(frozen=True, slots=True)
class Convolution:
    """Sizes of a convolution over a token and those before it in its block."""

    taps: int
    group_size: int  # channels that share the token's own part of the kernel


class Block:
    """The block's tokens in a pass, with values that all layers share."""

    def __init__(self, *, op: Op, ids: ir.Value, rows: ir.Value, mask_id: int) -> None:
        """`ids` int64 [1, R] of the tokens at indices `rows` int64 [R]."""
        self.op, self.ids, self.rows = op, ids, rows
        self.is_mask = op.Equal(ids, op.constant(np.int64(mask_id)))  # bool [1, R]

    def among(self, context: ir.Value, x: ir.Value) -> ir.Value:
        """`context` [1, S, D] with the block's rows replaced by x [1, R, D]."""
        op, first = self.op, self.op.constant([0])
        index = op.Unsqueeze(self.rows, op.constant([1]))
        rows = op.ScatterND(op.Squeeze(context, first), index, op.Squeeze(x, first))
        return op.Unsqueeze(rows, first)

    def of(self, x: ir.Value) -> ir.Value:
        """The block's rows of x [1, S, D]: [1, R, D]."""
        return self.op.Gather(x, self.rows, axis=1)

    def before(self, x: ir.Value) -> ir.Value:
        """The previous row of each row of x [1, R, ...]; the first row for itself."""
        op, axis = self.op, self.op.constant([1])
        zero = op.constant([0])
        first = op.Slice(x, zero, op.constant([1]), axis)
        return op.Concat(first, op.Slice(x, zero, op.constant([-1]), axis), axis=1)


class Convolve:
    """DFlash2's convolution: a kernel for every channel, and what a row adds to those of groups.

    It is done twice, before what lies between and after it, with the kernels of one row.
    """

    def __init__(self, config: Convolution, weights: Weights, size: int) -> None:
        self.weights, self.size, self.config = weights, size, config
        self.groups = size // config.group_size
        self.kernel_projection = Linear(
            weights / "kernel_projection", size, 2 * config.taps * self.groups, bias=False
        )

    def kernels(self, op: Op, x: ir.Value) -> list[ir.Value]:
        """Both kernels, [1, R, taps, groups, group size] each, of tokens x [1, R, D]."""
        taps, group = self.config.taps, self.config.group_size
        shape = op.constant([2, 1, 1, taps, self.groups, group])
        stored = self.weights.take("base_kernel", (2, taps, self.size), op.dtype)
        bases = op.Reshape(op.cast(op.parameter(stored), op.dtype), shape)
        own = self.kernel_projection(op, x)
        added = op.outputs(2, "Split", own, axis=-1, num_outputs=2)
        apart = op.constant([0, 0, taps, self.groups, 1])
        both = op.outputs(2, "Split", bases, axis=0, num_outputs=2)
        return [
            op.Add(op.Squeeze(base, op.constant([0])), op.Reshape(each, apart))
            for base, each in zip(both, added, strict=True)
        ]

    def __call__(self, op: Op, x: ir.Value, kernel: ir.Value, block: Block) -> ir.Value:
        """X [1, R, D] -> [1, R, D]."""
        # 0 at a block's first token: a pass may have blocks of several sequences
        within = op.Unsqueeze(op.Cast(block.is_mask, to=int(op.dtype)), op.constant([2]))
        grouped = op.constant([0, 0, self.groups, self.config.group_size])
        parts = op.outputs(self.config.taps, "Split", kernel, axis=2, num_outputs=self.config.taps)
        total = None
        for part in parts:
            product = op.Mul(op.Reshape(x, grouped), op.Squeeze(part, op.constant([2])))
            total = product if total is None else op.Add(total, product)
            x = op.Mul(block.before(x), within)
        assert total is not None
        return op.Reshape(total, op.constant([0, 0, -1]))
