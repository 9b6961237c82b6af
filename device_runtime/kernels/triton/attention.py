"""Attention over the live rows of a KV cache: apply RoPE and append, attend in shares, join them.

The num_rows new rows have the slots [write_index, write_index + num_rows). A row attends to all
earlier slots, or to those of its window; among the last mask_columns live slots the mask `tree`
int8 [num_rows, mask_columns] decides. A row that it lets attend to a later one is of an image, so
the rows between attend to that one, too. Time grows with the live length, not with the capacity;
the context is split among programs. In a pass of several sequences (MANY) the rows of a sequence
are contiguous, and slots, masks and positions are relative to the sequence; see `cache.py`.
"""

import triton
import triton.language as tl

from edgellm.device_runtime.kernels.triton.cache import (
    FAR,
    bound_capacity,
    decode,
    find_rows,
    find_sequence,
    first_slot,
    own_slot,
    store_row,
)

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
NOTHING: tl.constexpr = tl.constexpr(-1e30)  # below all scores, and finite
MAX_SHARES: tl.constexpr = tl.constexpr(16)
COLUMNS: tl.constexpr = tl.constexpr(128)  # of a mask that are read together


@triton.jit
def store_rows(
    # inputs
    q: "*fp16", k: "*fp16", v: "*fp16", cos: "*fp16", sin: "*fp16",
    positions: "*i64", write_index: "*i64", table: "*i64",
    # shape, rules
    layer, heads, kv_heads, own_tables, head_dim,
    # outputs
    q_out: "*fp16",
    D: tl.constexpr, CODES: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Apply RoPE to q and k, and append k and v to the cache.

    Grid [num_rows, heads + kv_heads]. q and q_out are [num_rows, heads, head_dim], k and v
    [num_rows, kv_heads, head_dim]. cos and sin are [positions, head_dim / 2], or with own_tables
    (M-RoPE) [num_rows, head_dim / 2]. Rows outside the cache are dropped.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    slot = own_slot(write_index, row, MANY) if MANY else first_slot(write_index) + row
    if (slot >= 0) & (slot < bound_capacity(table)):
        half = tl.arange(0, D // 2)
        inside = half < head_dim // 2
        place = tl.where(own_tables != 0, row, tl.load(positions + row).to(tl.int32))
        at = place * (head_dim // 2) + half
        c = tl.load(cos + at, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)
        if head < heads:
            a, b = _halves(q + (row * heads + head) * head_dim, head_dim, D)
            y = q_out + (row * heads + head) * head_dim + half
            tl.store(y, (a * c - b * s).to(tl.float16), mask=inside)
            tl.store(y + head_dim // 2, (b * c + a * s).to(tl.float16), mask=inside)
        else:
            a, b = _halves(k + (row * kv_heads + head - heads) * head_dim, head_dim, D)
            codes, scales = find_rows(table, layer, 0, head - heads, 0, head_dim, CODES)
            store_row(codes, scales, slot, a * c - b * s, b * c + a * s, head_dim, D, CODES)
            a, b = _halves(v + (row * kv_heads + head - heads) * head_dim, head_dim, D)
            codes, scales = find_rows(table, layer, 1, head - heads, 0, head_dim, CODES)
            store_row(codes, scales, slot, a, b, head_dim, D, CODES)


@triton.jit
def _halves(x, size, D: tl.constexpr):
    """A row's halves as float32 [D/2] each, padded with 0."""
    half = tl.arange(0, D // 2)
    inside = half < size // 2
    low = tl.load(x + half, mask=inside, other=0.0)
    high = tl.load(x + size // 2 + half, mask=inside, other=0.0)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def attend(
    # inputs
    q: "*fp16", tree: "*i8", positions: "*i64", write_index: "*i64", table: "*i64",
    # shape, rules
    layer, num_rows, mask_columns, group, window, cap_bits, head_dim,
    # outputs
    parts: "*fp32", stats: "*fp32",
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr,
    WINDOWED: tl.constexpr, GENERAL: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Attend ROWS query rows of a KV head to one share of the live slots.

    Grid [kv_heads, cdiv(num_rows * group, ROWS) + MANY, shares]. q is [num_rows, heads, head_dim],
    parts [shares, num_rows, heads, head_dim]; stats [..., 2] are the largest score (base 2) and the
    sum of weights. cap_bits is a float32, 0: no cap. Only GENERAL kernels cap or have head_dim < D.
    """
    size = head_dim if GENERAL else D
    span = _span(write_index, table, num_rows, mask_columns, group, ROWS, MANY)
    before, first_row, count, base, live, columns = span
    cache, share, shares = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    heads = tl.num_programs(0) * group
    rows, d = (tl.program_id(1) - before) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    step = rows // group
    inside = step < count
    query = (step + first_row) * heads + cache * group + rows % group  # of [num_rows, heads]
    mask = tree + first_row * mask_columns, positions + first_row, mask_columns, count, columns
    own_numbers = _numbers(inside, d, size, GENERAL)
    x = tl.load(q + query[:, None] * size + d[None, :], mask=own_numbers, other=0.0)
    x = (x * (LOG2_E * tl.rsqrt(head_dim.to(tl.float32)))).to(tl.float16)
    own = mask, step, inside, window, live
    oldest, begin, end = _share(own, share, shares, D, ROWS, BLOCK, WINDOWED, GENERAL, MANY)
    top, total = tl.full([ROWS], NOTHING, tl.float32), tl.zeros([ROWS], tl.float32)
    y = tl.zeros([ROWS, D], tl.float32)
    keys, key_scales = find_rows(table, layer, 0, cache, base, size, CODES)
    values, value_scales = find_rows(table, layer, 1, cache, base, size, CODES)
    for first in tl.range(begin, end, BLOCK):
        slots = first + tl.arange(0, BLOCK)
        alive = slots < live
        at = slots[:, None] * size + d[None, :]
        there = _numbers(alive, d, size, GENERAL)
        k = decode(tl.load(keys + at, mask=there, other=0), CODES)
        scores = tl.dot(x, tl.trans(k))
        if CODES != "fp16":
            scores *= _scales(key_scales, slots, alive)
        if GENERAL and cap_bits != 0:
            scores = _cap(scores, cap_bits)
        visible = _visible(mask, step, inside, slots, live, oldest, WINDOWED, MANY)
        scores = tl.where(visible, scores, NOTHING)
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.where(visible, tl.exp2(scores - new_top[:, None]), 0.0)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        if CODES != "fp16":
            weights *= _scales(value_scales, slots, alive)
        v = decode(tl.load(values + at, mask=there, other=0), CODES)
        y = tl.dot(weights.to(tl.float16), v, y * shrink[:, None])
        top = new_top
    at = share * num_rows * heads + query
    tl.store(parts + at[:, None] * size + d[None, :], y, mask=own_numbers)
    _store_pairs(stats + at * 2, top, total, inside)


@triton.jit
def _store_pairs(at, x, y, inside):
    tl.store(at, x, mask=inside)
    tl.store(at + 1, y, mask=inside)


@triton.jit
def _span(
    write_index, table, num_rows, mask_columns, group, ROWS: tl.constexpr, MANY: tl.constexpr
):
    """The sequence of a program, as `find_sequence` returns it."""
    if MANY:
        found = find_sequence(write_index, table, tl.program_id(1), group, ROWS, MANY)
    else:
        live = tl.minimum(first_slot(write_index) + num_rows, bound_capacity(table))
        found = 0, 0, num_rows, 0, live, mask_columns
    return found


@triton.jit
def _share(
    own,
    share,
    shares,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr,
    GENERAL: tl.constexpr,
    MANY: tl.constexpr,
):
    """The first position of each row's window (0: no limit); first and end slot of a share."""
    mask, step, inside, window, live = own
    positions = mask[1] + step
    oldest, begin = tl.zeros([ROWS], tl.int32), 0
    if WINDOWED:
        position = tl.load(positions, mask=inside, other=FAR).to(tl.int32)
        oldest = position - tl.where(window != 0, window, FAR) + 1
        begin = tl.maximum(tl.min(oldest, 0), 0) // BLOCK * BLOCK
    length = tl.cdiv(tl.cdiv(tl.maximum(live - begin, 0), BLOCK), shares) * BLOCK
    begin += share * length
    end = live
    if D <= 128 and not (GENERAL and MANY):  # other kernels have no registers left
        end = _end(mask, step, inside, live, BLOCK, MANY)
    return oldest, begin, tl.minimum(end, begin + length)


@triton.jit
def _end(mask, step, inside, live, BLOCK: tl.constexpr, MANY: tl.constexpr):
    """One past the last slot that a program's rows attend to, at most `live`.

    Rows attend to none after their own, except in images, see the module. So in a pass of one
    sequence the mask of the last row decides. It is read if a block or more may be left out. In a
    pass of several, sequences with a mask are computed to the end.
    """
    tree, _, mask_columns, count, columns = mask
    row = tl.max(tl.where(inside, step, -1), 0)
    after = count - 1 - row
    end = live
    if MANY:
        end = tl.where(columns == 0, live - after, live)
    elif after >= BLOCK:
        last = tl.maximum(columns - after, 0)
        for first in tl.range(last, columns, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            seen = tl.load(tree + row * mask_columns + column, mask=column < columns, other=0)
            last = tl.maximum(last, tl.max(tl.where(seen != 0, column + 1, 0), 0))
        end = live - columns + last
    return end


@triton.jit
def _numbers(rows, d, size, GENERAL: tl.constexpr):
    """Mask of the rows' elements below `size`, [rows, D]; [rows, 1] if heads fill the tile."""
    inside = rows[:, None]
    if GENERAL:
        inside &= (d < size)[None, :]
    return inside


@triton.jit
def _scales(scales, slots, alive):
    """Scales of a block's rows, [1, BLOCK]."""
    return tl.load(scales + slots, mask=alive, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _visible(mask, step, inside, slots, live, oldest, WINDOWED: tl.constexpr, MANY: tl.constexpr):
    """Attention mask of a block of slots, [ROWS, BLOCK]."""
    tree, positions, mask_columns, count, columns = mask
    alive = slots < live
    visible = inside[:, None] & alive[None, :]
    width = columns
    if MANY:
        width = tl.where(columns == 0, count, columns)
    node = slots - (live - width)  # negative for committed slots
    if tl.max(node, 0) >= 0:
        is_node = inside[:, None] & ((node >= 0) & alive)[None, :]
        if MANY:
            visible &= node[None, :] <= tl.where(columns == 0, step, FAR)[:, None]
            is_node &= (node < columns)[None, :]
        seen = tl.load(tree + step[:, None] * mask_columns + node[None, :], mask=is_node, other=1)
        visible &= seen != 0
    if WINDOWED:
        # Committed rows have their slot as position, rows of this pass have their own.
        new = node - (width - count)
        place = tl.load(positions + new, mask=(new >= 0) & alive, other=0).to(tl.int32)
        place = tl.where(new >= 0, place, tl.where(node >= 0, FAR, slots))
        visible &= place[None, :] >= oldest[:, None]
    return visible


@triton.jit
def _cap(scores, cap_bits):
    """Scores (base 2, as before and after) between -cap and cap: cap * tanh(score / cap)."""
    cap = cap_bits.to(tl.float32, bitcast=True) * LOG2_E
    grown = tl.exp2(tl.minimum(scores / cap, 20.0) * (2 * LOG2_E))
    return cap * (1 - 2 / (grown + 1))


@triton.jit
def combine(
    # inputs
    parts: "*fp32", stats: "*fp32", sinks: "*fp32",
    # shape
    num_queries, heads, num_shares, head_dim,
    # outputs
    y: "*fp16",
    D: tl.constexpr, SUNK: tl.constexpr,
):  # fmt: skip
    """Join the shares of one query.

    Grid [num_queries], num_rows * heads of them. y is [num_queries, head_dim]. sinks [heads] (SUNK)
    are scores that add to the sum of weights only.
    """
    query = tl.program_id(0)
    share, d = tl.arange(0, MAX_SHARES), tl.arange(0, D)
    inside = share < num_shares
    at = share * num_queries + query
    top = tl.load(stats + at * 2, mask=inside, other=NOTHING)
    total = tl.load(stats + at * 2 + 1, mask=inside, other=0.0)
    highest = tl.max(top, 0)
    if SUNK:
        sink = tl.load(sinks + query % heads) * LOG2_E
        highest = tl.maximum(highest, sink)
    weight = tl.exp2(top - highest)
    divisor = tl.sum(total * weight, 0)
    if SUNK:
        divisor += tl.exp2(sink - highest)
    there = inside[:, None] & (d < head_dim)[None, :]
    x = tl.load(parts + at[:, None] * head_dim + d[None, :], mask=there, other=0.0)
    joined = tl.sum(x * weight[:, None], 0) / tl.maximum(divisor, 1e-30)
    tl.store(y + query * head_dim + d, joined.to(tl.float16), mask=d < head_dim)
