"""A tied embedding in INT8: one quantized table is both embedding and head.

Each row has a float16 scale for each group of values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgellm.export.checkpoints.checkpoint import TensorInfo
from edgellm.quantize.calibration.hidden_states import States
from edgellm.quantize.formats.modelopt import F32
from edgellm.quantize.formats.quantized_linear import DecodedLinear
from edgellm.quantize.formats.schemes import TABLE_BLOCKS
from edgellm.quantize.formats.tensors import Tensor, read_tensor
from edgellm.quantize.models.checks import EMBEDDING
from edgellm.quantize.plan import Plan
from edgellm.quantize.work_folder import ANSWERS, HEAD_PART, QUANTIZED, ROUNDED

_CHUNK = 4096  # rows at a time


def store_table(plan: Plan) -> None:
    """Quantize the table, and store it as the head's part."""
    table = read_tensor(plan.subject.tensors, EMBEDDING)
    codes, scales = (np.concatenate(each) for each in zip(*_chunks(table), strict=True))
    block = _block(table.info.shape[1])
    tensors = {
        EMBEDDING: Tensor(TensorInfo("I8", codes.shape), codes.tobytes()),
        f"{EMBEDDING}_scale": Tensor(TensorInfo("F16", scales.shape), scales.tobytes()),
    }
    described: dict[str, Any] = {"quant_algo": "W8A16", "group_size": block}
    plan.task.work.store(HEAD_PART, tensors, {"quantization": described, "seconds": 0.0})


def decode_table(plan: Plan) -> DecodedLinear:
    """Dequantize the stored table."""
    found = plan.task.work.tensors(HEAD_PART)
    codes, scales = (read_tensor(found, f"{EMBEDDING}{part}") for part in ("", "_scale"))
    stored = codes.info.num_bytes + scales.info.num_bytes
    weight = _values(codes.array(), scales.array())
    return DecodedLinear(
        weight=weight,
        pre_quant_scale=None,
        input_type="",
        input_scale=1.0,
        bits=8 * stored / weight.size,
    )


def write_quantized_embeddings(plan: Plan, streams: dict[str, States]) -> None:
    """Write quantized embeddings as the input of the quantized model's streams."""
    for name in (QUANTIZED, ROUNDED, ANSWERS):
        if name in streams:
            rows = plan.task.rows(name)
            floats = plan.subject.reader.embedded(rows, plan.task.batch_rows)
            streams[name].write(_rounded(batch) for batch in floats)


def _rounded(batch: torch.Tensor) -> torch.Tensor:
    """Quantize and dequantize embeddings."""
    flat = batch.flatten(0, -2).cpu().numpy()
    return torch.from_numpy(_values(*_codes(flat))).view(batch.shape)


def _chunks(table: Tensor) -> Iterator[tuple[NDArray[np.int8], NDArray[np.float16]]]:
    for begin in range(0, table.info.shape[0], _CHUNK):
        yield _codes(table.rows(begin, begin + _CHUNK).floats())


def _codes(rows: F32) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Return INT8 values [n, H] and scales [n, H / block]."""
    blocks = rows.reshape(len(rows), -1, _block(rows.shape[1]))
    scales = (np.abs(blocks).max(-1) / np.float32(127)).astype(np.float16)
    scales = np.maximum(scales, np.finfo(np.float16).smallest_subnormal)
    steps = np.rint(blocks / scales.astype(np.float32)[..., None])
    return np.clip(steps, -127, 127).astype(np.int8).reshape(rows.shape), scales


def _values(codes: np.ndarray, scales: np.ndarray) -> F32:
    wide = np.repeat(scales.astype(np.float32), codes.shape[1] // scales.shape[1], 1)
    return codes.astype(np.float32) * wide


def _block(width: int) -> int:
    """Return the group size; the plan checked that one exists."""
    return next(size for size in TABLE_BLOCKS if width % size == 0)
