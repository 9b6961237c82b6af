"""What the kernels of attention compute, in numpy; a cache is found by its table, as there.

Passes of 128 rows and more are prompts, which `finish` attends alone.

`constants["memory"]` gives what lies at an address: (address, count, type) to a flat array. All
shares of a context are the first one's here, so that numbers do not depend on how it is shared.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import ml_dtypes
import numpy as np

_MAGIC, _HEADER, _PARTS = 0x656467656C6C6D, 2, 4
_LARGEST = {"int8": 127.0, "fp8": 448.0}
_NOTHING = np.float32(-1e30)
_PROMPT, _TABLE = 128, 32


def host_memory(address, count, dtype):
    """Memory of this process by address."""
    size = int(count) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(int(address)), dtype)


class _Cache:
    """Codes [kv_heads, C, D] and scales [kv_heads, C] of a layer's K (0) and V (1)."""

    def __init__(self, table, layer, kv_heads, size, constants) -> None:
        capacity, magic = table[:_HEADER].tolist()
        self.capacity = capacity if capacity ^ _MAGIC == magic else 0
        self._code, shape = constants["CODES"], (kv_heads, self.capacity, size)
        self.codes, self.scales = [], []
        if not self.capacity:
            return
        dtype = np.float16 if self._code == "fp16" else np.int8
        places = table[_HEADER + layer * _PARTS :][:_PARTS].tolist()
        for part in range(2):
            read = constants["memory"]
            self.codes.append(read(places[part], np.prod(shape), dtype).reshape(shape))
            if self._code != "fp16":
                found = read(places[part + 2], shape[0] * shape[1], np.float16)
                self.scales.append(found.reshape(shape[:2]))

    def store(self, part, slot, rows) -> None:
        """Write keys or values, float32 [kv_heads, D]."""
        if self._code == "fp16":
            self.codes[part][:, slot] = rows
            return
        largest = _LARGEST[self._code]
        scales = np.maximum(np.abs(rows).max(1) / np.float32(largest), np.float32(1e-6))
        self.scales[part][:, slot] = scales.astype(np.float16)
        exact = rows / scales.astype(np.float16).astype(np.float32)[:, None]
        if self._code == "int8":
            self.codes[part][:, slot] = np.floor(exact + np.float32(0.5))
        else:
            rounded = exact.clip(-largest, largest).astype(ml_dtypes.float8_e4m3fn)
            self.codes[part][:, slot] = rounded.view(np.int8)

    def values(self, part, own):
        """Of rows float64 [kv_heads, rows, D] without scales, and scales [kv_heads, 1, rows]."""
        codes = self.codes[part][:, own]
        if self._code == "fp16":
            return codes.astype(np.float64), 1.0
        if self._code == "fp8":
            codes = np.ascontiguousarray(codes).view(ml_dtypes.float8_e4m3fn)
        return codes.astype(np.float64), self.scales[part][:, None, own].astype(np.float64)


class _Sequence(NamedTuple):
    """A sequence of a forward pass; see `kernels/triton/cache.py`."""

    first: int
    rows: int
    base: int
    start: int
    columns: int  # of its mask, 0: causal

    @classmethod
    def all_of(cls, given, rows, columns, many):
        if not many:
            return [cls(0, rows, 0, int(given[0]), columns)]
        found = [cls(*each) for each in given[: many * len(cls._fields)].reshape(many, -1).tolist()]
        return [each for each in found if each.rows]


