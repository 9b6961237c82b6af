"""The numpy reader and the quantization of activations, against definitions."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgellm.core.errors import (
    BrokenArtifactError,
    UnsupportedModelError,
)
from edgellm.export.checkpoints.checkpoint import TensorInfo
from edgellm.quantize.formats.activation_rounding import round_input
from edgellm.quantize.formats.modelopt import E2M1, E4M3, pack_int4, unpack_int4, unpack_nvfp4
from edgellm.quantize.formats.quantized_linear import decode_linear
from edgellm.quantize.formats.schemes import SCHEMES, block_size
from edgellm.quantize.formats.tensors import InMemory, Tensor, split_shards

_NAMES = {"float32": "F32", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3"}


def _tensor(array) -> Tensor:
    array = np.asarray(array)
    return Tensor(TensorInfo(_NAMES[str(array.dtype)], array.shape), array.tobytes())


def test_e4m3_and_e2m1_tables_equal_ml_dtypes():
    codes = np.arange(256, dtype=np.uint8)
    theirs = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(E4M3, theirs)
    fp4 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(E2M1, fp4)


@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([16, 32]), st.integers(0, 99))
def test_int4_unpacks_to_what_was_packed(half_rows, blocks, size, seed):
    codes = np.random.default_rng(seed).integers(-7, 8, (2 * half_rows, blocks * size))
    codes[:, ::size] = 7  # so that the scale is 1
    packed, scale = pack_int4(codes.astype(np.float32), size)
    np.testing.assert_array_equal(unpack_int4(packed, scale), codes)


def test_nvfp4_unpacks_low_nibbles_first():
    packed = np.zeros((1, 8), np.uint8)
    packed[0, 0] = 2 | 0xF << 4  # 1 and -6
    found = unpack_nvfp4(packed, np.full((1, 1), 2, np.float32), np.float32(0.5))
    assert found[0, :3].tolist() == [1, -6, 0]


@pytest.mark.parametrize("kind", ["fp8", "int8", "nvfp4"])
def test_activations_are_rounded_to_nearest(kind):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(3, 32)).astype(np.float32) * 10
    x[0, :16] = 0
    x[1, :8] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6]  # ties with a scale of 1
    scale = np.float32(0.02 if kind == "nvfp4" else 0.05)
    found = round_input(torch.from_numpy(x), kind, float(scale)).numpy()
    np.testing.assert_allclose(found, _slowly(x, kind, scale), rtol=1e-6, atol=1e-9)


def _slowly(x, kind, scale):
    if kind == "int8":
        return np.clip(np.rint(x / scale), -128, 127) * scale
    if kind == "fp8":
        wanted = np.clip(x / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        return wanted.astype(np.float32) * scale
    found = np.empty_like(x)
    for row, begin in np.ndindex(len(x), x.shape[1] // 16):
        block = x[row, 16 * begin : 16 * begin + 16]
        wanted = np.clip(np.abs(block).max() / np.float32(6) / scale, 2.0**-9, 448)
        effective = np.float32(np.float32(wanted).astype(ml_dtypes.float8_e4m3fn)) * scale
        codes = np.clip(block / effective, -6, 6).astype(ml_dtypes.float4_e2m1fn)
        found[row, 16 * begin : 16 * begin + 16] = codes.astype(np.float32) * effective
    return found


def test_invalid_layers_are_rejected():
    """A quantizer may write such tensors without an error."""
    good = {
        "x.weight": np.ones((2, 4), ml_dtypes.float8_e4m3fn),
        "x.weight_scale": np.float32(1),
        "x.input_scale": np.float32(1),
    }
    nan = np.full((2, 4), 0x7F, np.uint8).view(ml_dtypes.float8_e4m3fn)
    assert decode_linear(_tensors(good), "x", (2, 4), True).bits == 8 * (8 + 4 + 4) / 8
    for change, words in (
        ({"x.weight": nan}, "x.weight holds values that are not numbers"),
        ({"x.weight_scale": np.float32(0)}, "x.weight_scale is not positive"),
        ({"x.weight_scale": np.float32(np.inf)}, "x.weight_scale holds values that are not"),
        ({"x.input_scale": None}, "x.input_scale is missing"),
        ({"x.weight_scale": None}, "x was not quantized"),
        ({"x.weight": np.ones((2, 4), np.float32)}, "x was not quantized"),
        ({"x.weight": np.ones((4, 4), ml_dtypes.float8_e4m3fn)}, "x has shape"),
    ):
        with pytest.raises(BrokenArtifactError, match=words):
            decode_linear(_tensors({**good, **change}), "x", (2, 4), True)


def test_int4_scales_may_be_negative_but_not_zero():
    good = {
        "x.weight": np.full((1, 4), 0x18, np.uint8),
        "x.weight_scale": np.array([[-2], [3]], np.float32),
    }
    found = decode_linear(_tensors(good), "x", (2, 4), False)
    np.testing.assert_array_equal(found.weight, [[16] * 4, [3] * 4])
    good["x.weight_scale"][0] = 0
    with pytest.raises(BrokenArtifactError, match="not positive"):
        decode_linear(_tensors(good), "x", (2, 4), False)


def _tensors(arrays):
    return {name: _tensor(array) for name, array in arrays.items() if array is not None}


def test_the_group_size_divides_all_inputs():
    int4, nvfp4 = SCHEMES["int4_awq"], SCHEMES["nvfp4"]
    shapes = {"a": (4, 256), "b": (4, 512)}
    assert block_size(int4, shapes) == 128
    assert block_size(int4, {**shapes, "c": (4, 576)}) == 64
    assert block_size(int4, {**shapes, "c": (4, 96)}) == 32
    assert block_size(nvfp4, {**shapes, "c": (4, 80)}) == 16
    assert block_size(SCHEMES["fp8"], {"c": (3, 7)}) == 0
    with pytest.raises(UnsupportedModelError, match="c has 80 inputs"):
        block_size(int4, {**shapes, "c": (4, 80)})
    with pytest.raises(UnsupportedModelError, match="c has 3 outputs"):
        block_size(int4, {"c": (3, 128)})
    with pytest.raises(UnsupportedModelError, match="c has 40 inputs"):
        block_size(nvfp4, {"c": (4, 40)})


def test_shards_keep_the_order_and_the_limit():
    source = InMemory({name: _tensor(np.zeros(25, np.float32)) for name in "abcde"})
    assert split_shards(source, list("abcde"), 250) == [["a", "b"], ["c", "d"], ["e"]]
    assert split_shards(source, list("ab"), 10) == [["a"], ["b"]]
