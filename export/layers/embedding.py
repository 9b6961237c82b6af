"""Token embedding."""

from __future__ import annotations

import onnx_ir as ir

from edgellm.export.checkpoints import quantized
from edgellm.export.checkpoints.quantized_weight import StoredPlanes
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.layers.linear import stored_factors
from edgellm.export.layers.norm import UnweightedRMSNorm
from edgellm.export.onnx.builder import Op
from edgellm.export.onnx.functions import blocks as block_functions
from edgellm.export.onnx.functions.attention import call


class Embedding:
    """Lookup in a table [vocab_size, size] by token id, times `scale`, then a norm by RMS."""

    def __init__(
        self,
        *,
        weights: Weights,
        vocab_size: int,
        size: int,
        scale: float | None = None,
        epsilon: float | None = None,
    ) -> None:
        """`epsilon`: of the norm; None: there is none."""
        self.weights = weights
        self.shape = (vocab_size, size)
        self.scale = scale
        self.norm = None if epsilon is None else UnweightedRMSNorm(size, epsilon)

    def __call__(self, op: Op, token_ids: ir.Value) -> ir.Value:
        """Append the lookup; token_ids int64 [...] -> [..., size]."""
        with op.scope(self.weights.prefix.rstrip(".")):
            rows = self._rows(op, token_ids)
            if self.scale is not None:
                rows = op.Mul(rows, op.constant(self.scale, op.dtype))
            return rows if self.norm is None else self.norm(op, rows)

    def _rows(self, op: Op, token_ids: ir.Value) -> ir.Value:
        """Cast after the lookup: a cast table would be folded into a second, larger copy."""
        blocks = quantized.find_table(self.weights, self.shape, op.dtype)
        if blocks is None:
            table = op.parameter(self.weights.take("weight", self.shape, op.dtype))
            rows = op.Gather(table, token_ids, axis=0)
            return rows if table.dtype == op.dtype else op.Cast(rows, to=int(op.dtype))
        factors = [each for each in (blocks.scales, blocks.minima) if each is not None]
        codes = blocks.codes
        is_packed = isinstance(codes, StoredPlanes)
        form, planes = (codes.form, codes.planes) if is_packed else (None, (codes,))
        function = block_functions.block_rows(has_minima=len(factors) > 1, packed=form)
        operands = [*map(op.parameter, planes), *(stored_factors(op, each) for each in factors)]
        rows = call(op, function, token_ids, *operands, block_size=blocks.block_size)
        return op.Cast(rows, to=int(op.dtype))
