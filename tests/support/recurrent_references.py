"""Recurrent layers as the GPU kernels compute them, in NumPy: row by row, in float32.

States are found by their table; `constants["memory"]` is as in `attention_references`.
"""

from __future__ import annotations

import numpy as np

_MAGIC, _HEADER, _PARTS = 0x656467656C6C6D, 2, 4


class _Stored:
    """State of an entry of the table, and what a pass stores of its rows."""

    def __init__(self, table, entry, constants) -> None:
        capacity, magic = table[:_HEADER].tolist()
        self.capacity = capacity if capacity ^ _MAGIC == magic else 0
        self._places = table[_HEADER + entry * _PARTS :][:_PARTS].tolist()
        self._read = constants["memory"]

    def part(self, part, shape, dtype):
        return self._read(self._places[part], int(np.prod(shape)), dtype).reshape(shape)

    def window(self, width, size):
        rows = self.part(1, (self.capacity, width), np.float16)
        return self.part(0, (size - 1, width), np.float16), rows

    def matrices(self, key_heads, heads, key_dim, value_dim):
        """State, keys, deltas, log decays of rows and their sums."""
        rows = self.capacity
        return (
            self.part(0, (heads, key_dim, value_dim), np.float32),
            self.part(1, (rows, key_heads, key_dim), np.float16),
            self.part(2, (rows, heads, value_dim), np.float32),
            *self.part(3, (2, rows, heads), np.float32),
        )


def convolve_rows(x, taps, parents, table, entry, width, size, y, *, constants):
    rows = constants["grid"][0]
    assert constants["grid"][1] * constants["BLOCK"] >= width
    found = _Stored(table, entry, constants)
    if rows > found.capacity:  # programs of later rows do nothing
        rows = found.capacity
    if not rows:
        return
    window, stored = found.window(width, size)
    x, y = (each[: rows * width].reshape(rows, width) for each in (x, y))
    taps = taps[: size * width].reshape(size, width).astype(np.float32)
    stored[:rows] = x
    for row in range(rows):
        total, place = np.zeros(width, np.float32), row
        for tap in taps[::-1]:
            total += (x[place] if place >= 0 else window[place]).astype(np.float32) * tap
            place = int(parents[place]) if place >= 0 else place - 1
        y[row] = total


def advance_window(path, outcome, table, entries, width, size, *, constants):
    for entry in entries[: constants["grid"][1]].tolist():
        found = _Stored(table, entry, constants)
        count = min(int(outcome[0]), found.capacity)
        if count > 0:
            window, stored = found.window(width, size)
            window[:] = np.concatenate([window, stored[path[:count]]])[count:]


def delta_rows(
    q,
    k,
    v,
    g,
    b,
    tree,
    table,
    entry,
    rows,
    columns,
    key_heads,
    heads,
    key_dim,
    value_dim,
    y,
    *,
    constants,
):
    assert constants["grid"][1] * constants["VALUES"] >= value_dim
    found = _Stored(table, entry, constants)
    if rows > found.capacity:
        return
    state, *stored = found.matrices(key_heads, heads, key_dim, value_dim)
    q, k = (each[: rows * key_heads * key_dim].reshape(rows, key_heads, key_dim) for each in (q, k))
    v, y = (each[: rows * heads * value_dim].reshape(rows, heads, value_dim) for each in (v, y))
    g, b = (each[: rows * heads].reshape(rows, heads) for each in (g, b))
    seen = tree[: rows * columns].reshape(rows, columns)[:, columns - rows :] != 0
    after: list[np.ndarray] = []
    for row in range(rows):
        above = np.flatnonzero(seen[row, :row])
        before, summed = state, np.zeros(heads, np.float32)
        if len(above):
            before, summed = after[above[-1]], stored[3][above[-1]]
        keys, queries = (np.repeat(x[row], heads // key_heads, 0) for x in (k, q))
        decayed = before * np.exp(g[row])[:, None, None]
        delta = v[row]
        if constants["TAKES"]:
            delta = (delta - np.einsum("hkv,hk->hv", decayed, keys)) * b[row][:, None]
        after.append(decayed + keys[:, :, None] * delta[:, None])
        y[row] = np.einsum("hkv,hk->hv", after[-1], queries)
        for part, value in zip(stored, (k[row], delta, g[row], summed + g[row]), strict=True):
            part[row] = value


def advance_state(
    path, outcome, table, entries, key_heads, heads, key_dim, value_dim, *, constants
):
    for entry in entries[: constants["grid"][2]].tolist():
        found = _Stored(table, entry, constants)
        count = min(int(outcome[0]), found.capacity)
        if count <= 0:
            continue
        state, keys, deltas, decays, _ = found.matrices(key_heads, heads, key_dim, value_dim)
        for row in path[:count].tolist():
            own = np.repeat(keys[row].astype(np.float32), heads // key_heads, 0)
            state *= np.exp(decays[row])[:, None, None]
            state += own[:, :, None] * deltas[row][:, None]
