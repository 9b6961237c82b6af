"""Calls of the compiled kernels without ONNX Runtime: the structures of c_api.cpp and kernels.h."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from edgellm.device_runtime.kernels.library import load_library
from edgellm.device_runtime.kernels.packed_layout import (
    MIDDLES,
    PackedForm,
    QuantizedScales,
    pack_blocks,
    pack_codes,
    pack_floats,
    pack_fp8,
)

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
# uint8: rows of 4 bits; uint16: bits of bfloat16
_CACHES = {"float32": 0, "float16": 1, "int8": 2, "uint8": 3, "bfloat16": 4, "uint16": 4}


class _Product(ctypes.Structure):
    _fields_ = [
        ("set", ctypes.c_char_p),
        ("packed", _POINTER),
        ("bytes", ctypes.c_uint64),
        ("rows", _INT),
        *((name, _POINTER) for name in ("x", "skip", "gamma", "bias", "residual", "sum", "y")),
        ("epsilon", _FLOAT),
        ("threads", ctypes.c_int32),
        *((name, _FLOAT) for name in ("alpha", "limit", "offset", "cubic")),
    ]


class _Shape(ctypes.Structure):
    _fields_ = [
        (name, _INT)
        for name in ("rows", "heads", "kv_heads", "head_dim", "write_index", "mask_columns")
    ]


class _Inputs(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("q", "k", "v")),
        *((name, _INT) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, _POINTER) for name in ("cos", "sin", "positions")),
        *((name, _INT) for name in ("rotary_dim", "table_rows")),
        *((name, _POINTER) for name in ("mask", "q_norm", "k_norm", "sinks")),
    ]


class _Rules(ctypes.Structure):
    _fields_ = [
        ("window", _INT),
        *((name, _FLOAT) for name in ("scale", "softcap", "epsilon")),
        ("is_interleaved", ctypes.c_bool),
        ("is_bidirectional", ctypes.c_bool),
        ("is_causal", ctypes.c_bool),
    ]


class _Cache(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_uint32),
        *((name, _FLOAT) for name in ("k_scale", "v_scale")),
        ("page_rows", _INT),
        *((name, _POINTER) for name in ("pages", "keys", "values")),
        *((name, _POINTER) for name in ("recent_pages", "recent_keys", "recent_values")),
    ]


class _Scratch(ctypes.Structure):  # filled by c_api.cpp
    _fields_ = [(name, _POINTER) for name in ("queries", "partials", "slots", "seen")]


class _Attention(ctypes.Structure):
    _fields_ = [
        ("shape", _Shape),
        ("inputs", _Inputs),
        ("rules", _Rules),
        ("cache", _Cache),
        ("y", _POINTER),
        ("scratch", _Scratch),
    ]


def _address(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


def _call(name: str, *arguments) -> None:
    function = getattr(load_library(), name)
    function.restype = ctypes.c_char_p
    fault = function(*arguments)
    if fault is not None:
        raise ValueError(fault.decode())


@dataclass(frozen=True)
class Case:
    """A packed weight and its values, float64 [N, K]."""

    form: PackedForm
    packed: np.ndarray
    weight: np.ndarray


DOUBLED_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])


def quantized_case(
    rng, kind, in_features, out_features, block, zero_points=False, gated=False, terms=1
):
    form = PackedForm(
        kind=kind,
        in_features=in_features,
        out_features=out_features,
        block=block,
        has_zero_points=zero_points,
        is_gated=gated,
        input_terms=terms,
    )
    top = 16 if kind == "fp4" else 1 << int(kind[3:])
    codes = rng.integers(0, top, (out_features, in_features)).astype(np.uint8)
    scales = rng.uniform(0.001, 0.01, (out_features, form.blocks)).astype(np.float16)
    points = rng.integers(0, top, scales.shape).astype(np.uint8) if zero_points else None
    packed = b"".join(pack_codes(form, codes, scales.astype(np.float32), points))
    wide = np.full(scales.shape, top // 2) if points is None else points
    wide, steps = (
        np.repeat(a.astype(np.float64), block, 1)[:, :in_features] for a in (wide, scales)
    )
    values = DOUBLED_FP4[codes] if kind == "fp4" else codes - wide
    return Case(form, np.frombuffer(packed, np.uint8), values * steps)


def blocks_case(rng, kind, in_features, out_features, gated=False):
    """Quantized scales as in K-quants; those of 2-bit codes, and minima, have no signs."""
    bits, has_minima = int(kind[3:]), kind in ("int2", "int4", "int5")
    form = PackedForm(
        kind=kind,
        in_features=in_features,
        out_features=out_features,
        block=32 if bits in (4, 5) else 16,
        has_zero_points=has_minima,
        is_gated=gated,
        has_quantized_scales=True,
    )
    codes = rng.integers(0, 1 << bits, (out_features, in_features)).astype(np.uint8)
    low, high = (0, 16) if bits == 2 else (0, 64) if has_minima else (-128, 128)

    def factors():
        return QuantizedScales(
            rng.integers(low, high, (out_features, form.blocks)).astype(np.int8),
            rng.uniform(1e-4, 1e-3, (out_features, form.records)).astype(np.float16),
        )

    def values(scales):
        return np.repeat(scales.codes, form.block, 1) * np.repeat(
            scales.scales.astype(np.float64), form.span, 1
        )

    scales, minima = factors(), factors() if has_minima else None
    packed = np.frombuffer(b"".join(pack_blocks(form, codes, scales, minima)), np.uint8)
    if minima is None:
        return Case(form, packed, (codes.astype(np.int64) - MIDDLES[kind]) * values(scales))
    return Case(form, packed, codes * values(scales) - values(minima))


def fp8_case(rng, in_features, out_features, block, gated=False):
    form = PackedForm(
        kind="fp8", in_features=in_features, out_features=out_features, block=block, is_gated=gated
    )
    codes = rng.integers(0, 256, (out_features, in_features)).astype(np.uint8)
    codes[codes & 127 == 127] = 0  # no numbers
    scales = rng.uniform(0.001, 0.01, (out_features, form.blocks)).astype(np.float32)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    steps = np.repeat(scales.astype(np.float64), block, 1)[:, :in_features]
    packed = np.frombuffer(b"".join(pack_fp8(form, codes, scales)), np.uint8)
    return Case(form, packed, values * steps)


def channel(case, index):
    """Weights of an output channel, float32 [K]."""
    out = np.full(case.form.in_features, np.nan, np.float32)
    _call(
        "edgellm_channel",
        ctypes.c_void_p(_address(case.packed)),
        ctypes.c_uint64(len(case.packed)),
        _INT(index),
        ctypes.c_void_p(_address(out)),
    )
    return out


def float_case(rng, kind, in_features, out_features, gated=False):
    form = PackedForm(kind=kind, in_features=in_features, out_features=out_features, is_gated=gated)
    weight = rng.standard_normal((out_features, in_features), np.float32)
    if kind == "float16":
        stored = weight.astype(np.float16)
        weight = stored.astype(np.float64)
    elif kind == "float32":
        stored, weight = weight, weight.astype(np.float64)
    else:
        stored = (weight.view(np.uint32) >> 16).astype(np.uint16)
        weight = (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return Case(form, np.frombuffer(b"".join(pack_floats(form, stored)), np.uint8), weight)


def product(
    instruction_set, case, x, *, skip=None, gamma=None, bias=None, residual=None, epsilon=1e-5,
    threads=1, packed=None, alpha=1.0, limit=0.0, offset=0.0, cubic=0.0,
):  # fmt: skip
    """Product of M rows: y [M, N], and x + skip [M, K] if there is a skip."""
    packed = case.packed if packed is None else packed
    width = case.form.out_features // (2 if case.form.is_gated else 1)
    y = np.full((len(x), width), np.nan, np.float32)
    total = None if skip is None else np.full_like(x, np.nan)
    arguments = _Product(
        instruction_set.encode(), _address(packed), packed.nbytes, len(x), _address(x),
        _address(skip), _address(gamma), _address(bias), _address(residual), _address(total),
        _address(y), epsilon, threads, alpha, limit, offset, cubic,
    )  # fmt: skip
    _call("edgellm_product", ctypes.byref(arguments))
    return y if skip is None else (y, total)


@dataclass
class Rows:
    """New rows [S, heads * D] and [S, kv_heads * D], and the cache [kv_heads, C, D] they go to."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    write_index: int
    # Of uint8 caches: keys and values in float16, [kv_heads, C, D], D in whole blocks of 32
    recent: tuple[np.ndarray, ...] = ()

    @property
    def heads(self) -> int:
        return self.q.shape[1] // self.head_dim

    @property
    def head_dim(self) -> int:
        return self.k.shape[1] // self.keys.shape[0]

    def copy(self) -> Rows:
        caches = self.keys.copy(), self.values.copy()
        recent = tuple(each.copy() for each in self.recent)
        return Rows(self.q, self.k, self.v, *caches, self.write_index, recent)


