"""nvidia-modelopt's unified layout, and 8-bit layouts that equal it.

Source: nvidia-modelopt 0.47, `export_hf_checkpoint`; compressed-tensors 0.20, `float-quantized` and
`int-quantized`; transformers 5, `FbgemmFp8Linear`, whose `input_scale_ub` bounds input scales at
run time: here such inputs stay floats. A layer's tensors are `weight`, `weight_scale` and, by
format, `weight_scale_2`, `input_scale`, `pre_quant_scale` (which the linear layer reads).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm.core.errors import (
    BrokenArtifactError,
    UnsupportedModelError,
)
from edgellm.export.checkpoints.gptq_conventions import num_groups
from edgellm.export.checkpoints.quantized_weight import (
    BlockFactors,
    BlockWeight,
    InputRounding,
    QuantizedLinear,
    finite_fp8,
    scale_tensor,
    stored,
)
from edgellm.export.checkpoints.weights import Weights

# Formats with inputs rounded by calibrated scales.
_STATIC_INPUTS = ("FP8", "NVFP4", "NVFP4_AWQ", "W8A8_SQ_PER_CHANNEL", "W4A8_AWQ")
_BLOCK_NVFP4 = 16
_EIGHT_BITS = {"F8_E4M3": ir.DataType.FLOAT8E4M3FN, "I8": ir.DataType.INT8}


def read(
    weights: Weights, shape: tuple[int, int], dtype: ir.DataType
) -> QuantizedLinear | BlockWeight | None:
    """See `edgellm.export.checkpoints.quantized.Layout`."""
    info, scale = weights.info("weight"), weights.info("weight_scale")
    if info is None or scale is None:
        return None
    _refuse_zero_points(weights)
    if (table := read_table(weights, shape)) is not None:
        return table
    if info.dtype in _EIGHT_BITS:
        return _eight_bits(weights, shape, dtype, info.dtype)
    if info.dtype != "U8":
        return None
    if scale.dtype == "F8_E4M3":
        return _nvfp4(weights, shape)
    if weights.info("weight_scale_2") is not None:
        raise UnsupportedModelError(
            f"{weights.prefix}weight is INT4 with 8-bit inputs (W4A8), which is not supported",
            hint="quantize with int4_awq, whose inputs stay floats",
        )
    return _int4(weights, shape, dtype)


def read_table(weights: Weights, shape: tuple[int, int]) -> BlockWeight | None:
    """INT8 [out, in] with float16 scales [out, blocks], for lookups of rows."""
    info, scale = weights.info("weight"), weights.info("weight_scale")
    if info is None or scale is None or (info.dtype, scale.dtype) != ("I8", "F16"):
        return None
    if len(scale.shape) != 2 or scale.shape[1] == 1 or shape[1] % scale.shape[1]:
        return None
    name, blocks = f"{weights.prefix}weight", (shape[0], scale.shape[1])
    codes, scales = (
        weights.array("weight", shape, "I8"),
        weights.array("weight_scale", blocks, "F16"),
    )
    return BlockWeight(
        codes=stored(name, ir.DataType.INT8, shape, codes),
        block_size=shape[1] // blocks[1],
        scales=BlockFactors(stored(f"{name}_scale", ir.DataType.FLOAT16, blocks, scales)),
    )


def _refuse_zero_points(weights: Weights) -> None:
    """Reject zero points of 8-bit weights, except zeros, which llm-compressor used to write."""
    info = weights.info("weight_zero_point")
    if info is None:
        return
    if weights.array("weight_zero_point", info.shape, info.dtype)().any():
        raise UnsupportedModelError(
            f"{weights.prefix}weight_zero_point: 8-bit weights with zero points are not supported",
            hint="quantize with symmetric weights",
        )


def _eight_bits(
    weights: Weights, shape: tuple[int, int], dtype: ir.DataType, stored_type: str
) -> QuantizedLinear:
    """FP8 or INT8 [out, in] with one scale, or one of each output channel."""
    out, width = shape
    name, info = weights.prefix, weights.info("weight_scale")
    assert info is not None
    onnx_type = _EIGHT_BITS[stored_type]
    codes = weights.array("weight", shape, stored_type)
    if info.shape not in ((), (1,), (1, 1), (out,), (out, 1)):
        if stored_type == "I8" and len(info.shape) == 2:
            return _int8_groups(weights, shape, dtype)
        raise UnsupportedModelError(
            f"{name}weight_scale has shape {list(info.shape)}: neither one scale nor one of each "
            f"of the {out} output channels"
        )
    scale = weights.array("weight_scale", info.shape, info.dtype)
    if (bound := weights.info("input_scale_ub")) is not None:
        weights.array("input_scale_ub", bound.shape, bound.dtype)
    per_channel = (out,) if np.prod(info.shape, dtype=int) > 1 else ()
    return QuantizedLinear(
        codes=stored(f"{name}weight", onnx_type, (width, out), lambda: finite_fp8(name, codes().T)),
        scales=scale_tensor(
            f"{name}weight_scale",
            per_channel,
            dtype,
            lambda: scale().reshape(per_channel),
            has_signs=onnx_type == ir.DataType.INT8,
        ),
        block_size=0,
        input=_static_input(weights, onnx_type),
    )


def _int8_groups(weights: Weights, shape: tuple[int, int], dtype: ir.DataType) -> QuantizedLinear:
    """INT8 [out, in] with scales [out, in / g], as compressed-tensors' strategy `group`."""
    out, width = shape
    name, info = f"{weights.prefix}weight", weights.info("weight_scale")
    assert info is not None
    blocks = num_groups(weights, width, info, 1)
    codes = weights.array("weight", shape, "I8")
    scale = weights.array("weight_scale", (out, blocks), info.dtype)
    return QuantizedLinear(
        codes=stored(name, ir.DataType.INT8, (width, out), lambda: codes().T),
        scales=scale_tensor(
            f"{name}_scale", (blocks, out), dtype, lambda: scale().T, has_signs=True
        ),
        block_size=width // blocks,
    )


