"""Attention over the live rows of a KV cache: rotate and append, attend in shares, join them.

S rows are new and stand at the slots [write_index, write_index + S). Of the last M live slots row
i sees those that `tree` int8 [S, M] allows, and of the slots before all, or those of a window.
Time follows the live length, not the capacity; the context is split among programs. Where a pass
serves several sequences (MANY), rows of each stand side by side, and slots, masks and positions are
counted within each; see `cache.py`.
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
NOTHING: tl.constexpr = tl.constexpr(-1e30)  # a score that no row has; finite, so that it subtracts
MOST_SHARES: tl.constexpr = tl.constexpr(16)


@triton.jit
def store_rows(
    q, k, v, cos, sin, positions, write_index, table, LAYER, H, HKV, OWN_TABLES, SIZE,
    q_out, D: tl.constexpr, CODES: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Rotate q [S, H, SIZE] into q_out, and append k (rotated) and v [S, HKV, SIZE] to the cache.

    Grid [S, H + HKV]. cos and sin are fp16 [positions, SIZE/2], or [S, SIZE/2] of the rows
    themselves (OWN_TABLES is not 0; M-RoPE). Rows outside the cache are dropped.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    slot = own_slot(write_index, row, MANY) if MANY else first_slot(write_index) + row
    if (slot >= 0) & (slot < bound_capacity(table)):
        half = tl.arange(0, D // 2)
        inside = half < SIZE // 2
        place = tl.where(OWN_TABLES != 0, row, tl.load(positions + row).to(tl.int32))
        at = place * (SIZE // 2) + half
        c = tl.load(cos + at, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)
        if head < H:
            a, b = _halves(q + (row * H + head) * SIZE, SIZE, D)
            y = q_out + (row * H + head) * SIZE + half
            tl.store(y, (a * c - b * s).to(tl.float16), mask=inside)
            tl.store(y + SIZE // 2, (b * c + a * s).to(tl.float16), mask=inside)
        else:
            a, b = _halves(k + (row * HKV + head - H) * SIZE, SIZE, D)
            codes, scales = find_rows(table, LAYER, 0, head - H, 0, SIZE, CODES)
            store_row(codes, scales, slot, a * c - b * s, b * c + a * s, SIZE, D, CODES)
            a, b = _halves(v + (row * HKV + head - H) * SIZE, SIZE, D)
            codes, scales = find_rows(table, LAYER, 1, head - H, 0, SIZE, CODES)
            store_row(codes, scales, slot, a, b, SIZE, D, CODES)


@triton.jit
def _halves(x, size, D: tl.constexpr):
    """A row's halves as float32 [D/2] each, 0 behind size / 2."""
    half = tl.arange(0, D // 2)
    inside = half < size // 2
    low = tl.load(x + half, mask=inside, other=0.0)
    high = tl.load(x + size // 2 + half, mask=inside, other=0.0)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def attend(
    q, tree, positions, write_index, table, LAYER, S, M, G, WINDOW, CAP_BITS, SIZE, parts, stats,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr,
    WINDOWED: tl.constexpr, GENERAL: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """One share of the live slots for ROWS of the S*G query rows of a KV head; q [S, HKV*G, SIZE].

    Grid [HKV, cdiv(S*G, ROWS), shares], for MANY with a block more for each. WINDOW positions are
    seen, a row's own included (0: all), CAP_BITS are those of the float32 cap of scores (0: none).
    Only GENERAL kernels cap, and take a SIZE below D. Writes sums, fp32 parts [shares, S, H, SIZE],
    and the largest score (base 2) and the sum of weights, fp32 stats [shares, S, H, 2].
    """
    size = SIZE if GENERAL else D
    before, first_row, count, base, live, columns = _span(write_index, table, S, M, G, ROWS, MANY)
    cache, share, shares = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    heads = tl.num_programs(0) * G
    rows, d = (tl.program_id(1) - before) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    step = rows // G
    inside = step < count
    query = (step + first_row) * heads + cache * G + rows % G  # among [S, H]
    mask = tree + first_row * M, positions + first_row, M, count, columns
    own_numbers = _numbers(inside, d, size, GENERAL)
    x = tl.load(q + query[:, None] * size + d[None, :], mask=own_numbers, other=0.0)
    x = (x * (LOG2_E * tl.rsqrt(SIZE.to(tl.float32)))).to(tl.float16)
    oldest, begin = tl.zeros([ROWS], tl.int32), 0  # positions that a row, and all, see first
    if WINDOWED:
        own = tl.load(mask[1] + step, mask=inside, other=FAR).to(tl.int32)
        oldest = own - tl.where(WINDOW != 0, WINDOW, FAR) + 1
        begin = tl.maximum(tl.min(oldest, 0), 0) // BLOCK * BLOCK
    length = tl.cdiv(tl.cdiv(tl.maximum(live - begin, 0), BLOCK), shares) * BLOCK
    begin += share * length
    top, total = tl.full([ROWS], NOTHING, tl.float32), tl.zeros([ROWS], tl.float32)
    y = tl.zeros([ROWS, D], tl.float32)
    keys, key_scales = find_rows(table, LAYER, 0, cache, base, size, CODES)
    values, value_scales = find_rows(table, LAYER, 1, cache, base, size, CODES)
    for first in tl.range(begin, tl.minimum(live, begin + length), BLOCK):
        slots = first + tl.arange(0, BLOCK)
        alive = slots < live
        at = slots[:, None] * size + d[None, :]
        there = _numbers(alive, d, size, GENERAL)
        k = decode(tl.load(keys + at, mask=there, other=0), CODES)
        scores = tl.dot(x, tl.trans(k))
        if CODES != "fp16":
            scores *= _scales(key_scales, slots, alive)
        if GENERAL and CAP_BITS != 0:
            scores = _cap(scores, CAP_BITS)
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
    at = share * S * heads + query
    tl.store(parts + at[:, None] * size + d[None, :], y, mask=own_numbers)
    _store_pairs(stats + at * 2, top, total, inside)


@triton.jit
def _store_pairs(at, x, y, inside):
    tl.store(at, x, mask=inside)
    tl.store(at + 1, y, mask=inside)


@triton.jit
def _span(write_index, table, S, M, G, ROWS: tl.constexpr, MANY: tl.constexpr):
    """What a program works on: see `find_sequence`."""
    if MANY:
        found = find_sequence(write_index, table, tl.program_id(1), G, ROWS, MANY)
    else:
        live = tl.minimum(first_slot(write_index) + S, bound_capacity(table))
        found = 0, 0, S, 0, live, M
    return found


@triton.jit
def _numbers(rows, d, size, GENERAL: tl.constexpr):
    """Which numbers of the rows there are, [rows, D]; [rows, 1] where heads fill the tile."""
    inside = rows[:, None]
    if GENERAL:
        inside &= (d < size)[None, :]
    return inside


@triton.jit
def _scales(scales, slots, alive):
    """Those of a block's rows, [1, BLOCK]."""
    return tl.load(scales + slots, mask=alive, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _visible(
    mask, step, inside, slots, live, oldest,
    WINDOWED: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Which of a block's slots each row sees, [ROWS, BLOCK]."""
    tree, positions, M, count, columns = mask
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
        seen = tl.load(tree + step[:, None] * M + node[None, :], mask=is_node, other=1)
        visible &= seen != 0
    if WINDOWED:
        # Committed rows stand at their slot, those of this pass at the positions they have.
        new = node - (width - count)
        place = tl.load(positions + new, mask=(new >= 0) & alive, other=0).to(tl.int32)
        place = tl.where(new >= 0, place, tl.where(node >= 0, FAR, slots))
        visible &= place[None, :] >= oldest[:, None]
    return visible


@triton.jit
def _cap(scores, CAP_BITS):
    """Scores (base 2, as before and after) between -cap and cap: cap * tanh(score / cap)."""
    cap = CAP_BITS.to(tl.float32, bitcast=True) * LOG2_E
    grown = tl.exp2(tl.minimum(scores / cap, 20.0) * (2 * LOG2_E))
    return cap * (1 - 2 / (grown + 1))


@triton.jit
def combine(parts, stats, sinks, N, H, SHARES, SIZE, y, D: tl.constexpr, SUNK: tl.constexpr):
    """Join the shares of one query; grid [N], N = S*H; y fp16 [N, SIZE].

    sinks fp32 [H]: a score for each head that takes weight and gives nothing (SUNK).
    """
    query = tl.program_id(0)
    share, d = tl.arange(0, MOST_SHARES), tl.arange(0, D)
    inside = share < SHARES
    at = share * N + query
    top = tl.load(stats + at * 2, mask=inside, other=NOTHING)
    total = tl.load(stats + at * 2 + 1, mask=inside, other=0.0)
    highest = tl.max(top, 0)
    if SUNK:
        sink = tl.load(sinks + query % H) * LOG2_E
        highest = tl.maximum(highest, sink)
    weight = tl.exp2(top - highest)
    divisor = tl.sum(total * weight, 0)
    if SUNK:
        divisor += tl.exp2(sink - highest)
    there = inside[:, None] & (d < SIZE)[None, :]
    x = tl.load(parts + at[:, None] * SIZE + d[None, :], mask=there, other=0.0)
    joined = tl.sum(x * weight[:, None], 0) / tl.maximum(divisor, 1e-30)
    tl.store(y + query * SIZE + d, joined.to(tl.float16), mask=d < SIZE)