RECENT = 128  # positions that a row of a uint8 cache attends to in float16
_INVALID = {"int8": -77, "uint8": 0xFF, "uint16": 0x7FC0}  # uint8: scales that are NaN


class BlockPool:
    """Caches [kv_heads, C, D] in blocks, scattered among blocks that must not be read."""

    def __init__(self, caches, page_rows, first_slot=0) -> None:
        """Allocate the blocks; those wholly before `first_slot` are freed."""
        kv_heads, self.capacity, dim = caches[0].shape
        count = -(-self.capacity // page_rows)
        taken = _ORDER.permutation(count + 3)[:count]
        self.pools = []
        for cache in caches:
            pool = np.empty((count + 3, kv_heads, page_rows, dim), cache.dtype)
            pool.fill(_INVALID.get(cache.dtype.name, np.nan))
            wide = np.zeros((kv_heads, count * page_rows, dim), cache.dtype)
            wide[:, : self.capacity] = cache
            pool[taken] = wide.reshape(kv_heads, count, page_rows, dim).swapaxes(0, 1)
            self.pools.append(pool)
        self.taken = taken
        self.table = taken.astype(np.int64)
        self.table[: first_slot // page_rows] = -(2**40)

    def slots(self, index):
        """Positions of a cache, [kv_heads, C, D]."""
        pool = self.pools[index]
        rows = pool[self.taken].swapaxes(0, 1).reshape(pool.shape[1], -1, pool.shape[3])
        return rows[:, : self.capacity]


_ORDER = np.random.default_rng(11)


def attention(
    instruction_set, rows, *, is_split=True, mask=None, window=0, scale=None, softcap=0.0,
    rope=None, positions=None, interleaved=False, q_norm=None, k_norm=None,
    sinks=None, scales=(1.0, 1.0), page_rows=0, bidirectional=False, causal=False,
):  # fmt: skip
    """Output [S, heads * D] of S tokens, which are appended to the cache. `rope`: cos and sin."""
    kv_heads, dim = len(rows.keys), rows.head_dim
    page_rows = page_rows or int(_ORDER.choice([16, 32, 64, 128, 256]))
    least = rows.write_index + (1 if mask is None else len(rows.q) - mask.shape[1])
    pages = BlockPool([rows.keys, rows.values], page_rows, max(0, least - window) if window else 0)
    recent = BlockPool(rows.recent, page_rows, max(0, least - RECENT)) if rows.recent else pages
    cos, sin = rope or (None, None)
    mask = None if mask is None else np.ascontiguousarray(mask).view(np.uint8)
    y = np.full(rows.q.shape, np.nan, np.float32)
    inputs = _Inputs(
        *map(_address, (rows.q, rows.k, rows.v)),
        *(each.shape[1] for each in (rows.q, rows.k, rows.v)),
        *map(_address, (cos, sin, positions)),
        *((0, 0) if cos is None else (2 * cos.shape[1], len(cos))),
        *map(_address, (mask, q_norm, k_norm, sinks)),
    )
    columns = 0 if mask is None else mask.shape[1]
    arguments = _Attention(
        _Shape(len(rows.q), rows.heads, kv_heads, dim, rows.write_index, columns),
        inputs,
        _Rules(window, scale or dim**-0.5, softcap, 1e-6, interleaved, bidirectional, causal),
        _Cache(
            _CACHES[rows.keys.dtype.name],
            *scales,
            page_rows,
            *map(_address, (pages.table, *pages.pools)),
            *(map(_address, (recent.table, *recent.pools)) if rows.recent else ()),
        ),
        _address(y),
    )
    _call("edgellm_attention", instruction_set.encode(), ctypes.byref(arguments), int(is_split))
    rows.keys[...], rows.values[...] = pages.slots(0), pages.slots(1)
    for at, cache in enumerate(rows.recent):
        cache[...] = recent.slots(at)
    return y


def max_and_logsumexp(instruction_set, logits):
    """The largest x of up to 1,024 logits, and the sum of exp(logit - x)."""
    found = (ctypes.c_float * 2)()
    _call(
        "edgellm_max_and_logsumexp",
        instruction_set.encode(),
        ctypes.c_void_p(_address(logits)),
        _INT(len(logits)),
        found,
    )
    return found[0], found[1]


class _LowRank(ctypes.Structure):
    _fields_ = [
        *((name, _INT) for name in ("in_features", "rank", "outputs")),
        ("a", _POINTER),
        ("b", _POINTER),
    ]


def low_rank(instruction_set, x, a, b, base):
    """Base [N] + (x A^T) B of x [K], A [rank, K], B [rank, N]."""
    layer = _LowRank(a.shape[1], len(a), b.shape[1], _address(a), _address(b))
    inner, y = np.empty(len(a), np.float32), np.empty(b.shape[1], np.float32)
    pointers = (ctypes.c_void_p(_address(array)) for array in (x, inner, base, y))
    _call("edgellm_low_rank", instruction_set.encode(), ctypes.byref(layer), *pointers)
    return y
