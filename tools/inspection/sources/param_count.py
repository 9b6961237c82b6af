"""Number of parameters of a checkpoint, with packed weights unpacked."""

from __future__ import annotations

import math

import numpy as np

from edgellm.export.checkpoints.checkpoint import Checkpoint, TensorInfo, read_whole

# Scales and other tensors of quantized weights, and tables that are not weights.
_EXTRAS = (
    "_scale", "_scales", "_scale_2", "_scale_inv", "_scale_ub", "_zero_point", "_shape", "g_idx",
    ".scales", ".qzeros", ".absmax", ".quant_map", "inv_freq", "d2t", "t2d",
)  # fmt: skip


def count_parameters(checkpoint: Checkpoint) -> int:
    """Return the number of parameters; a tied head is not counted twice."""
    infos = checkpoint.tensors.infos()
    tied = bool(checkpoint.config.get("tie_word_embeddings")) and len(infos) > 1
    return sum(
        _numbers(checkpoint, name, info)
        for name, info in infos.items()
        if not name.endswith(_EXTRAS) and not (tied and name == "lm_head.weight")
    )


def _numbers(checkpoint: Checkpoint, name: str, info: TensorInfo) -> int:
    stored = math.prod(info.shape)
    if name.endswith(".qweight"):  # GPTQ, AutoAWQ: 32-bit words
        inputs = checkpoint.tensors.infos().get(name.removesuffix("qweight") + "g_idx")
        if inputs is not None:
            return math.prod(inputs.shape) * info.shape[-1]
        return stored * 32 // int(checkpoint.quant_config.get("bits") or 4)
    if name.endswith(".weight_packed") and info.dtype != "U8":  # compressed-tensors: words
        return math.prod(_shape(checkpoint, name)) or stored * 8
    return stored * 2 if info.dtype == "U8" else stored  # pairs of 4 bits


def _shape(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    """Return the shape of a packed weight from its shape tensor; (0,) without one."""
    shape_name = name.removesuffix("packed") + "shape"
    info = checkpoint.tensors.infos().get(shape_name)
    if info is None or info.dtype not in ("I32", "I64"):
        return (0,)
    kind = np.int32 if info.dtype == "I32" else np.int64
    return tuple(np.frombuffer(read_whole(checkpoint.tensors, shape_name), kind).tolist())
