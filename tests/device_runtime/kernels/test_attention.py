"""Attention over a cache: close to float64, and batch-invariant."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from kernel_calls import RECENT, Rows, attention, max_and_logsumexp

from edgellm.device_runtime.kernels.library import instruction_sets

SETS = instruction_sets()
FAST = SETS[:-1]
FLOAT_ERROR = 2e-6  # of the largest value: sums of floats in one order
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
CHUNK = 256  # keys whose softmax is summed apart from the others'


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def new_rows(rng, count, heads, kv_heads, dim, write_index, dtype=np.float32, spare=5):
    capacity = write_index + count + spare
    q, k, v = (
        rng.standard_normal((count, n * dim), np.float32) for n in (heads, kv_heads, kv_heads)
    )
    keys, values = (rng.standard_normal((kv_heads, capacity, dim), np.float32) for _ in range(2))
    if dtype == np.int8:
        keys, values = np.round(keys * 40), np.round(values * 40)
    return Rows(q, k, v, keys.astype(dtype), values.astype(dtype), write_index)


def hadamard(x):
    """The Walsh-Hadamard transform of the last axis, in blocks of a power of two."""
    size = x.shape[-1]
    block = max(2**i for i in range(10) if size % 2**i == 0)
    place = np.arange(block)
    bits = [[bin(i & j).count("1") for j in place] for i in place]
    matrix = (-1.0) ** np.array(bits) / np.sqrt(block)
    return (x.reshape(*x.shape[:-1], -1, block) @ matrix).reshape(x.shape)


def decoded(cache, dim):
    """Numbers [..., D] of rows with 4 bits, still rotated, and their scales."""
    blocks = cache.shape[-1] // 18
    codes = cache[..., : 16 * blocks].reshape(*cache.shape[:-1], blocks, 1, 16)
    codes = np.concatenate([codes & 15, codes >> 4], -2).reshape(*cache.shape[:-1], 32 * blocks)
    scales = np.ascontiguousarray(cache[..., 16 * blocks :]).view(np.float16).astype(np.float64)
    scales = np.repeat(scales, 32, -1)[..., :dim]
    return ((codes[..., :dim] ^ 8) - 8.0) * scales, scales


def query_of_8_bits(rows):
    """Queries whose rotated blocks of 32 numbers have codes up to 127."""
    rotated = hadamard(rows.q.reshape(-1, rows.head_dim).astype(np.float64))
    found = []
    for block in np.split(rotated, np.arange(32, rows.head_dim, 32), -1):
        scale = np.abs(block).max(-1, keepdims=True) / 127
        found.append(np.round(block / scale) * scale)
    return hadamard(np.concatenate(found, -1)).reshape(rows.q.shape)


def bfloat_rows(rng, *shape):
    """See `new_rows`."""
    return new_rows(rng, *shape, dtype=BFLOAT16)


def as_bfloat(x):
    """Numbers rounded to bfloat16, in float64."""
    return x.astype(np.float32).astype(BFLOAT16).astype(np.float64)


def bfloat_query(rows):
    """Queries whose scaled numbers have bfloat16."""
    scale = np.float32(rows.head_dim**-0.5)
    return as_bfloat(rows.q * scale) / rows.head_dim**-0.5


def int4_rows(rng, count, heads, kv_heads, dim, write_index):
    """A cache of random codes, whose scales are those of numbers around 1."""
    rows = new_rows(rng, count, heads, kv_heads, dim, write_index)
    shape, blocks = rows.keys.shape[:2], -(-dim // 32)
    for name in ("keys", "values"):
        codes = rng.integers(0, 256, (*shape, 16 * blocks), np.uint8)
        scales = (0.2 + 0.2 * rng.random((*shape, blocks))).astype(np.float16)
        setattr(rows, name, np.concatenate([codes, scales.view(np.uint8)], -1))
    rows.recent = tuple(
        rng.standard_normal((*shape, 32 * blocks), np.float32).astype(np.float16) for _ in range(2)
    )
    return rows


def recent_of(rows):
    """`Rows` with the recent keys and values as floats."""
    keys, values = (hadamard(each[..., : rows.head_dim].astype(np.float64)) for each in rows.recent)
    return Rows(rows.q, rows.k, rows.v, keys, values, rows.write_index)


def random_tree(rng, count, columns):
    """Mask of rows that attend to themselves and to some rows before."""
    mask = np.tri(count, columns, columns - count, dtype=np.bool_)
    mask &= rng.random(mask.shape) < 0.6
    mask[np.arange(count), np.arange(count) + columns - count] = True
    return mask


def exact(
    rows,
    mask=None,
    window=0,
    softcap=0.0,
    sinks=None,
    scales=(1.0, 1.0),
    q=None,
    recent=None,
    rounded=False,
):
    """float64, from a cache that already holds the new rows.

    `recent`: `Rows` of the last keys that a row attends to, with the rows' own queries. `rounded`:
    weights of a chunk are rounded to bfloat16 below its largest.
    """
    kv_heads, _, dim = rows.keys.shape
    count, heads = len(rows.q), rows.heads
    mask = np.tri(count, dtype=np.bool_) if mask is None else mask
    first = rows.write_index + count - mask.shape[1]
    own_q = rows.q.reshape(count, heads, dim).astype(np.float64)
    q = own_q if q is None else q.reshape(count, heads, dim)
    y = np.zeros((count, heads, dim))
    for row in range(count):
        seen = np.r_[np.arange(first), first + np.flatnonzero(mask[row])]
        before = seen[seen <= rows.write_index + row]
        oldest = before[-window - 1] if 0 < window < len(before) else -1
        seen = seen[np.argmax(seen > oldest) :] if window else seen
        for head in range(heads):
            keys, values = (
                cache[head // (heads // kv_heads), seen].astype(np.float64) * scale
                for cache, scale in zip((rows.keys, rows.values), scales, strict=True)
            )
            scores = keys @ q[row, head] * dim**-0.5
            if recent is not None:
                last = seen > (before[-RECENT - 1] if len(before) > RECENT else -1)
                kv_head = head // (heads // kv_heads)
                keys, values[last] = recent.keys[kv_head, seen], recent.values[kv_head, seen[last]]
                scores[last] = (keys @ own_q[row, head] * dim**-0.5)[last]
            scores = softcap * np.tanh(scores / softcap) if softcap else scores
            top = scores.max()
            weights = np.exp(scores - top)
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[head] - top))
            if rounded:  # keys are counted without siblings, those before a window too
                end = first + np.count_nonzero(mask[row])
                chunk = np.arange(end - len(seen), end) // CHUNK
                tops = np.array([scores[chunk == each].max() for each in chunk])
                weights = as_bfloat(np.exp(scores - tops)) * np.exp(tops - top)
            y[row, head] = weights @ values / total
    return y.reshape(count, -1)


def close(y, expected, error=FLOAT_ERROR):
    return np.abs(y - expected).max() <= error * np.abs(expected).max()


def same_bits(a, b):
    return a.shape == b.shape and a.tobytes() == b.tobytes()


SHAPES = (  # rows, heads, kv heads, head dim, write index
    (40, 9, 3, 64, 0),
    (5, 9, 3, 64, 300),
    (1, 4, 4, 16, 700),
    (3, 32, 2, 128, 520),
    (20, 6, 1, 80, 255),
    (4, 4, 2, 8, 30),
    (2, 20, 1, 24, 513),
    (2, 4, 2, 256, 90),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64_and_the_reference(shape, rng):
    count, heads, kv_heads, dim, write_index = shape
    wider = min(count + 3, write_index + count)
    for mask in (None, random_tree(rng, count, count), random_tree(rng, count, wider)):
        sinks = rng.standard_normal(heads, np.float32)
        for options in ({}, {"window": 200}, {"softcap": 5.0}, {"sinks": sinks}):
            given = new_rows(rng, count, heads, kv_heads, dim, write_index)
            rows = given.copy()
            reference = attention("scalar", rows, mask=mask, **options)
            assert close(reference, exact(rows, mask, **options))
            for name in FAST:
                for is_split in (True, False):
                    y = attention(name, given.copy(), mask=mask, is_split=is_split, **options)
                    assert same_bits(y, reference), (name, is_split, options)


@pytest.mark.parametrize("window", [0, 1, 7, 200])
@pytest.mark.parametrize("shape", [*SHAPES, (300, 2, 2, 16, 0)], ids=str)
def test_tokens_of_an_encoder_attend_to_later_ones(shape, window, rng):
    count, heads, kv_heads, dim, write_index = shape
    given = new_rows(rng, count, heads, kv_heads, dim, write_index)
    slots = np.arange(write_index + count)
    mask = np.ones((count, len(slots)), np.bool_)
    if window:
        mask = np.abs(slots - slots[write_index:, None]) < window
    rows = given.copy()
    reference = attention("scalar", rows, window=window, bidirectional=True)
    assert close(reference, exact(rows, mask))
    for name in FAST:
        for is_split in (True, False):
            options = {"window": window, "bidirectional": True, "is_split": is_split}
            y = attention(name, given.copy(), **options)
            assert same_bits(y, reference), (name, is_split)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", [np.float16, np.int8])
@pytest.mark.parametrize("dim", [24, 64])
def test_narrow_caches(name, dtype, dim, rng):
    rows = new_rows(rng, 3, 4, 2, dim, 300, dtype)
    scales = (0.03, 0.02) if dtype == np.int8 else (1.0, 1.0)
    reference_rows = rows.copy()
    before = rows.copy()
    y = attention(name, rows, scales=scales)
    assert close(y, exact(rows, scales=scales), 5e-6)
    for cache, old, new, scale in (
        (rows.keys, before.keys, rows.k, scales[0]),
        (rows.values, before.values, rows.v, scales[1]),
    ):
        new = new.reshape(3, 2, dim).transpose(1, 0, 2)
        if dtype == np.int8:
            new = np.clip(np.round(new / np.float32(scale)), -128, 127)
        assert same_bits(cache[:, 300:303], new.astype(dtype))
        assert same_bits(cache[:, :300], old[:, :300])
        assert same_bits(cache[:, 303:], old[:, 303:])
    assert same_bits(y, attention("scalar", reference_rows, scales=scales))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cache_of_bfloat16(shape, rng):
    """Queries and weights are rounded, too; outputs are those of float64."""
    count, heads, kv_heads, dim, write_index = shape
    sinks = rng.standard_normal(heads, np.float32)
    for mask in (None, random_tree(rng, count, min(count + 3, write_index + count))):
        for options in ({}, {"window": 57}, {"softcap": 5.0}, {"sinks": sinks}):
            given = bfloat_rows(rng, count, heads, kv_heads, dim, write_index)
            rows = given.copy()
            reference = attention("scalar", rows, mask=mask, **options)
            own = np.s_[:, write_index : write_index + count]
            for cache, new in ((rows.keys, rows.k), (rows.values, rows.v)):
                written = new.reshape(count, kv_heads, dim).transpose(1, 0, 2).astype(BFLOAT16)
                assert same_bits(cache[own], written)
            expected = exact(rows, mask, q=bfloat_query(rows), rounded=True, **options)
            assert close(reference, expected, 2e-3)  # a weight may be rounded the other way
            assert np.median(np.abs(reference - expected)) < 1e-6
            for name in FAST:
                for is_split in (True, False):
                    y = attention(name, given.copy(), mask=mask, is_split=is_split, **options)
                    assert same_bits(y, reference), (name, is_split, options)


@pytest.mark.parametrize("dim", [16, 24, 64, 80, 128])
def test_rotated_cache_of_4_bits(dim, rng):
    """Rows are close to what was written; outputs are those of the rows in float64."""
    for write_index, count in ((300, 3), (0, 20), (240, 90)):
        sinks = rng.standard_normal(4, np.float32)
        mask = random_tree(rng, count, count)
        for options in ({"mask": mask}, {"window": 50, "softcap": 5.0, "sinks": sinks}):
            given = int4_rows(rng, count, 4, 2, dim, write_index)
            rows = given.copy()
            y = attention("scalar", rows, **options)
            own = np.s_[:, write_index : write_index + count]
            plain = rows.copy()
            for name, new in (("keys", rows.k), ("values", rows.v)):
                cache, before = getattr(rows, name), getattr(given, name)
                numbers, scales = decoded(cache, dim)
                rotated = hadamard(new.reshape(count, 2, dim).transpose(1, 0, 2).astype(np.float64))
                steps = (rotated - numbers[own]) / np.abs(scales[own])
                assert np.abs(steps).max() < 2.6  # the largest may be clipped
                assert np.sqrt((steps**2).mean()) < 0.36  # uniform errors: 0.29
                before[own] = cache[own]
                assert same_bits(cache, before)
                setattr(plain, name, hadamard(numbers))
                written = rows.recent[name == "values"][own][..., :dim]
                assert close(written, rotated, 1e-3)
            expected = exact(plain, q=query_of_8_bits(rows), recent=recent_of(rows), **options)
            assert close(y, expected, 1e-2)  # a code of a query may fall the other way
            assert np.median(np.abs(y - expected)) < 1e-6
            for name in FAST:
                for is_split in (True, False):
                    again = attention(name, given.copy(), is_split=is_split, **options)
                    assert same_bits(again, y), (name, is_split)


def test_4_bits_of_zeros_and_of_large_numbers(rng):
    """Scales neither overflow nor divide by zero."""
    for name in SETS:
        given = int4_rows(rng, 70, 2, 1, 64, 0)
        given.k[:5] = given.v[:5] = 0
        given.k[6] = 1e30
        y = attention(name, given)
        assert not y[:5].any()
        assert np.isfinite(y).all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [16, 10])
def test_rope_and_norms_of_heads(interleaved, rotary, rng):
    count, heads, kv_heads, dim = 4, 4, 2, 16
    given = new_rows(rng, count, heads, kv_heads, dim, 20)
    angles = rng.standard_normal((50, rotary // 2))
    rope = tuple(f(angles).astype(np.float32) for f in (np.cos, np.sin))
    positions = np.array([20, 21, 21, 49])
    gammas = [rng.standard_normal(dim, np.float32) for _ in range(2)]

    def turned(x, gamma):
        x = x.reshape(count, -1, dim).astype(np.float64)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gamma
        cos, sin = (table[positions][:, None].astype(np.float64) for table in rope)
        part = np.s_[..., 0:rotary:2] if interleaved else np.s_[..., : rotary // 2]
        other = np.s_[..., 1:rotary:2] if interleaved else np.s_[..., rotary // 2 : rotary]
        x[part], x[other] = x[part] * cos - x[other] * sin, x[other] * cos + x[part] * sin
        return x.reshape(count, -1)

    options = {
        "rope": rope,
        "positions": positions,
        "interleaved": interleaved,
        "q_norm": gammas[0],
        "k_norm": gammas[1],
    }
    rows = given.copy()
    reference = attention("scalar", rows, **options)
    written = rows.keys[:, 20:24].transpose(1, 0, 2).reshape(count, -1)
    assert close(written, turned(given.k, gammas[1]))
    assert close(reference, exact(rows, q=turned(given.q, gammas[0])), 5e-6)
    for name in FAST:
        assert same_bits(attention(name, given.copy(), **options), reference)


def prefill_in_chunks(name, given, sizes, **options):
    """Outputs of chunked prefill."""
    rows, out, first = given.copy(), [], 0
    for size in sizes:
        part = np.s_[first : first + size]
        new = (x[part] for x in (rows.q, rows.k, rows.v))
        piece = Rows(*new, rows.keys, rows.values, given.write_index + first, rows.recent)
        out.append(attention(name, piece, is_split=size < 16, **options))
        first += size
    return np.concatenate(out)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(
    ("window", "make"),
    [(0, new_rows), (150, new_rows), (150, int4_rows), (0, bfloat_rows), (151, bfloat_rows)],
)
def test_results_do_not_depend_on_the_prefill_chunk(name, window, make, rng):
    count = 600 if name != "scalar" else 300
    given = make(rng, count, 3, 1, 32, 0)
    one_by_one = prefill_in_chunks(name, given, [1] * count, window=window)
    for _ in range(6):
        sizes: list[int] = []
        while sum(sizes) < count:
            sizes.append(min(int(rng.integers(1, 100)), count - sum(sizes)))
        assert same_bits(prefill_in_chunks(name, given, sizes, window=window), one_by_one)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("make", [new_rows, int4_rows, bfloat_rows])
def test_tree_node_has_the_bits_of_its_path_alone(name, make, rng):
    """Also across the border of two chunks, where siblings move a row's slot beyond it."""
    for trial in range(60):
        write_index = int(rng.integers(235, 262))
        count = int(rng.integers(2, 40))
        given = make(rng, count, 4, 2, 16, write_index)
        parents = [int(rng.integers(-1, i)) if i else -1 for i in range(count)]
        mask = np.zeros((count, count), np.bool_)
        for row, parent in enumerate(parents):
            mask[row] = mask[parent] if parent >= 0 else False
            mask[row, row] = True
        window = int(rng.choice([0, 40]))
        tree = attention(name, given.copy(), mask=mask, is_split=bool(trial % 2), window=window)
        row = int(rng.integers(count))
        path = np.flatnonzero(mask[row])
        cache = given.copy()
        for place, node in enumerate(path):
            new = (each[[node]] for each in (given.q, given.k, given.v))
            alone = Rows(*new, cache.keys, cache.values, write_index + place, cache.recent)
            y = attention(name, alone, window=window)
        assert same_bits(y[0], tree[row])