def _nvfp4(weights: Weights, shape: tuple[int, int]) -> QuantizedLinear:
    """FLOAT4E2M1 [out, in] in blocks of 16 inputs, with FP8 scales and a float32 one for them."""
    out, width = shape
    name = weights.prefix
    if width % _BLOCK_NVFP4:
        raise BrokenArtifactError(f"{name}weight: {width} inputs are not a multiple of 16")
    blocks = (out, width // _BLOCK_NVFP4)
    codes = weights.array("weight", (out, width // 2), "U8")
    scale = weights.array("weight_scale", blocks, "F8_E4M3")
    return QuantizedLinear(
        codes=stored(f"{name}weight", ir.DataType.FLOAT4E2M1, shape, codes),
        scales=stored(
            f"{name}weight_scale",
            ir.DataType.FLOAT8E4M3FN,
            blocks,
            lambda: finite_fp8(name, scale()),
        ),
        block_size=_BLOCK_NVFP4,
        global_scale=scalar(weights, "weight_scale_2"),
        input=_static_input(weights, ir.DataType.FLOAT4E2M1),
    )


def _int4(weights: Weights, shape: tuple[int, int], dtype: ir.DataType) -> QuantizedLinear:
    """INT4 in blocks along the input.

    ModelOpt's bytes (`quantize.formats.modelopt.pack_int4`) have two neighbours of `out`, as in
    ONNX, so that repacking is a transposition.
    """
    out, width = shape
    name, info = weights.prefix, weights.info("weight_scale")
    assert info is not None
    if len(info.shape) != 2 or width % info.shape[1]:
        raise UnsupportedModelError(f"{name}weight_scale does not fit the weight")
    blocks = info.shape[1]
    codes = weights.array("weight", (out // 2, width), "U8")
    scale = weights.array("weight_scale", (out, blocks), info.dtype)
    return QuantizedLinear(
        codes=stored(f"{name}weight", ir.DataType.INT4, (width, out), lambda: codes().T),
        scales=scale_tensor(
            f"{name}weight_scale", (blocks, out), dtype, lambda: scale().T, has_signs=True
        ),
        block_size=width // blocks,
    )


def scalar(weights: Weights, name: str) -> float:
    """A tensor of one number; raises `BrokenArtifactError` unless it is positive."""
    number = weights.number(name)
    if not 0 < number < np.inf:
        raise BrokenArtifactError(f"{weights.prefix}{name} is {number}, not a positive number")
    return number


def _static_input(weights: Weights, dtype: ir.DataType) -> InputRounding | None:
    """The rounding of inputs by a calibrated scale.

    With scales computed at run time (FP8 per token), inputs stay floats: TensorRT does not support
    these, and float inputs are more exact.
    """
    if weights.info("input_scale") is not None:
        return InputRounding(dtype, scalar(weights, "input_scale"))
    if algorithm(weights) in _STATIC_INPUTS:
        raise BrokenArtifactError(
            f"{weights.prefix}input_scale is missing: the checkpoint was quantized without "
            "calibration data",
            hint="quantize it again with edgellm-quantize",
        )
    return None


def algorithm(weights: Weights) -> str:
    """ModelOpt's name of a layer's format, "" if the checkpoint has none."""
    config = weights.quantization
    layers = config.get("quantized_layers") or {}
    layer = layers.get(weights.prefix.rstrip(".")) or {} if isinstance(layers, dict) else layers
    if not isinstance(layer, dict):
        raise BrokenArtifactError(
            f"{weights.prefix.rstrip('.')}: quantized_layers of the quantization config is no JSON "
            "object of objects"
        )
    return str(layer.get("quant_algo") or config.get("quant_algo") or "")
