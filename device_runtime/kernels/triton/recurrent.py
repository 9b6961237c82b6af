"""Recurrent layers: convolutions over a token and its ancestors, and gated linear attention.

A pass reads the states of a sequence and does not change them. It stores the recurrence's inputs of
its rows; `advance_window` and `advance_state` move the states on by those of accepted rows, as
`accept_greedy` or the host names them. `parents` has the parent of each row, -1: the state. `tree`
int8 [num_rows, mask_columns] has its ancestors and itself, in the last num_rows columns; they are
before it.

The table of states, int64, has R (rows that can be stored), R ^ MAGIC, then four addresses for each
recurrence. Of a convolution: window fp16 [size - 1, width], rows fp16 [R, width]. Of matrices:
fp32 [heads, key_dim, value_dim], keys fp16 [R, key_heads, key_dim], deltas fp32
[R, heads, value_dim], and fp32 [2, R, heads], the log decay of a row and its sum over ancestors.
Kernels do nothing if the magic is wrong, see `cache.py`, or with more than R rows.
"""

import triton
import triton.language as tl

from edgellm.device_runtime.kernels.triton.cache import HEADER, PARTS, bound_capacity


@triton.jit
def _address(table, entry, part, ELEMENT: tl.constexpr):
    """A pointer of the table of states."""
    at = tl.load(table + HEADER + entry * PARTS + part)
    # The pointer was an integer: without the hint loads have the size of an element.
    return tl.multiple_of(at.to(tl.pointer_type(ELEMENT)), 16)