@pytest.mark.parametrize("name", SETS)
def test_rows_that_attend_to_later_ones(name, rng):
    """Tokens of an image; a window ends at the row itself, and has all later ones."""
    for write_index in (0, 3, 250):
        mask = np.tri(40, dtype=np.bool_)
        mask[4:29, 4:29] = mask[31:38, 31:38] = True
        for window in (0, 6, 20, 60):
            given = new_rows(rng, 40, 4, 2, 16, write_index)
            wanted = given.copy()
            reference = attention("scalar", wanted, mask=mask, window=window)
            assert close(reference, exact(wanted, mask, window=window))
            for is_split in (True, False):
                options = {"mask": mask, "is_split": is_split, "window": window}
                assert same_bits(attention(name, given.copy(), **options), reference)
                # Layers that are causal in every pass take the same mask
                causal = attention(name, given.copy(), **options, causal=True)
                options["mask"] = mask & np.tri(40, dtype=np.bool_)
                assert same_bits(causal, attention(name, given.copy(), **options))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("make", [new_rows, bfloat_rows])
def test_masked_keys_do_not_affect_a_row(name, make, rng):
    given = make(rng, 6, 2, 1, 16, 10)
    mask = np.eye(6, dtype=np.bool_)
    sound = attention(name, given.copy(), mask=mask)
    given.k[2], given.v[4] = np.nan, np.inf
    y = attention(name, given.copy(), mask=mask)
    kept = [0, 1, 3, 5]
    assert same_bits(y[kept], sound[kept])


@pytest.mark.parametrize("name", SETS)
def test_fully_masked_row_is_zero(name, rng):
    given = new_rows(rng, 2, 2, 1, 16, 0)
    y = attention(name, given, mask=np.array([[False, False], [True, True]]))
    assert not y[0].any()
    assert np.isfinite(y[1]).all()


@pytest.mark.parametrize("name", SETS)
def test_scores_of_any_size_neither_overflow_nor_vanish(name, rng):
    given = new_rows(rng, 3, 2, 1, 16, 280)
    given.q *= 300
    rows = given.copy()
    y = attention(name, rows)
    assert close(y, exact(rows), 1e-4)  # scores of thousands have 4 digits after the point


@pytest.mark.parametrize("count", [1, 15, 16, 17, 1000, 1024])
def test_max_and_logsumexp(count, rng):
    logits = (rng.standard_normal(count) * 10).astype(np.float32)
    top, total = max_and_logsumexp("scalar", logits)
    assert top == logits.max()
    assert total == pytest.approx(np.exp(logits.astype(np.float64) - top).sum(), rel=1e-6)
    for name in FAST:
        assert max_and_logsumexp(name, logits) == (top, total)
