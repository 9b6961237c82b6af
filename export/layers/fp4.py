"""NVFP4 rounding of activations: TensorRT's operator, with a body for everybody else.

Blocks of 16 neighbours share an FP8 (E4M3) scale, all of those a float32 one (the global scale).
"""

from __future__ import annotations

import onnx_ir as ir

from edgellm.export.op import Op

FP4_BLOCK = 16
_DOMAIN, _NAME = "trt", "TRT_FP4DynamicQuantize"
_LARGEST_FP4 = 6.0
_SMALLEST_FP8, _LARGEST_FP8 = 2.0**-9, 448.0


def dynamic_quantize(op: Op, x: ir.Value, global_scale: ir.Value) -> tuple[ir.Value, ir.Value]:
    """X [..., K] to FLOAT4E2M1 codes [..., K] and FLOAT8E4M3FN scales [..., K / 16].

    TensorRT (10.8 and newer) has an importer for the operator; other runtimes take its body.
    """
    op.define(_body(op.dtype))
    codes, scales = op.outputs(
        2, _NAME, x, global_scale, domain=_DOMAIN, axis=-1, block_size=FP4_BLOCK, scale_type=17
    )
    codes.type = ir.TensorType(ir.DataType.FLOAT4E2M1)
    scales.type = ir.TensorType(ir.DataType.FLOAT8E4M3FN)
    return codes, scales


def _body(dtype: ir.DataType) -> ir.Function:
    """The operator in plain ONNX, opset 24."""
    op = Op(ir.DataType.FLOAT)
    x, global_scale = ir.Value(name="x"), ir.Value(name="global_scale")
    floats = x if dtype == ir.DataType.FLOAT else op.Cast(x, to=int(ir.DataType.FLOAT))

    def number(value: float) -> ir.Value:
        return op.Constant(value_float=value)

    def shape(*sizes: int) -> ir.Value:
        return op.Constant(value_ints=list(sizes))

    extent = op.Shape(floats)
    leading = op.Slice(extent, shape(0), shape(-1), shape(0))
    blocks = op.Reshape(floats, op.Concat(leading, shape(-1, FP4_BLOCK), axis=0))
    amax = op.ReduceMax(op.Abs(blocks), shape(-1), keepdims=1)
    wanted = op.Div(op.Div(amax, number(_LARGEST_FP4)), global_scale)
    limited = op.Min(op.Max(wanted, number(_SMALLEST_FP8)), number(_LARGEST_FP8))
    scales = op.Cast(limited, to=int(ir.DataType.FLOAT8E4M3FN))
    effective = op.Mul(op.Cast(scales, to=int(ir.DataType.FLOAT)), global_scale)
    ratio = op.Min(op.Max(op.Div(blocks, effective), number(-_LARGEST_FP4)), number(_LARGEST_FP4))
    codes = op.Cast(op.Reshape(ratio, extent), to=int(ir.DataType.FLOAT4E2M1), name="codes")
    per_block = op.Squeeze(scales, shape(-1), name="scales")
    graph = ir.Graph([x, global_scale], [codes, per_block], nodes=op.nodes, opset_imports={"": 24})
    attributes = [ir.Attr(name, ir.AttributeType.INT, None)
                  for name in ("axis", "block_size", "scale_type")]  # fmt: skip
    return ir.Function(_DOMAIN, _NAME, graph=graph, attributes=attributes)
