"""Attention over the live rows of a KV cache: apply RoPE and append, attend in shares.

The num_rows new rows have the slots [write_index, write_index + num_rows). A row attends to all
earlier slots, or to those of its window; among the last mask_columns live slots the mask `tree`
int8 [num_rows, mask_columns] decides. A row that it lets attend to a later one is of an image, so
the rows between attend to that one, too. Time grows with the live length, not with the capacity.
In a pass of several sequences the rows of a sequence are contiguous, and slots, masks and positions
are relative to the sequence; see `cache.py`.

Passes of fewer than PROMPT_TOKENS rows split the context among programs (`attend`), and `finish`
joins their sums. Longer passes are prompts, which `finish` attends alone; see `prompt_attention`.
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
COLUMNS: tl.constexpr = tl.constexpr(128)  # of a mask that are read together
PROMPT_TOKENS: tl.constexpr = tl.constexpr(128)  # rows of a pass from which it is a prompt
SEQUENCES: tl.constexpr = tl.constexpr(32)  # of a table


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
    layer, num_rows, mask_columns, group, window, cap_bits, sequences, head_dim,
    # outputs
    parts: "*fp32", stats: "*fp32",
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Attend ROWS query rows of a KV head to one share of the live slots.

    Grid [kv_heads, cdiv(num_rows * group, ROWS) + sequences, shares]. q is [num_rows, heads,
    head_dim], parts [shares, num_rows, heads, head_dim]; stats [..., 2] are the largest score (base
    2) and the sum of weights. cap_bits is a float32, 0: no cap. write_index is a table of at most
    `sequences` sequences; 0: of one, it is a slot. Prompts are left to `finish`.
    """
    if num_rows < PROMPT_TOKENS:
        inputs = q, tree, positions, write_index, table
        sizes = layer, num_rows, mask_columns, group, window, cap_bits, sequences, head_dim
        share = tl.program_id(2)
        y, top, total, query, inside = attend_rows(
            inputs, sizes, (share, tl.num_programs(2), 0), D, ROWS, BLOCK, D, CODES, False
        )
        d = tl.arange(0, D)
        at = share * num_rows * tl.num_programs(0) * group + query
        own_numbers = numbers(inside, d, head_dim)
        tl.store(parts + at[:, None] * head_dim + d[None, :], y, mask=own_numbers)
        _store_pairs(stats + at * 2, top, total, inside)


@triton.jit
def _store_pairs(at, x, y, inside):
    tl.store(at, x, mask=inside)
    tl.store(at + 1, y, mask=inside)


@triton.jit
def attend_rows(
    inputs,
    sizes,
    part,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT: tl.constexpr,
    CODES: tl.constexpr,
    IS_PROMPT: tl.constexpr,
):
    """The query rows of a program, and their attention to one share of their slots.

    inputs and sizes are those of `attend`. `part` is the share, the number of shares, and the first
    of OUT values of a head. Prompts read no slots after the last that their rows attend to.

    Returns:
        Weighted sums of values fp32 [ROWS, OUT], the largest score and the sum of weights of a row;
        its place in [num_rows, heads], and whether there is one.
    """
    q, tree, positions, write_index, table = inputs
    layer, num_rows, mask_columns, group, window, cap_bits, sequences, size = sizes
    span = _span(write_index, table, num_rows, mask_columns, group, sequences, ROWS)
    before, first_row, count, base, live, columns = span
    cache = tl.program_id(0)
    rows = (tl.program_id(1) - before) * ROWS + tl.arange(0, ROWS)
    step = rows // group
    inside = step < count
    query = (step + first_row) * tl.num_programs(0) * group + cache * group + rows % group
    mask = tree + first_row * mask_columns, positions + first_row, mask_columns, count, columns
    d = tl.arange(0, D)
    own_numbers = numbers(inside, d, size)
    x = tl.load(q + query[:, None] * size + d[None, :], mask=own_numbers, other=0.0)
    x = (x * (LOG2_E * tl.rsqrt(size.to(tl.float32)))).to(tl.float16)
    own = mask, step, inside, window, live
    slots = _share(own, part[0], part[1], BLOCK, IS_PROMPT)
    keys = find_rows(table, layer, 0, cache, base, size, CODES)
    values = find_rows(table, layer, 1, cache, base, size, CODES)
    rules = size, part[2], cap_bits
    y, top, total = _over_slots(x, own, slots, keys, values, rules, D, ROWS, BLOCK, OUT, CODES)
    return y, top, total, query, inside


