"""Linear layers, float or quantized, as ONNX nodes; those of Gemma 4's encoders have bounds."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from edgellm.core.errors import BrokenArtifactError
from edgellm.export.checkpoints import quantized
from edgellm.export.checkpoints.quantized_weight import (
    BlockFactors,
    BlockWeight,
    InputRounding,
    QuantizedLinear,
    StoredPlanes,
)
from edgellm.export.checkpoints.weights import StoredTensor, Weights
from edgellm.export.onnx.builder import Op
from edgellm.export.onnx.functions import attention, blocks
from edgellm.export.onnx.functions.attention import call


class Linear:
    """`y = x W^T + b`; W [out, in] is dense, or quantized (`export.checkpoints.quantized`)."""

    def __init__(
        self, weights: Weights, in_features: int, out_features: int, *, bias: bool
    ) -> None:
        self.weights = weights
        self.shape = (out_features, in_features)
        self.bias = bias

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the layer; x [..., in] -> [..., out]."""
        with op.scope(self.weights.prefix.rstrip(".")):
            if self.weights.info("pre_quant_scale") is not None:  # smoothing that is not folded
                stored = self.weights.take("pre_quant_scale", self.shape[1:], op.dtype)
                x = call(op, attention.smooth_input(), x, op.parameter(stored))
            layer = quantized.find(self.weights, self.shape, op.dtype)
            y = self._dense(op, x) if layer is None else _product(op, x, layer)
            if self.bias:
                stored = self.weights.take("bias", self.shape[:1], op.dtype)
                y = op.Add(y, op.cast(op.parameter(stored), op.dtype))
            return y

    def _dense(self, op: Op, x: ir.Value) -> ir.Value:
        stored = self.weights.take("weight", self.shape, op.dtype)
        return call(op, attention.linear(), x, op.parameter(stored))


class ClippedLinear:
    """A linear layer, whose inputs and outputs may be clipped to bounds of the checkpoint."""

    def __init__(self, weights: Weights, sizes: tuple[int, int], *, is_clipped: bool) -> None:
        """`sizes`: input, output."""
        self.weights, self.is_clipped = weights, is_clipped
        self.linear = Linear(weights / "linear", *sizes, bias=False)

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the layer; x [..., in] -> [..., out]."""
        return self._clipped(op, self.linear(op, self._clipped(op, x, "input")), "output")

    def _clipped(self, op: Op, x: ir.Value, side: str) -> ir.Value:
        if not self.is_clipped:
            return x
        least, maximum = (self.weights.number(f"{side}_{end}") for end in ("min", "max"))
        if not least <= maximum:
            raise BrokenArtifactError(
                f"{self.weights.prefix}{side}_min = {least} is not below {side}_max = {maximum}",
                hint="the checkpoint is damaged; fetch it again",
            )
        with op.scope(self.weights.prefix.rstrip(".")):
            return clip(op, x, least, maximum)


def clip(op: Op, x: ir.Value, least: float, maximum: float) -> ir.Value:
    """X between bounds; no node if they are infinite or beyond the activations' type."""
    if math.isinf(least) and math.isinf(maximum):
        return x
    limits = np.finfo(op.dtype.numpy())
    bounds = max(least, float(limits.min)), min(maximum, float(limits.max))
    return op.Clip(x, *(op.constant(bound, op.dtype) for bound in bounds))


def block_operands(op: Op, weight: BlockWeight) -> list[ir.Value]:
    """Operands of `block_linear`: codes, scales, and minima if any."""
    factors = [weight.scales, *([] if weight.minima is None else [weight.minima])]
    return [stored_codes(op, weight.codes), *(stored_factors(op, each) for each in factors)]


def stored_codes(op: Op, codes: StoredTensor | StoredPlanes) -> ir.Value:
    """Codes as an operand of block functions."""
    if isinstance(codes, StoredTensor):
        return op.parameter(codes)
    return call(op, blocks.packed_codes(codes.form), *map(op.parameter, codes.planes))


def stored_factors(op: Op, factors: BlockFactors) -> ir.Value:
    """Scales or minima as operands of block functions."""
    values = op.parameter(factors.values)
    if factors.scales is None:
        return values
    scales, block = op.parameter(factors.scales), factors.shared
    return call(op, blocks.block_factors(), values, scales, block_size=block)


def _product(op: Op, x: ir.Value, layer: QuantizedLinear | BlockWeight) -> ir.Value:
    if layer.input_order is not None:
        x = op.Gather(x, op.constant(layer.input_order, ir.DataType.INT64), axis=-1)
    if isinstance(layer, QuantizedLinear):
        return _quantized(op, x, layer)
    function = blocks.block_linear(has_minima=layer.minima is not None)
    return call(op, function, x, *block_operands(op, layer), block_size=layer.block_size)


def _quantized(op: Op, x: ir.Value, layer: QuantizedLinear) -> ir.Value:
    if layer.input is not None:
        x = _rounded(op, x, layer.input)
    codes, scales = op.parameter(layer.codes), op.parameter(layer.scales)
    if layer.global_scale is not None:
        global_scale = op.constant(layer.global_scale, ir.DataType.FLOAT)
        return call(op, attention.fp4_linear(), x, codes, scales, global_scale)
    zeros = [] if layer.zero_points is None else [op.parameter(layer.zero_points)]
    function = attention.quantized_linear(has_zero_points=bool(zeros))
    place = {"axis": 0, "block_size": layer.block_size} if layer.block_size else {"axis": 1}
    return call(op, function, x, codes, scales, *zeros, **place)


def _rounded(op: Op, x: ir.Value, how: InputRounding) -> ir.Value:
    """X rounded as the layer does it, as floats."""
    if how.dtype == ir.DataType.FLOAT4E2M1:
        global_scale = op.constant(how.scale, ir.DataType.FLOAT)
        return call(op, attention.round_input_fp4(), x, global_scale)
    scale, zero = op.constant(how.scale, op.dtype), op.constant(0, how.dtype)
    return call(op, attention.round_input(), x, scale, zero)
