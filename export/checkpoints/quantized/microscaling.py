"""Microscaling formats (OCP MX 1.0): MXFP4 and MXFP8, groups of 32 inputs that share an exponent.

`weight_scale` [out, in / 32] holds exponents of two plus 127 (E8M0), as uint8 or F8_E8M0. Codes are
FLOAT8E4M3FN [out, in], or pairs of FLOAT4E2M1 [out, in / 2], the first in the low half. Sources:
compressed-tensors 0.20 (`mxfp4-pack-quantized`, `mxfp8-quantized`), nvidia-modelopt 0.47 and
auto-round 0.16. They round inputs at run time; here inputs stay floats, which is more exact.

Graphs have FLOAT4E2M1 in NVFP4's form: blocks of 16 with scales in FP8 and a global scale. Powers
of two are exact in it within 17 octaves of a tensor.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm.core.errors import BrokenArtifactError, UnsupportedModelError
from edgellm.export.checkpoints.quantized_weight import (
    Load,
    QuantizedLinear,
    finite_fp8,
    scale_tensor,
    stored,
)
from edgellm.export.checkpoints.weights import Weights

GROUP = 32  # inputs that share an exponent
_BIAS, _NAN = 127, 255
_EXPONENTS = ("U8", "F8_E8M0")  # types of `weight_scale`
_MAX_FP8, _OCTAVES = 8, 17  # FLOAT8E4M3FN has the powers of two from -9 to 8
_NVFP4_BLOCK = 16


def read(weights: Weights, shape: tuple[int, int], dtype: ir.DataType) -> QuantizedLinear | None:
    """See `edgellm.export.checkpoints.quantized.Layout`."""
    if not is_microscaled(weights, shape):
        return None
    name = "weight_packed" if weights.info("weight_packed") is not None else "weight"
    info = weights.info(name)
    if info is None or info.dtype not in ("F8_E4M3", "U8"):
        return None
    exponents = _exponents(weights, shape)
    if info.dtype == "F8_E4M3":
        return _fp8(weights, shape, dtype, exponents)
    return _fp4(weights, name, shape, exponents)


def is_microscaled(weights: Weights, shape: tuple[int, int]) -> bool:
    """Whether `weight_scale` holds an exponent of each group of 32 inputs."""
    out, width = shape
    scale = weights.info("weight_scale")
    if scale is None or scale.dtype not in _EXPONENTS or width % GROUP:
        return False
    return scale.shape == (out, width // GROUP)


def _exponents(weights: Weights, shape: tuple[int, int]) -> Load:
    """A loader of exponents without their bias, int64 [out, in / 32]."""
    info = weights.info("weight_scale")
    assert info is not None
    load = weights.array("weight_scale", (shape[0], shape[1] // GROUP), info.dtype)

    def exponents() -> np.ndarray:
        found = load().view(np.uint8)
        if (found == _NAN).any():
            raise BrokenArtifactError(
                f"{weights.prefix}weight_scale holds values that are not numbers",
                hint="a damaged weight was quantized; quantize it again",
            )
        return found.astype(np.int64) - _BIAS

    return exponents


def _fp8(
    weights: Weights, shape: tuple[int, int], dtype: ir.DataType, exponents: Load
) -> QuantizedLinear:
    out, width = shape
    prefix, groups = weights.prefix, width // GROUP
    codes = weights.array("weight", shape, "F8_E4M3")

    def scales() -> np.ndarray:
        bits = codes().view(np.uint8).reshape(out, groups, GROUP)
        found = np.where((bits & 0x7F).any(-1), exponents(), 0)  # a group of zeros needs none
        return np.exp2(found.astype(np.float64)).T

    kind = ir.DataType.FLOAT8E4M3FN
    return QuantizedLinear(
        codes=stored(f"{prefix}weight", kind, (width, out), lambda: finite_fp8(prefix, codes().T)),
        scales=scale_tensor(f"{prefix}weight_scale", (groups, out), dtype, scales),
        block_size=GROUP,
    )


def _fp4(weights: Weights, name: str, shape: tuple[int, int], exponents: Load) -> QuantizedLinear:
    out, width = shape
    codes = weights.array(name, (out, width // 2), "U8")
    highest = _highest(weights.prefix, codes, exponents())

    def scales() -> np.ndarray:
        shifted = np.maximum(exponents() - highest, -_OCTAVES) + _MAX_FP8
        blocks = np.repeat(np.minimum(shifted, _MAX_FP8), GROUP // _NVFP4_BLOCK, axis=1)
        return np.exp2(blocks.astype(np.float32)).astype(ir.DataType.FLOAT8E4M3FN.numpy())

    kind = ir.DataType.FLOAT8E4M3FN
    blocks = (out, width // _NVFP4_BLOCK)
    return QuantizedLinear(
        codes=stored(f"{weights.prefix}weight", ir.DataType.FLOAT4E2M1, shape, codes),
        scales=stored(f"{weights.prefix}weight_scale", kind, blocks, scales),
        block_size=_NVFP4_BLOCK,
        global_scale=float(2.0 ** (highest - _MAX_FP8)),
    )


def _highest(prefix: str, codes: Load, exponents: np.ndarray) -> int:
    """The largest exponent of a tensor; groups of zeros, which need none, may have any.

    Raises:
        UnsupportedModelError: the exponents differ by more than 17.
    """
    if np.ptp(exponents) > _OCTAVES:
        pairs = codes().reshape(*exponents.shape, GROUP // 2)
        exponents = exponents[(pairs & 0x77).any(-1)]
    lowest, highest = (int(exponents.min()), int(exponents.max())) if exponents.size else (0, 0)
    if highest - lowest > _OCTAVES:
        raise UnsupportedModelError(
            f"{prefix}weight_scale: MXFP4 groups with exponents from {lowest} to {highest} are "
            f"not supported, only {_OCTAVES} octaves",
            hint="quantize the layer to MXFP8 or NVFP4",
        )
    return highest
