"""The two kernels in PTX, interpreted: they move and append to KV caches."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from ptx_interpreter import launch

from edgellm.core.model_spec import KVCacheSpec
from edgellm.device_runtime.runners.tensorrt import kv_append
from edgellm.device_runtime.runners.tensorrt.cuda import gather, kv_compaction
from edgellm.device_runtime.runners.tensorrt.device_kv_cache import aligned_capacity

TENSORS, HEADS, ROWS, WORDS = 4, 3, 11, 2


def _memory(*arrays: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Memory with arrays at multiples of 256 bytes, and the offset of each."""
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // 256) * 256
    memory = np.zeros(end, np.uint8)
    for start, array in zip(starts, arrays, strict=True):
        memory[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    return memory, starts


@pytest.mark.parametrize(("count", "threads"), [(1, 32), (5, 4)])
def test_rows_are_appended(count, threads):
    random, first = np.random.default_rng(count), 4
    cache = random.integers(0, 256, (TENSORS, HEADS, ROWS, WORDS * 16), np.uint8)
    new = random.integers(0, 256, (TENSORS, HEADS, count, WORDS * 16), np.uint8)
    stride = 512
    rows = np.zeros((TENSORS, stride), np.uint8)
    rows[:, : new[0].size] = new.reshape(TENSORS, -1)
    memory, (at, rows_at, index_at) = _memory(cache, rows, np.array([first]))
    parameters = [at, rows_at, index_at, count, HEADS, stride, ROWS * WORDS, WORDS]
    launch(kv_append.PTX, parameters, memory, TENSORS * HEADS, threads)
    cache[:, :, first : first + count] = new
    np.testing.assert_array_equal(memory[: cache.nbytes].reshape(cache.shape), cache)


def test_rows_are_moved():
    cache = np.random.default_rng(0).integers(0, 256, (HEADS, ROWS, WORDS * 16), np.uint8)
    kept = np.array([0, 2, 3, 6], np.int32)
    memory, (at, kept_at) = _memory(cache, kept)
    launch(kv_compaction.PTX, [at, kept_at, 4, 3, ROWS * WORDS, WORDS], memory, HEADS, 32)
    cache[:, 3:7] = cache[:, 3 + kept]
    np.testing.assert_array_equal(memory[: cache.nbytes].reshape(cache.shape), cache)


def test_rows_are_gathered():
    source = np.random.default_rng(0).integers(0, 256, (9, 5 * 16), np.uint8)
    rows, target = np.array([7, 0, 0, 8], np.int32), np.zeros((4, 5 * 16), np.uint8)
    memory, (to, at, rows_at) = _memory(target, source, rows)
    launch(gather.PTX, [to, at, rows_at, 5], memory, len(rows), 3)
    np.testing.assert_array_equal(memory[: target.nbytes].reshape(target.shape), source[rows])


@pytest.mark.parametrize("module", [kv_append, kv_compaction, gather])
@pytest.mark.parametrize("target", ["sm_87", "sm_110", "sm_120"])
def test_an_assembler_takes_them(tmp_path, module, target):
    nvidia = pytest.importorskip("triton.backends.nvidia", reason="triton's ptxas is not here")
    (tmp_path / "kernel.ptx").write_text(module.PTX)
    ptxas = Path(nvidia.__path__[0]) / "bin" / "ptxas-blackwell"
    command = [
        ptxas,
        f"--gpu-name={target}",
        "-o",
        tmp_path / "kernel.cubin",
        tmp_path / "kernel.ptx",
    ]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stderr == ""


@pytest.mark.parametrize(
    ("head_dim", "dtype", "asked", "rows"),
    [(64, "float16", 4097, 4098), (128, "float16", 4097, 4097), (8, "float16", 72, 80)],
)
def test_capacities_whose_tensors_are_aligned(head_dim, dtype, asked, rows):
    spec = KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=head_dim, dtype=dtype)
    assert aligned_capacity(spec, asked) == rows
