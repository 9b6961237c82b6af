"""FP8 in blocks of outputs and inputs, by any maker: `weight` and a scale of each block.

`W = e4m3 * scale` [out / 128, in / 128]; the last blocks of outputs may be smaller. Scales are
floats, or powers of two (F8_E8M0). Other engines round inputs at run time in groups of 128; here
they stay floats, which is more exact, unless the checkpoint has an `activation_scale`.

Sources: DeepSeek-V3 and Qwen3-FP8, `weight_scale_inv`, which transformers 5.24 also writes for a
whole tensor; compressed-tensors 0.20, strategy `block`, `weight_scale`; nvidia-modelopt 0.47,
FP8_PB_WO, `weight_scale` [out / 128, 1, in / 128, 1].
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from edgellm.core.errors import BrokenArtifactError, UnsupportedModelError
from edgellm.export.checkpoints.checkpoint import TensorInfo
from edgellm.export.checkpoints.quantized.microscaling import is_microscaled
from edgellm.export.checkpoints.quantized.modelopt import scalar
from edgellm.export.checkpoints.quantized_weight import (
    InputRounding,
    QuantizedLinear,
    finite_fp8,
    scale_tensor,
    stored,
)
from edgellm.export.checkpoints.weights import Weights

_BLOCK = 128
_INVERSE, _SCALE, _INPUT = "weight_scale_inv", "weight_scale", "activation_scale"


def read(weights: Weights, shape: tuple[int, int], dtype: ir.DataType) -> QuantizedLinear | None:
    """See `edgellm.export.checkpoints.quantized.Layout`."""
    out, width = shape
    name = _INVERSE if weights.info(_INVERSE) is not None else _SCALE
    info = weights.info(name)
    if (
        info is None
        or is_microscaled(weights, shape)
        or (name == _SCALE and not _is_in_blocks(weights, info, out))
    ):
        return None
    rows, columns = _block_size(weights, shape, info)
    if width % columns:
        raise UnsupportedModelError(
            f"{weights.prefix}weight: {width} inputs are not a multiple of the block's {columns}"
        )
    blocks = (-(-out // rows), width // columns)
    is_whole = blocks == (1, 1) and _is_one(info)
    place = (blocks[0], 1, blocks[1], 1) if len(info.shape) == 4 else blocks
    codes = weights.array("weight", shape, "F8_E4M3")
    scale = weights.array(name, info.shape if is_whole else place, info.dtype)

    def factors() -> np.ndarray:
        found = scale().reshape(blocks)
        return found.reshape(()) if is_whole else np.repeat(found, rows, axis=0)[:out].T

    prefix, kind = weights.prefix, ir.DataType.FLOAT8E4M3FN
    has_input_scale = weights.info(_INPUT) is not None
    return QuantizedLinear(
        codes=stored(f"{prefix}weight", kind, (width, out), lambda: finite_fp8(prefix, codes().T)),
        scales=scale_tensor(
            f"{prefix}{name}", () if is_whole else (blocks[1], out), dtype, factors
        ),
        block_size=0 if is_whole else columns,
        input=InputRounding(kind, scalar(weights, _INPUT)) if has_input_scale else None,
    )


def _is_one(info: TensorInfo) -> bool:
    return all(extent == 1 for extent in info.shape)


def _is_in_blocks(weights: Weights, scale: TensorInfo, out: int) -> bool:
    """Whether `weight_scale` is of blocks, not of the tensor or of each output."""
    weight = weights.info("weight")
    is_fp8 = weight is not None and weight.dtype == "F8_E4M3"
    return is_fp8 and len(scale.shape) in (2, 4) and scale.shape not in ((1, 1), (out, 1))


def _block_size(weights: Weights, shape: tuple[int, int], scale: TensorInfo) -> tuple[int, int]:
    """Outputs and inputs of a block: as stated, or 128, or one block for the whole tensor."""
    if (size := _stated(weights.quantization)) is None:
        return shape if _is_one(scale) else (_BLOCK, _BLOCK)
    is_pair = isinstance(size, list) and len(size) == 2
    if not is_pair or not all(type(extent) is int and extent > 0 for extent in size):
        raise BrokenArtifactError(
            f"the quantization config says weight_block_size {size!r}, not two positive integers"
        )
    return size[0], size[1]


def _stated(config: Any) -> Any:
    """The block's size, by transformers' key or by compressed-tensors'; None: it has none."""
    if size := config.get("weight_block_size"):
        return size
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and weights.get("block_structure"):
            return weights["block_structure"]
    return None
