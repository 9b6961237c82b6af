"""Products of rows with packed weights: correct and batch-invariant."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from kernel_calls import (
    DOUBLED_FP4,
    blocks_case,
    channel,
    float_case,
    fp8_case,
    product,
    quantized_case,
)

from edgellm.device_runtime.kernels.library import instruction_sets

SETS = instruction_sets()
FAST = SETS[:-1]
SHAPES = (  # kind, K, N, block, zero points, gated, terms of inputs
    ("int4", 256, 64, 32, False),
    ("int4", 200, 72, 32, True),  # neither K nor N is whole
    ("int4", 576, 41, 128, False),
    ("int4", 448, 96, 64, True),
    ("int4", 72, 40, 16, True),
    ("fp4", 176, 70, 16, False),
    ("fp4", 160, 40, 32, False),
    ("int8", 320, 64, 32, False),
    ("int8", 576, 33, 128, True),
    ("int8", 40, 5, 64, False),
    ("int8", 200, 41, 16, False, False, 2),
    ("int8", 384, 64, 128, True, False, 2),
    ("int2", 300, 72, 64, False),
    ("int2", 400, 33, 128, False),
    ("int2", 90, 40, 16, False),
    ("int5", 200, 41, 32, False),
    ("int5", 300, 64, 128, True),
)
BLOCKS = (  # kind, K, N of quantized scales
    ("int2", 512, 70),
    ("int3", 256, 40),
    ("int4", 512, 33),
    ("int5", 512, 64),
    ("int6", 768, 41),
)
FEW_AND_MANY = 3, 24  # rows; many rows unpack codes once on AVX2
# Of the norm of y: a code of 8 bits is off by 1/254 of its block's largest at most, 0.6 % of a row
# of normal numbers; up to twice that where the blocks' sums rule y.
INT8_INPUTS = 0.012
INT15_INPUTS = INT8_INPUTS / 64  # the second term rounds to 1/128 of the first; scales are halves


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def same_bits(a, b):
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def relative_error(y, exact):
    return np.linalg.norm(y - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_instruction_set_has_the_bits_of_the_reference(shape, rng):
    case = quantized_case(rng, *shape)
    for rows in (*range(1, 10), 13, 16, 31, 64):
        x = rng.standard_normal((rows, shape[1]), np.float32)
        reference = product("scalar", case, x)
        bound = INT15_INPUTS if case.form.input_terms == 2 else INT8_INPUTS
        # zero points are stored as half products of 2^-11, as wide as codes of 8 bits
        bound = max(bound, 4e-4) if case.form.has_zero_points else bound
        assert relative_error(reference, x @ case.weight.T) < bound
        for name in FAST:
            assert same_bits(product(name, case, x), reference), (name, rows)


@pytest.mark.parametrize("shape", BLOCKS, ids=str)
def test_quantized_scales_are_exact(shape, rng):
    """Also for the largest codes, whose sums must fit 16 bits on AVX2."""
    case = blocks_case(rng, *shape)
    for rows in (*range(1, 6), 13, 33):
        x = rng.integers(-127, 128, (rows, shape[1])).astype(np.float32)
        x[:, ::16] = 127  # every block's scale is 1
        reference = product("scalar", case, x)
        assert relative_error(reference, x @ case.weight.T) < 1e-6
        for name in FAST:
            assert same_bits(product(name, case, x), reference), (name, rows)
    packed = case.packed.copy()
    records = packed[64:].reshape(-1, case.form.record_bytes)
    records[:, : 256 * 32 * int(shape[0][3:]) // 8] = 0xFF
    for rows in FEW_AND_MANY:
        x = np.full((rows, shape[1]), 1, np.float32)
        reference = product("scalar", case, x, packed=packed)
        for name in FAST:
            assert same_bits(product(name, case, x, packed=packed), reference)
            assert same_bits(product(name, case, -x, packed=packed), -reference)


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[5], SHAPES[7]], ids=str)
def test_integer_products_are_exact(shape, rng):
    """Integers up to 127 have no rounding error; only the float sums have one."""
    case = quantized_case(rng, *shape)
    x = rng.integers(-127, 128, (6, shape[1])).astype(np.float32)
    x[:, :: shape[3]] = 127  # every block's scale is 1
    for name in SETS:
        # zero points are stored as half products: 2^-11 of them
        assert relative_error(product(name, case, x), x @ case.weight.T) < 4e-4


@pytest.mark.parametrize(
    ("kind", "block"),
    [
        ("int4", 128),
        ("int4", 32),
        ("int8", 128),
        ("fp4", 16),
        ("int2", 128),
        ("int5", 128),
        ("int5", 32),
    ],
)
def test_the_largest_integers_do_not_overflow(kind, block, rng):
    """Sums of pairs of products have 16 bits on AVX2."""
    case = quantized_case(rng, kind, 256, 32, block)
    packed = case.packed.copy()
    records = packed[64:].reshape(256 // block, -1)
    for value in (0x77, 0xFF) if kind == "fp4" else (0, 0xFF):
        records[:, :-64] = value
        for sign, rows in itertools.product((-1, 1), FEW_AND_MANY):
            x = np.full((rows, 256), sign, np.float32)
            reference = product("scalar", case, x, packed=packed)
            code = DOUBLED_FP4[value & 15]
            if kind != "fp4":
                half = 1 << int(kind[3:]) - 1
                code = half - 1 if value else -half
            halves = records[:, -64:].copy().view(np.float16).astype(np.float64).sum(0)
            multiplier = case.packed[36:40].view(np.float32)[0]
            np.testing.assert_allclose(
                reference[0], sign * code * block * halves * multiplier, rtol=1e-5
            )
            for name in FAST:
                assert same_bits(product(name, case, x, packed=packed), reference)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32"])
def test_weights_of_sixteen_bits_or_more_are_multiplied_as_floats(kind, rng):
    case = float_case(rng, kind, 300, 72)
    for rows in (1, 2, 5, 8, 33):
        x = rng.standard_normal((rows, 300), np.float32)
        reference = product("scalar", case, x)
        assert relative_error(reference, x @ case.weight.T) < 1e-6
        for name in FAST:
            assert same_bits(product(name, case, x), reference), (name, rows)


@pytest.mark.parametrize("shape", [(300, 72, 300), (256, 40, 128), (200, 33, 48)], ids=str)
def test_fp8_is_multiplied_as_stored(shape, rng):
    """Every code, those below the smallest normal number as well, by scales of floats."""
    case = fp8_case(rng, *shape)
    for rows in (1, 2, 5, 8, 33):
        x = rng.standard_normal((rows, shape[0]), np.float32)
        reference = product("scalar", case, x)
        assert relative_error(reference, x @ case.weight.T) < 1e-6
        for name in FAST:
            assert same_bits(product(name, case, x), reference), (name, rows)


def test_channels_decode_to_their_weights(rng):
    cases = [quantized_case(rng, *shape) for shape in SHAPES]
    cases += [
        fp8_case(rng, 200, 33, 48),
        *(float_case(rng, f"{k}16", 75, 40) for k in ("float", "bfloat")),
        *(blocks_case(rng, *shape) for shape in BLOCKS),
    ]
    for case in cases:
        for index in (0, 31, 32, case.form.out_features - 1):
            if index < case.form.out_features:
                # zero points are stored as half products: 2^-11 of them
                is_rounded = case.form.has_zero_points and not case.form.has_quantized_scales
                bound = 4e-4 if is_rounded else 1e-6
                assert relative_error(channel(case, index), case.weight[index]) < bound


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("kind", ["int4", "int8", "float16", "fp8", "int6"])
def test_results_are_batch_invariant(name, kind, rng):
    width = 256 if kind == "int6" else 96
    if kind == "int6":
        case = blocks_case(rng, kind, width, 64)
    elif kind == "float16":
        case = float_case(rng, kind, 96, 64)
    elif kind == "fp8":
        case = fp8_case(rng, 96, 64, 96)
    else:
        case = quantized_case(rng, kind, 96, 64, 32, zero_points=True)
    gamma = rng.standard_normal(width, np.float32)
    x = rng.standard_normal((2048, width), np.float32)
    alone = np.concatenate([product(name, case, row[None], gamma=gamma) for row in x[:256]])
    together = product(name, case, x, gamma=gamma, threads=2)
    assert same_bits(together[:256], alone)
    first = 0
    while first < len(x):
        rows = int(rng.integers(1, 70))
        piece = product(name, case, x[first : first + rows], gamma=gamma)
        assert same_bits(piece, together[first : first + rows])
        first += rows
    order = rng.permutation(len(x))
    assert same_bits(product(name, case, x[order], gamma=gamma), together[order])


def test_norm_skip_bias_and_residual(rng):
    case = quantized_case(rng, "int4", 100, 40, 32)
    rows, width = 5, 40
    x, skip = (rng.standard_normal((rows, 100), np.float32) for _ in range(2))
    gamma, bias = (rng.standard_normal(n, np.float32) for n in (100, width))
    residual = rng.standard_normal((rows, width), np.float32)
    total = x + skip
    norm = np.sqrt((total.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5)
    exact = (total / norm * gamma) @ case.weight.T + bias + residual
    for name in SETS:
        y, found = product(name, case, x, skip=skip, gamma=gamma, bias=bias, residual=residual)
        assert same_bits(found, total)
        assert relative_error(y, exact) < INT8_INPUTS


def test_gate_and_up_are_interleaved(rng):
    case = quantized_case(rng, "int8", 64, 96, 32, gated=True)
    x, bias = rng.standard_normal((4, 64), np.float32), rng.standard_normal(96, np.float32)
    both = (x @ case.weight.T + bias).reshape(4, 3, 2, 16)
    gate, up = both[:, :, 0].reshape(4, 48), both[:, :, 1].reshape(4, 48)
    reference = product("scalar", case, x, bias=bias)
    assert relative_error(reference, gate / (1 + np.exp(-gate)) * up) < 2 * INT8_INPUTS
    for name in FAST:
        assert same_bits(product(name, case, x, bias=bias), reference)


def test_packed_weights_may_lie_anywhere(rng):
    case = quantized_case(rng, "int4", 64, 40, 32, True)
    x = rng.standard_normal((3, 64), np.float32)
    for name in SETS:
        for offset in (1, 2, 17, 63):
            shifted = np.concatenate([np.zeros(offset, np.uint8), case.packed])[offset:]
            assert same_bits(product(name, case, x, packed=shifted), product(name, case, x))


@pytest.mark.parametrize("name", SETS)
def test_zeros_outliers_and_nan_do_not_affect_other_rows(name, rng):
    case = quantized_case(rng, "int4", 64, 32, 32)
    x = rng.standard_normal((8, 64), np.float32)
    sound = product(name, case, x)
    x[1], x[3, 5], x[4, 9], x[6] = 0, np.nan, np.inf, 1e-38
    y = product(name, case, x)
    kept = [0, 2, 5, 7]
    assert same_bits(y[kept], sound[kept])
    assert not y[1].any()
    assert np.isfinite(y[6]).all()


DAMAGES = {
    "magic": (0, b"x"), "version": (8, b"\x63"), "form": (12, b"\x0c"),
    "K": (16, b"\xff\xff\xff\xff"), "N": (20, b"\x00\x00\x00\x00"), "block": (24, b"\x21"),
    "zero points": (28, b"\x02"), "terms": (48, b"\x02"),
    "gated": (32, b"\x07"), "quantized scales": (52, b"\x02"),
    "multiplier": (36, b"\x00\x00\xc0\x7f"), "bytes": (40, b"\x01"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_header_is_rejected(damage, rng):
    case = quantized_case(rng, "int4", 64, 40, 32)
    packed = case.packed.copy()
    at, replaced = DAMAGES[damage]
    packed[at : at + len(replaced)] = np.frombuffer(replaced, np.uint8)
    with pytest.raises(ValueError, match="packed weight"):
        product("scalar", case, np.zeros((1, 64), np.float32), packed=packed)


def test_a_truncated_weight_is_rejected(rng):
    case = quantized_case(rng, "int4", 64, 40, 32)
    for size in (0, 63, 64, len(case.packed) - 1):
        with pytest.raises(ValueError, match="packed weight"):
            product("scalar", case, np.zeros((1, 64), np.float32), packed=case.packed[:size].copy())
