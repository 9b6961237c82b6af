"""Linear layers. This file alone knows how quantized weights become ONNX nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir

from edgellm.contract import UnsupportedModelError
from edgellm.export.op import Op
from edgellm.export.weights import StoredTensor, Weights, as_bytes


class Linear:
    """`y = x W^T + b` with W [out, in] dense or INT4 in blocks along `in`."""

    def __init__(
        self, weights: Weights, in_features: int, out_features: int, *, bias: bool
    ) -> None:
        self.weights = weights
        self.shape = (out_features, in_features)
        self.bias = bias

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the layer; x [..., in] -> [..., out]."""
        with op.scope(self.weights.prefix.rstrip(".")):
            if self.weights.info("pre_quant_scale") is not None:  # AWQ's smoothing, not folded
                stored = self.weights.take("pre_quant_scale", self.shape[1:], op.dtype)
                x = op.Mul(x, op.cast(op.parameter(stored), op.dtype))
            y = op.MatMul(x, self._weight(op))
            if self.bias:
                stored = self.weights.take("bias", self.shape[:1], op.dtype)
                y = op.Add(y, op.cast(op.parameter(stored), op.dtype))
            return y

    def _weight(self, op: Op) -> ir.Value:
        """The weight as a [in, out] operand."""
        info = self.weights.info("weight")
        if info is None or info.dtype in ("F32", "F16", "BF16"):
            stored = self.weights.take("weight", self.shape, op.dtype)
            return op.Transpose(op.cast(op.parameter(stored), op.dtype), perm=[1, 0])
        if info.dtype == "U8" and self.weights.info("weight_scale_2") is None:
            return self._int4_weight(op)
        raise UnsupportedModelError(
            f"{self.weights.prefix}weight is stored as {info.dtype}: quantized in a way that "
            "edgellm cannot export",
            hint="supported: dense float weights, and INT4 in ModelOpt's W4A16 layout",
        )

    def _int4_weight(self, op: Op) -> ir.Value:
        """INT4 [in, out] in blocks along `in`.

        ModelOpt's bytes (`quantize.formats.pack_int4`) hold two neighbours of `out`, as ONNX's
        do, so that re-packing is a transposition.
        """
        out, width = self.shape
        scale_info = self.weights.info("weight_scale")
        if scale_info is None or len(scale_info.shape) != 2 or width % scale_info.shape[1]:
            raise UnsupportedModelError(
                f"{self.weights.prefix}weight_scale does not fit the weight"
            )
        blocks = scale_info.shape[1]
        codes = self.weights.array("weight", (out // 2, width), "U8")
        scale = self.weights.array("weight_scale", (out, blocks), scale_info.dtype)
        name = self.weights.prefix
        scale_type = np.float16 if op.dtype == ir.DataType.FLOAT16 else np.float32
        packed = StoredTensor(
            f"{name}weight", ir.DataType.INT4, (width, out), lambda: _once(lambda: codes().T)
        )
        scales = StoredTensor(
            f"{name}weight_scale",
            op.dtype,
            (blocks, out),
            lambda: _once(lambda: scale().astype(scale_type).T),
        )
        return op.DequantizeLinear(
            op.parameter(packed), op.parameter(scales), axis=0, block_size=width // blocks
        )


def _once(make: Callable[[], np.ndarray]) -> Iterator[memoryview]:
    yield as_bytes(make())