@triton.jit
def _over_slots(
    x,
    own,
    share,
    keys_and_scales,
    values_and_scales,
    rules,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT: tl.constexpr,
    CODES: tl.constexpr,
):
    """Weighted sums, largest scores and sums of weights of query rows, over a share of slots."""
    mask, step, inside, window, live = own
    oldest, begin, end = share
    keys, key_scales = keys_and_scales
    values, value_scales = values_and_scales
    size, first_out, cap_bits = rules
    d, out = tl.arange(0, D), first_out + tl.arange(0, OUT)
    top, total = tl.full([ROWS], NOTHING, tl.float32), tl.zeros([ROWS], tl.float32)
    y = tl.zeros([ROWS, OUT], tl.float32)
    for first in tl.range(begin, end, BLOCK):
        slots = first + tl.arange(0, BLOCK)
        alive = slots < live
        at = keys + slots[:, None] * size + d[None, :]
        k = decode(tl.load(at, mask=numbers(alive, d, size), other=0), CODES)
        scores = tl.dot(x, tl.trans(k))
        if CODES != "fp16":
            scores *= _scales(key_scales, slots, alive)
        if cap_bits != 0:
            scores = _cap(scores, cap_bits)
        visible = _visible(mask, step, inside, slots, live, oldest, window)
        scores = tl.where(visible, scores, NOTHING)
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.where(visible, tl.exp2(scores - new_top[:, None]), 0.0)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        if CODES != "fp16":
            weights *= _scales(value_scales, slots, alive)
        at = values + slots[:, None] * size + out[None, :]
        v = decode(tl.load(at, mask=numbers(alive, out, size), other=0), CODES)
        y = tl.dot(weights.to(tl.float16), v, y * shrink[:, None])
        top = new_top
    return y, top, total


@triton.jit
def _span(write_index, table, num_rows, mask_columns, group, sequences, ROWS: tl.constexpr):
    """The sequence of a program, as `find_sequence` returns it."""
    entries = tl.where(sequences != 0, SEQUENCES, 0)
    block = tl.program_id(1)
    found = find_sequence(write_index, entries, table, block, group, ROWS, SEQUENCES)
    before, first_row, count, base, live, columns = found
    if_alone = tl.minimum(first_slot(write_index) + num_rows, bound_capacity(table))
    count = tl.where(sequences != 0, count, num_rows)
    live = tl.where(sequences != 0, live, if_alone)
    columns = tl.where(sequences != 0, columns, mask_columns)
    return before, first_row, count, base, live, columns


@triton.jit
def _share(own, share, shares, BLOCK: tl.constexpr, IS_PROMPT: tl.constexpr):
    """The first position of each row's window; first and end slot of a share.

    A share begins at the first window of the rows.
    """
    mask, step, inside, window, live = own
    reach = tl.where(window != 0, window, FAR)
    is_limited = step < tl.where(window != 0, mask[3], 0)
    position = tl.load(mask[1] + step, mask=is_limited, other=FAR).to(tl.int32)
    oldest = position - reach + 1
    begin = tl.maximum(tl.min(oldest, 0), 0) // BLOCK * BLOCK
    begin = tl.where(window != 0, begin, 0)
    length = tl.cdiv(tl.cdiv(tl.maximum(live - begin, 0), BLOCK), shares) * BLOCK
    begin += share * length
    end = live
    if IS_PROMPT:
        end = _end(mask, step, inside, live, BLOCK)
    return oldest, begin, tl.minimum(end, begin + length)


@triton.jit
def _end(mask, step, inside, live, BLOCK: tl.constexpr):
    """One past the last slot that a program's rows attend to, at most `live`.

    Rows attend to none after their own, except in images, see the module. So the mask of the last
    row decides. It is read if a block or more may be left out.
    """
    tree, _, mask_columns, count, columns = mask
    row = tl.max(tl.where(inside, step, -1), 0)
    after = count - 1 - row
    last = tl.maximum(columns - after, 0)
    if (after >= BLOCK) & (row >= 0):
        for first in tl.range(last, columns, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            seen = tl.load(tree + row * mask_columns + column, mask=column < columns, other=0)
            last = tl.maximum(last, tl.max(tl.where(seen != 0, column + 1, 0), 0))
    else:
        last = tl.maximum(columns, 0)
    return tl.where(columns == 0, live - after, live - columns + last)


@triton.jit
def numbers(rows, d, size):
    """Mask of the rows' elements below `size`, [rows, D]."""
    return rows[:, None] & (d < size)[None, :]


@triton.jit
def _scales(scales, slots, alive):
    """Scales of a block's rows, [1, BLOCK]."""
    return tl.load(scales + slots, mask=alive, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _visible(mask, step, inside, slots, live, oldest, window):
    """Attention mask of a block of slots, [ROWS, BLOCK]."""
    tree, positions, mask_columns, count, columns = mask
    alive = slots < live
    visible = inside[:, None] & alive[None, :]
    width = tl.where(columns == 0, count, columns)
    node = slots - (live - width)  # negative for committed slots
    if tl.max(node, 0) >= 0:
        is_node = inside[:, None] & ((node >= 0) & (node < columns) & alive)[None, :]
        visible &= node[None, :] <= tl.where(columns == 0, step, FAR)[:, None]
        seen = tl.load(tree + step[:, None] * mask_columns + node[None, :], mask=is_node, other=1)
        visible &= seen != 0
    if window != 0:
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