@triton.jit
def convolve_rows(
    # inputs
    x: "*fp16", taps: "*fp16", parents: "*i64", table: "*i64",
    # shape
    entry, width, size,
    # outputs
    y: "*fp16",
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Convolve a row with its ancestors, channel by channel, and store it.

    Grid [num_rows, cdiv(width, BLOCK)]. x and y are [num_rows, width], taps [size, width], the last
    for the row itself. Sums are float32, from the newest row to the oldest.
    """
    row = tl.program_id(0)
    if row < bound_capacity(table):
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = channel < width
        window = _address(table, entry, 0, tl.float16)
        stored = _address(table, entry, 1, tl.float16)
        own = tl.load(x + row * width + channel, mask=inside, other=0.0)
        tl.store(stored + row * width + channel, own, mask=inside)
        tap = tl.load(taps + (size - 1) * width + channel, mask=inside, other=0.0)
        total = own.to(tl.float32) * tap.to(tl.float32)
        place = row + tl.arange(0, 1)
        for back in tl.range(1, size):
            above = tl.load(parents + tl.maximum(place, 0)).to(tl.int32)
            place = tl.where(place >= 0, above, place - 1)  # below 0: of the window
            is_new, is_old = inside & (place >= 0), inside & (place < 0)
            new = tl.load(x + place * width + channel, mask=is_new, other=0.0)
            old = tl.load(window + (size - 1 + place) * width + channel, mask=is_old, other=0.0)
            tap = tl.load(taps + (size - 1 - back) * width + channel, mask=inside, other=0.0)
            total += (new + old).to(tl.float32) * tap.to(tl.float32)
        tl.store(y + row * width + channel, total.to(tl.float16), mask=inside)


@triton.jit
def advance_window(
    # inputs
    path: "*i32",
    outcome: "*i32",
    table: "*i64",
    entries: "*i32",
    # shape
    width,
    size,
    BLOCK: tl.constexpr,
):
    """Move windows on by the rows path[i], for i below outcome[0].

    Grid [cdiv(width, BLOCK), entries]. entries are those of the table, of one width and size. A
    thread moves the same channels of all rows in order, so none is overwritten before it is read.
    """
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    count = tl.minimum(tl.load(outcome), bound_capacity(table))
    if count > 0:
        entry = tl.load(entries + tl.program_id(1))
        window = _address(table, entry, 0, tl.float16)
        stored = _address(table, entry, 1, tl.float16)
        for place in tl.range(0, size - 1):
            new = (
                place + count - (size - 1) + tl.arange(0, 1)
            )  # of the path; below 0: of the window
            row = tl.load(path + tl.maximum(new, 0))
            is_new, is_old = inside & (new >= 0), inside & (new < 0)
            moved = tl.load(window + (place + count) * width + channel, mask=is_old, other=0.0)
            moved += tl.load(stored + row * width + channel, mask=is_new, other=0.0)
            tl.store(window + place * width + channel, moved, mask=inside)


@triton.jit
def delta_rows(
    # inputs
    q: "*fp32", k: "*fp32", v: "*fp32", g: "*fp32", b: "*fp32", tree: "*i8", table: "*i64",
    # shape
    entry, num_rows, mask_columns, key_heads, heads, key_dim, value_dim,
    # outputs
    y: "*fp32",
    KEYS: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, TAKES: tl.constexpr,
):  # fmt: skip
    """Gated delta rule of rows in blocks of ROWS; without TAKES the rule without the delta term.

    Grid [heads, cdiv(value_dim, VALUES)]. q and k are [num_rows, key_heads, key_dim], v and y
    [num_rows, heads, value_dim], g (log decays) and b (rates, read with TAKES) [num_rows, heads].
    Products of keys are sums over KEYS of them at a time, so registers do not grow with key_dim. A
    block reads the state once, and the deltas of earlier blocks back, so time grows with the square
    of num_rows: long prompts have several passes.
    """
    head, part = tl.program_id(0), tl.program_id(1)
    capacity = bound_capacity(table)
    if num_rows <= capacity:
        c = part * VALUES + tl.arange(0, VALUES)
        is_value = (c < value_dim)[None, :]
        keys, deltas, decays = _stored(table, entry)
        sums = decays + capacity * heads
        sharing = heads // key_heads
        mask = tree + mask_columns - num_rows, mask_columns, num_rows
        of_keys = head // sharing, key_heads, key_dim
        of_values = head, heads, value_dim
        is_first = (part + head % sharing + tl.arange(0, 1))[:, None] == 0
        given = q, k, keys, of_keys, table, entry, head, c, value_dim, num_rows, is_first
        for first in tl.range(0, num_rows, ROWS):
            i = first + tl.arange(0, ROWS)
            inside = i < num_rows
            summed = _summed_decays(mask, g, of_values, i, first, ROWS)
            own = tl.load(g + i * heads + head, mask=inside, other=0.0)
            tl.store(decays + i * heads + head, own, mask=inside)
            tl.store(sums + i * heads + head, summed, mask=inside)
            x = _load(v, i, of_values, c, num_rows)
            out, known = _of_state(given, i, inside, VALUES, ROWS, KEYS, TAKES)
            out *= tl.exp(summed)[:, None]
            if TAKES:
                rate = tl.load(b + i * heads + head, mask=inside, other=0.0)[:, None]
                x = (x - known * tl.exp(summed)[:, None]) * rate
                for before in tl.range(0, first, ROWS):
                    j = before + tl.arange(0, ROWS)
                    scores = _scores(k, k, i, j, of_keys, num_rows, ROWS, KEYS)
                    scores *= _between(mask, i, j, summed, sums, of_values)
                    x -= _given(scores, _load(deltas, j, of_values, c, num_rows)) * rate
                alike = _scores(k, k, i, i, of_keys, num_rows, ROWS, KEYS)
                alike *= _decayed(mask, i, i, summed, summed) * rate
                x = _solved(alike, x, num_rows - first, ROWS)
            tl.store(deltas + _places(i, of_values, c), x, mask=inside[:, None] & is_value)
            tl.debug_barrier()  # other threads read them
            for before in tl.range(0, first + ROWS, ROWS):
                j = before + tl.arange(0, ROWS)
                scores = _scores(q, k, i, j, of_keys, num_rows, ROWS, KEYS)
                scores *= _between(mask, i, j, summed, sums, of_values)
                out += _given(scores, _load(deltas, j, of_values, c, num_rows))
            tl.store(y + _places(i, of_values, c), out, mask=inside[:, None] & is_value)


@triton.jit
def _places(i, of, n):
    """Offsets of a head's numbers n in rows i, [len(i), len(n)]; `of`: head, heads, their size."""
    head, heads, size = of
    return (i[:, None] * heads + head) * size + n[None, :]


@triton.jit
def _load(x, i, of, n, num_rows):
    """A head's numbers n of rows i, padded with 0."""
    inside = (i < num_rows)[:, None] & (n < of[2])[None, :]
    return tl.load(x + _places(i, of, n), mask=inside, other=0.0)


@triton.jit
def _of_state(
    given,
    i,
    inside,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TAKES: tl.constexpr,
):
    """What rows i read of the state by their queries, and with TAKES by their keys.

    Each is [ROWS, VALUES]. Programs with `is_first` store the keys.
    """
    q, k, keys, of_keys, table, entry, head, c, value_dim, num_rows, is_first = given
    out, known = tl.zeros([ROWS, VALUES], tl.float32), tl.zeros([ROWS, VALUES], tl.float32)
    for start in tl.range(0, of_keys[2], KEYS):
        n = start + tl.arange(0, KEYS)
        state = _load_state(table, entry, head, n, c, of_keys[2], value_dim).to(tl.float16)
        key = _load(k, i, of_keys, n, num_rows).to(tl.float16)
        is_stored = inside[:, None] & (n < of_keys[2])[None, :] & is_first
        tl.store(keys + _places(i, of_keys, n), key, mask=is_stored)
        query = _load(q, i, of_keys, n, num_rows).to(tl.float16)
        out = tl.dot(query, state, out)
        if TAKES:
            known = tl.dot(key, state, known)
    return out, known


@triton.jit
def _scores(q, k, i, j, of_keys, num_rows, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Products of rows i of q and rows j of k, [ROWS, ROWS]."""
    total = tl.zeros([ROWS, ROWS], tl.float32)
    for start in tl.range(0, of_keys[2], KEYS, num_stages=1):
        n = start + tl.arange(0, KEYS)
        query = _load(q, i, of_keys, n, num_rows).to(tl.float16)
        key = _load(k, j, of_keys, n, num_rows).to(tl.float16)
        total = tl.dot(query, tl.trans(key), total)
    return total


@triton.jit
def _given(scores, deltas):
    """What rows read of the deltas of others, [ROWS, VALUES]."""
    return tl.dot(scores.to(tl.float16), deltas.to(tl.float16))


@triton.jit
def _stored(table, entry):
    """Keys, deltas and decays of rows."""
    keys = _address(table, entry, 1, tl.float16)
    deltas = _address(table, entry, 2, tl.float32)
    decays = _address(table, entry, 3, tl.float32)
    return keys, deltas, decays


@triton.jit
def _load_state(table, entry, head, n, c, key_dim, value_dim):
    """A head's matrix, [len(n), len(c)], padded with 0."""
    state = _address(table, entry, 0, tl.float32)
    at = state + (head * key_dim + n[:, None]) * value_dim + c[None, :]
    return tl.load(at, mask=(n < key_dim)[:, None] & (c < value_dim)[None, :], other=0.0)


@triton.jit
def _sees(mask, i, j):
    """Whether row i descends from row j or is it, bool [len(i), len(j)]."""
    tree, stride, num_rows = mask
    inside = (i < num_rows)[:, None] & (j < num_rows)[None, :]
    return tl.load(tree + i[:, None] * stride + j[None, :], mask=inside, other=0) != 0


@triton.jit
def _summed_decays(mask, g, of_values, i, first, ROWS: tl.constexpr):
    """Log decays of rows since the state: of themselves and their ancestors."""
    head, heads, _ = of_values
    summed = tl.zeros([ROWS], tl.float32)
    for before in tl.range(0, first + ROWS, ROWS):
        j = before + tl.arange(0, ROWS)
        decays = tl.load(g + j * heads + head, mask=j < mask[2], other=0.0)
        summed += tl.sum(tl.where(_sees(mask, i, j), decays[None, :], 0.0), 1)
    return summed


@triton.jit
def _between(mask, i, j, summed, sums, of_values):
    """As `_decayed`, with the sums of rows j that were stored."""
    head, heads, _ = of_values
    earlier = tl.load(sums + j * heads + head, mask=j < mask[2], other=0.0)
    return _decayed(mask, i, j, summed, earlier)


@triton.jit
def _decayed(mask, i, j, later, earlier):
    """Decay of row i since row j, 0 if it does not descend from it."""
    left = tl.where(_sees(mask, i, j), later[:, None] - earlier[None, :], -1e30)
    return tl.exp(left)


@triton.jit
def _solved(alike, x, count, ROWS: tl.constexpr):
    """Deltas of a block: each row less what its ancestors' deltas give, `alike` of them."""
    row = tl.arange(0, ROWS)
    for at in tl.range(1, tl.minimum(count, ROWS)):
        own = tl.where(row < at, tl.sum(tl.where(row[:, None] == at, alike, 0.0), 0), 0.0)
        given = tl.sum(own[:, None] * x, 0)
        x = tl.where(row[:, None] == at, x - given[None, :], x)
    return x


@triton.jit
def advance_state(
    # inputs
    path: "*i32", outcome: "*i32", table: "*i64", entries: "*i32",
    # shape
    key_heads, heads, key_dim, value_dim,
    KEYS: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Move matrices on by the rows path[i], each the parent of the next, for i below outcome[0].

    Grid [heads, cdiv(value_dim, VALUES), entries]. entries are those of the table, of one shape.
    """
    head, part = tl.program_id(0), tl.program_id(1)
    capacity = bound_capacity(table)
    count = tl.minimum(tl.load(outcome), capacity)
    if count > 0:
        entry = tl.load(entries + tl.program_id(2))
        c = part * VALUES + tl.arange(0, VALUES)
        is_value = c < value_dim
        keys, deltas, decays = _stored(table, entry)
        key = head // (heads // key_heads)
        for start in tl.range(0, key_dim, KEYS):
            n = start + tl.arange(0, KEYS)
            is_key = n < key_dim
            m = _load_state(table, entry, head, n, c, key_dim, value_dim)
            for first in tl.range(0, count, ROWS):
                i = first + tl.arange(0, ROWS)
                inside = i < count
                row = tl.load(path + i, mask=inside, other=0)
                decay = tl.load(decays + row * heads + head, mask=inside, other=0.0)
                whole = tl.sum(decay, 0)
                of_key = (row[:, None] * key_heads + key) * key_dim + n[None, :]
                k = tl.load(keys + of_key, mask=inside[:, None] & is_key[None, :], other=0.0)
                of_value = (row[:, None] * heads + head) * value_dim + c[None, :]
                x = tl.load(deltas + of_value, mask=inside[:, None] & is_value[None, :], other=0.0)
                x *= tl.exp(whole - tl.cumsum(decay, 0))[:, None]
                high = x.to(tl.float16)
                low = (x - high.to(tl.float32)).to(tl.float16)
                m = m * tl.exp(whole) + tl.dot(tl.trans(k), high) + tl.dot(tl.trans(k), low)
            state = _address(table, entry, 0, tl.float32)
            at = state + (head * key_dim + n[:, None]) * value_dim + c[None, :]
            tl.store(at, m, mask=is_key[:, None] & is_value[None, :])
