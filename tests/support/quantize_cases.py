"""Tiny models to quantize, text to calibrate them with, and a decoder of the result."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from conftest import make_checkpoint

from edgellm.export import models
from edgellm.export.checkpoints.checkpoint import Safetensors, read_whole
from edgellm.quantize.job import Job

# Hidden 96 as well: INT4 blocks of 32.
SIZES = dict.fromkeys(
    ("intermediate_size", "shared_intermediate_size", "moe_intermediate_size",
     "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 96
)  # fmt: skip
SIZES["linear_head_dim"] = 32  # the inner size of low-rank gates, too
_TYPES = {
    "F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16, "U8": np.uint8,
    "I8": np.int8, "F8_E4M3": ml_dtypes.float8_e4m3fn, "I64": np.int64, "BOOL": np.bool_,
}  # fmt: skip
_E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def make_model(folder: Path, kind: str, **changes: object) -> Path:
    tiny = models.find(kind).TINY
    sizes = {key: size for key, size in SIZES.items() if key in tiny}
    config = {**tiny, **sizes, **changes}
    return make_checkpoint(folder, dtype="bfloat16", **config)


def write_text(path: Path, documents: int = 120) -> Path:
    chance = random.Random(0)

    def words(count: int) -> str:
        return " ".join(f"w{chance.randrange(9, 96)}" for _ in range(count))

    lines = [
        {"messages": [{"role": "user", "content": words(12)},
                      {"role": "assistant", "content": words(20)}]}
        for _ in range(documents)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def make_job(model: Path, text: Path, output: Path, scheme: str, **changes: object) -> Job:
    # Graphs round INT8 inputs as GPUs do.
    options = {"num_samples": 12, "seq_len": 32, "held_out": 2, "device": "cpu", "target": "gpu",
               **changes}  # fmt: skip
    return Job(
        model_dir=str(model),
        output_dir=output,
        quantization=scheme,
        calib_dataset=str(text),
        **options,
    )


def plain_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime as it reads graphs: an optimization of FP8 graphs makes invalid ones."""
    import onnxruntime as ort

    literal = ort.SessionOptions()
    literal.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    monkeypatch.setattr(ort, "SessionOptions", lambda: literal)


def load(folder: Path) -> dict[str, np.ndarray]:
    """All tensors, float8 and bfloat16 in ml_dtypes' types."""
    source = Safetensors([folder / "model.safetensors"])
    return {
        name: np.frombuffer(read_whole(source, name), _TYPES[info.dtype]).reshape(info.shape)
        for name, info in source.infos().items()
    }


def decode(tensors: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """The weight [out, in] of a layer, from the documentation of the layout, slowly."""
    weight, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
    if weight.dtype != np.uint8:
        return weight.astype(np.float32) * scale.reshape(-1, 1).astype(np.float32)
    rows, columns = weight.shape
    if scale.dtype == ml_dtypes.float8_e4m3fn:
        found = np.zeros((rows, 2 * columns), np.float32)
        for row, column in np.ndindex(rows, 2 * columns):  # slow, and as documented
            code = int(weight[row, column // 2]) >> (4 * (column % 2)) & 15
            block = np.float32(scale[row, column // 16]) * tensors[f"{name}.weight_scale_2"]
            found[row, column] = _E2M1[code & 7] * (-1 if code & 8 else 1) * block
        return found
    found = np.zeros((2 * rows, columns), np.float32)
    block_size = columns // scale.shape[1]
    for row, column in np.ndindex(2 * rows, columns):
        code = int(weight[row // 2, column]) >> (4 * (row % 2)) & 15
        found[row, column] = (code - 16 * (code > 7)) * scale[row, column // block_size]
    return found
