"""The likeliest tokens of every row of logits, and what all of them sum up to.

Numbers and their places are compared as one int64 each: the number's bits in an order that integers
have, then the place, so that of equal numbers the earlier comes first.
"""

import triton
import triton.language as tl

NAN: tl.constexpr = tl.constexpr(0x7FC00000)
LOW: tl.constexpr = tl.constexpr(0x7FFFFFFF)
NO_KEY: tl.constexpr = tl.constexpr(-(1 << 63))


@triton.jit
def pick_shares(logits, V, keys, sums, PICKS: tl.constexpr, BLOCK: tl.constexpr):
    """The best of one share of a row; logits fp32 [R, V], grid [R, shares].

    keys int64 [R, shares, PICKS], best first; sums fp32 [R, shares, 2]: the share's largest
    number, and the sum of exp(number - largest). What is not a number counts as the largest.
    """
    row, share, shares = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    length = tl.cdiv(V, shares)
    end = tl.minimum(V, (share + 1) * length)
    best = tl.full([PICKS], NO_KEY, tl.int64)
    top, total = -float("inf"), 0.0
    for first in tl.range(share * length, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        x = tl.load(logits + row.to(tl.int64) * V + place, mask=place < end, other=-float("inf"))
        found = tl.topk(tl.where(place < end, _key(x, place), NO_KEY), PICKS)
        best = tl.topk(tl.ravel(tl.join(best, found)), PICKS)
        new_top = tl.maximum(top, tl.max(x, 0))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base), 0)
        top = new_top
    at = row * shares + share
    tl.store(keys + at * PICKS + tl.arange(0, PICKS), best)
    tl.store(sums + at * 2, top)
    tl.store(sums + at * 2 + 1, total)


@triton.jit
def join_picks(
    keys, sums, V, values, ids, argmax, log_sums, PICKS: tl.constexpr, SHARES: tl.constexpr
):  # fmt: skip
    """The best of a row's shares; grid [R].

    values fp32 and ids int32 [R, PICKS], best first, behind the V-th -inf and the largest int32;
    argmax int64 [R]; log_sums fp32 [R], the logarithm of the sum of exponentials.
    """
    row = tl.program_id(0)
    share, pick = tl.arange(0, SHARES), tl.arange(0, PICKS)
    at = (row * SHARES + share)[:, None] * PICKS + pick[None, :]
    best = tl.topk(tl.ravel(tl.load(keys + at)), PICKS)
    ordered = (best >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & LOW)
    place = (best & LOW).to(tl.int32) ^ LOW
    known = pick < V
    x = tl.where(known, bits.to(tl.float32, bitcast=True), -float("inf"))
    tl.store(values + row * PICKS + pick, x)
    tl.store(ids + row * PICKS + pick, tl.where(known, place, LOW))
    tl.store(argmax + row, tl.max(tl.where(pick == 0, place, 0), 0).to(tl.int64))
    top = tl.load(sums + (row * SHARES + share) * 2)
    total = tl.load(sums + (row * SHARES + share) * 2 + 1)
    highest = tl.max(top, 0)
    tl.store(log_sums + row, highest + tl.log(tl.sum(total * tl.exp(top - highest), 0)))


@triton.jit
def _key(x, place):
    """int64 that are ordered as (number, -place); -0 equals 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(x != x, NAN, bits)
    ordered = bits ^ ((bits >> 31) & LOW)
    return (ordered.to(tl.int64) << 32) | (place ^ LOW).to(tl.int64)