def store_rows(
    q,
    k,
    v,
    cos,
    sin,
    positions,
    write_index,
    table,
    layer,
    heads,
    kv_heads,
    own_tables,
    size,
    q_out,
    *,
    constants,
):
    rows = constants["grid"][0]
    assert size % 16 == 0 < size <= constants["D"]
    cache = _Cache(table, layer, kv_heads, size, constants)
    q, q_out = (each[: rows * heads * size].reshape(rows, heads, size) for each in (q, q_out))
    k, v = (each[: rows * kv_heads * size].reshape(rows, kv_heads, size) for each in (k, v))
    cos, sin = (
        each[: each.size // (size // 2) * (size // 2)].reshape(-1, size // 2) for each in (cos, sin)
    )
    slots = np.full(rows, -1)
    for each in _Sequence.all_of(write_index, rows, 0, constants["MANY"]):
        own = each.base + each.start + np.arange(each.rows)
        slots[each.first : each.first + each.rows] = own
    for row, slot in enumerate(slots.tolist()):
        if not 0 <= slot < cache.capacity:
            continue
        place = row if own_tables else int(positions[row])
        turn = cos[place].astype(np.float32), sin[place].astype(np.float32)
        q_out[row] = _turned(q[row], *turn)
        cache.store(0, slot, _turned(k[row], *turn))
        cache.store(1, slot, v[row].astype(np.float32))


def _turned(x, c, s):
    a, b = np.split(x.astype(np.float32), 2, -1)
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


def attend(
    q,
    tree,
    positions,
    write_index,
    table,
    layer,
    rows,
    columns,
    group,
    window,
    cap_bits,
    sequences,
    size,
    parts,
    stats,
    *,
    constants,
):
    kv_heads, blocks, shares = constants["grid"]
    heads = kv_heads * group
    if rows >= _PROMPT:
        return
    y = parts[: shares * rows * heads * size].reshape(shares, rows, heads, size)
    found = stats[: shares * rows * heads * 2].reshape(shares, rows, heads, 2)
    y[...], found[...] = (np.nan, np.nan) if sequences else (0, (_NOTHING, 0))
    given = q, tree, positions, write_index, table
    sizes = layer, rows, columns, group, window, cap_bits, sequences, size
    for own, sums, top_and_total in _by_sequence(given, sizes, blocks, constants):
        y[:, own], found[:, own] = 0, (_NOTHING, 0)
        y[0, own], found[0, own] = sums, top_and_total


def _by_sequence(given, sizes, blocks, constants):
    """Rows of each sequence; their sums [S, heads, D], largest scores and weights [S, heads, 2]."""
    q, tree, positions, write_index, table = given
    layer, rows, columns, group, window, cap_bits, sequences, size = sizes
    kv_heads = constants["grid"][0]
    assert size <= constants["D"]
    cache = _Cache(table, layer, kv_heads, size, constants)
    square = tree[: rows * columns].reshape(rows, columns) != 0
    x = q[: rows * kv_heads * group * size].reshape(rows, kv_heads, group, size)
    found = _Sequence.all_of(write_index, rows, columns, _TABLE if sequences else 0)
    assert sum(-(-each.rows * group // constants["ROWS"]) for each in found) <= blocks
    for each in found:
        own = slice(each.first, each.first + each.rows)
        mask = square[own, : each.columns] if each.columns else np.tri(each.rows, dtype=bool)
        live = int(min(each.start + each.rows, cache.capacity))
        if live > 0:
            seen = _seen(mask, positions[own], live, window)
            kept = slice(each.base, each.base + live)
            yield own, *_attended(x[own], cache, kept, seen, cap_bits)
        else:
            shape = each.rows, kv_heads * group
            yield own, np.zeros((*shape, size)), np.tile(np.array([_NOTHING, 0]), (*shape, 1))


def _attended(q, cache, kept, seen, cap_bits):
    """Sums [S, heads, D], and of each the largest score and the weight [S, heads, 2]."""
    rows, kv_heads, group, size = q.shape
    x = (q.astype(np.float32) * np.float32(np.log2(np.e) / size**0.5)).astype(np.float16)
    keys, key_scales = cache.values(0, kept)
    values, value_scales = cache.values(1, kept)
    x = x.astype(np.float64).transpose(1, 0, 2, 3).reshape(kv_heads, rows * group, size)
    scores = (x @ keys.transpose(0, 2, 1)) * key_scales
    if cap := np.array(cap_bits, np.int32).view(np.float32):
        cap = cap * np.float64(np.log2(np.e))
        scores = cap * np.tanh(scores / cap)
    visible = np.repeat(seen, group, 0)[None]
    scores = np.where(visible, scores, _NOTHING)
    top = scores.max(2, keepdims=True)
    weights = np.where(visible, np.exp2(scores - top), 0)
    sums = (weights * value_scales) @ values

    def of_rows(each):  # [kv_heads, rows * group, ...]
        found = each.reshape(kv_heads, rows, group, -1).transpose(1, 0, 2, 3)
        return found.reshape(rows, kv_heads * group, -1)

    stats = of_rows(np.stack([top[:, :, 0], weights.sum(2)], -1))
    return of_rows(sums), stats


def _seen(square, positions, live, window):
    """Bool [rows, live]."""
    rows, columns = square.shape
    seen = np.ones((rows, live), bool)
    seen[:, max(live - columns, 0) :] = square[:, max(columns - live, 0) :]
    if window:
        places = np.arange(live)
        places[live - columns : live - rows] = 1 << 29  # older nodes: only the tree mask decides
        places[live - rows :] = positions[:rows]
        seen &= places[None] > positions[:rows, None] - window
    return seen


def finish(
    q,
    tree,
    positions,
    write_index,
    table,
    parts,
    stats,
    sinks,
    layer,
    rows,
    columns,
    group,
    window,
    cap_bits,
    sequences,
    size,
    shares,
    sunk,
    y,
    *,
    constants,
):
    kv_heads, blocks, parts_of_head = constants["grid"]
    heads, is_prompt = kv_heads * group, rows >= _PROMPT
    assert parts_of_head * constants["OUT"] == constants["D"]
    assert blocks * constants["ROWS" if is_prompt else "JOINED"] >= rows * group
    out = y[: rows * heads * size].reshape(rows, heads, size)
    if is_prompt:
        given = q, tree, positions, write_index, table
        sizes = layer, rows, columns, group, window, cap_bits, sequences, size
        attended = _by_sequence(given, sizes, blocks, constants)
        passes = [(own, sums[None], found[None]) for own, sums, found in attended]
    else:
        count = shares * rows * heads
        sums = parts[: count * size].reshape(shares, rows, heads, size)
        passes = [(slice(0, rows), sums, stats[: count * 2].reshape(shares, rows, heads, 2))]
    for own, sums, found in passes:
        out[own] = _joined(sums, found, sinks[:heads] if sunk else None)


def _joined(sums, found, sinks):
    """Attention [S, heads, D] of sums [shares, S, heads, D], and [..., 2] of each."""
    top, total = found[..., 0], found[..., 1]
    sink = np.float32(-np.inf) if sinks is None else sinks * np.float32(np.log2(np.e))
    highest = np.maximum(top.max(0), sink)
    weight = np.exp2(top - highest)
    divisor = (total * weight).sum(0) + np.exp2(sink - highest)
    return (sums * weight[..., None]).sum(0) / np.maximum(divisor, np.float32(1e-30))[..., None]


def keep_rows(path, outcome, write_index, table, size, *, constants):
    assert size <= constants["D"]
    layers, kv_heads, _ = constants["grid"]
    first = int(write_index[0])
    for layer in range(layers):
        cache = _Cache(table, layer, kv_heads, size, constants)
        for place in range(1, int(outcome[0])):
            source, target = first + int(path[place]), first + place
            if source <= target or source >= cache.capacity or target <= 0:
                continue
            for part in (*cache.codes, *cache.scales):
                part[:, target] = part[:, source]
