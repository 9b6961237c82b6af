"""Rounds float weights to 8 bits during the export.

Each output channel has a scale from its largest weight. There is no calibration, so inputs stay
floats in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgellm.core.errors import BrokenArtifactError
from edgellm.export.checkpoints.quantized_weight import QuantizedLinear, scale_tensor, stored
from edgellm.export.checkpoints.weights import Weights

F32 = NDArray[np.float32]
# Types of codes, and their maximum.
_PRECISIONS = {"int8": (ir.DataType.INT8, 127), "fp8": (ir.DataType.FLOAT8E4M3FN, 448)}
_BLOCK_VALUES = 1 << 18  # in float32 at a time


def round_linear(weights: Weights, shape: tuple[int, int], dtype: ir.DataType) -> QuantizedLinear:
    """The float linear layer [out, in] at `weights` in the precision `weights.rounding`.

    Codes are rounded with the scales in the graph's `dtype`.

    Raises (when the tensors are written):
        BrokenArtifactError: weights that are NaN, or too large for `dtype`.
    """
    name, info = f"{weights.prefix}weight", weights.info("weight")
    assert info is not None
    kind, largest = _PRECISIONS[weights.rounding]
    load = weights.array("weight", shape, info.dtype)
    smallest = np.finfo(dtype.numpy()).smallest_subnormal

    def scales(weight: np.ndarray) -> F32:
        return np.maximum(_largest(name, weight) / np.float32(largest), smallest)

    def codes() -> np.ndarray:
        weight = load()
        exact = scales(weight).astype(dtype.numpy()).astype(np.float32)
        return _codes(weight, exact, kind, largest)

    return QuantizedLinear(
        codes=stored(name, kind, (shape[1], shape[0]), codes),
        scales=scale_tensor(f"{name}_scale", shape[:1], dtype, lambda: scales(load())),
        block_size=0,
    )


def _largest(name: str, weight: np.ndarray) -> F32:
    """The largest magnitude of each row of a weight [out, in], [out]."""
    found = np.concatenate([np.abs(rows).max(1) for _, rows in _blocks(weight)])
    if not np.isfinite(found).all():
        raise BrokenArtifactError(
            f"tensor {name} holds values that are not numbers",
            hint="the checkpoint is damaged or its training diverged; fetch it again",
        )
    return found


def _codes(weight: np.ndarray, scales: F32, kind: ir.DataType, largest: int) -> np.ndarray:
    """Quantize a weight [out, in] with scales [out] to codes [in, out]."""
    codes = np.empty(weight.shape[::-1], kind.numpy())
    for part, rows in _blocks(weight):
        steps = np.clip(rows / scales[part, None], -largest, largest)
        codes[:, part] = (np.rint(steps) if kind == ir.DataType.INT8 else steps).T
    return codes


def _blocks(weight: np.ndarray) -> Iterator[tuple[slice, F32]]:
    """Rows of a weight as floats, a few at a time, with their slices."""
    step = max(1, _BLOCK_VALUES // weight.shape[1])
    for begin in range(0, len(weight), step):
        part = slice(begin, begin + step)
        yield part, weight[part].astype(np.float32)
