"""Attention over the live rows of a KV cache: rotate and append, attend in shares, join them.

S rows are new and stand at the slots [write_index, write_index + S). Of the last M live slots row
i sees those that `tree` int8 [S, M] allows, and of the slots before all, or those of a window.
Time follows the live length, not the capacity; the context is split among programs.
"""

import triton
import triton.language as tl

from edgellm.device_runtime.kernels.triton.cache import (
    FAR,
    bound_capacity,
    decode,
    find_rows,
    first_slot,
    store_row,
)

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
NOTHING: tl.constexpr = tl.constexpr(-1e30)  # a score that no row has; finite, so that it subtracts
MOST_SHARES: tl.constexpr = tl.constexpr(16)


@triton.jit
def store_rows(
    q, k, v, cos, sin, positions, write_index, table, LAYER, H, HKV, OWN_TABLES, q_out,
    D: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Rotate q [S, H, D] into q_out, and append k (rotated) and v [S, HKV, D] to the cache.

    Grid [S, H + HKV]. cos and sin are fp16 [positions, D/2], or [S, D/2] of the rows themselves
    (OWN_TABLES is not 0; M-RoPE). Rows outside the cache are dropped.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    slot = first_slot(write_index) + row
    if (slot >= 0) & (slot < bound_capacity(table)):
        half = tl.arange(0, D // 2)
        place = tl.where(OWN_TABLES != 0, row, tl.load(positions + row).to(tl.int32))
        c = tl.load(cos + place * (D // 2) + half).to(tl.float32)
        s = tl.load(sin + place * (D // 2) + half).to(tl.float32)
        if head < H:
            a, b = _halves(q + (row * H + head) * D, D)
            y = q_out + (row * H + head) * D + half
            tl.store(y, (a * c - b * s).to(tl.float16))
            tl.store(y + D // 2, (b * c + a * s).to(tl.float16))
        else:
            a, b = _halves(k + (row * HKV + head - H) * D, D)
            codes, scales = find_rows(table, LAYER, 0, head - H, D, CODES)
            store_row(codes, scales, slot, a * c - b * s, b * c + a * s, D, CODES)
            a, b = _halves(v + (row * HKV + head - H) * D, D)
            codes, scales = find_rows(table, LAYER, 1, head - H, D, CODES)
            store_row(codes, scales, slot, a, b, D, CODES)


@triton.jit
def _halves(x, D: tl.constexpr):
    """A row's halves as float32 [D/2] each."""
    half = tl.arange(0, D // 2)
    return tl.load(x + half).to(tl.float32), tl.load(x + D // 2 + half).to(tl.float32)


@triton.jit
def attend(
    q, tree, positions, write_index, table, LAYER, S, M, G, WINDOW, CAP_BITS, parts, stats,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """One share of the live slots for ROWS of the S*G query rows of a KV head; q [S, HKV*G, D].

    Grid [HKV, cdiv(S*G, ROWS), shares]. A window is of WINDOW positions, a row's own included;
    CAP_BITS are the bits of the float32 cap of scores. Writes sums, fp32 parts [shares, S, H, D],
    and the largest score (base 2) and the sum of weights, fp32 stats [shares, S, H, 2].
    """
    live = tl.minimum(first_slot(write_index) + S, bound_capacity(table))
    cache, share, shares = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    heads = tl.num_programs(0) * G
    rows, d = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    step = rows // G
    inside = step < S
    query = step * heads + cache * G + rows % G  # among [S, H]
    x = tl.load(q + query[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
    x = (x * (LOG2_E / D**0.5)).to(tl.float16)
    oldest = tl.zeros([ROWS], tl.int32)  # position that a row sees first
    begin = 0
    if WINDOWED:
        own = tl.load(positions + step, mask=inside, other=FAR).to(tl.int32)
        oldest = own - WINDOW + 1
        begin = tl.maximum(tl.min(oldest, 0), 0) // BLOCK * BLOCK
    length = tl.cdiv(tl.cdiv(tl.maximum(live - begin, 0), BLOCK), shares) * BLOCK
    begin += share * length
    top, total = tl.full([ROWS], NOTHING, tl.float32), tl.zeros([ROWS], tl.float32)
    y = tl.zeros([ROWS, D], tl.float32)
    keys, key_scales = find_rows(table, LAYER, 0, cache, D, CODES)
    values, value_scales = find_rows(table, LAYER, 1, cache, D, CODES)
    for first in tl.range(begin, tl.minimum(live, begin + length), BLOCK):
        slots = first + tl.arange(0, BLOCK)
        alive = slots < live
        at = slots[:, None] * D + d[None, :]
        k = decode(tl.load(keys + at, mask=alive[:, None], other=0), CODES)
        scores = tl.dot(x, tl.trans(k))
        if CODES != "fp16":
            scale = tl.load(key_scales + slots, mask=alive, other=0.0)
            scores *= scale.to(tl.float32)[None, :]
        if CAPPED:
            scores = _cap(scores, CAP_BITS)
        visible = _visible(tree, positions, step, inside, slots, live, S, M, oldest, WINDOWED)
        scores = tl.where(visible, scores, NOTHING)
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.where(visible, tl.exp2(scores - new_top[:, None]), 0.0)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        if CODES != "fp16":
            scale = tl.load(value_scales + slots, mask=alive, other=0.0)
            weights *= scale.to(tl.float32)[None, :]
        v = decode(tl.load(values + at, mask=alive[:, None], other=0), CODES)
        y = tl.dot(weights.to(tl.float16), v, y * shrink[:, None])
        top = new_top
    at = share * S * heads + query
    tl.store(parts + at[:, None] * D + d[None, :], y, mask=inside[:, None])
    tl.store(stats + at * 2, top, mask=inside)
    tl.store(stats + at * 2 + 1, total, mask=inside)


@triton.jit
def _visible(
    tree, positions, step, inside, slots, live, S, M, oldest,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Which of a block's slots each row sees, [ROWS, BLOCK]."""
    alive = slots < live
    visible = inside[:, None] & alive[None, :]
    node = slots - (live - M)  # negative for committed slots
    if tl.max(node, 0) >= 0:
        is_node = inside[:, None] & ((node >= 0) & alive)[None, :]
        seen = tl.load(tree + step[:, None] * M + node[None, :], mask=is_node, other=1)
        visible &= seen != 0
    if WINDOWED:
        # Committed rows stand at their slot, those of this pass at the positions they have.
        new = node - (M - S)
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
def combine(parts, stats, sinks, N, H, SHARES, y, D: tl.constexpr, SUNK: tl.constexpr):
    """Join the shares of one query; grid [N], N = S*H; y fp16 [N, D].

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
    x = tl.load(parts + at[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
    joined = tl.sum(x * weight[:, None], 0) / tl.maximum(divisor, 1e-30)
    tl.store(y + query * D + d, joined.to(tl.float16))
