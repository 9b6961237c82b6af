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
    """The best of one share of a row; logits fp32 [R, V], grid [R, cdiv(V, BLOCK)].

    keys int64 [R, shares, PICKS], best first; sums fp32 [R, shares, 2]: the share's largest
    number, and the sum of exp(number - largest). What is not a number counts as the largest.
    """
    row, share, shares = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    place = share * BLOCK + tl.arange(0, BLOCK)
    inside = place < V
    x = tl.load(logits + row.to(tl.int64) * V + place, mask=inside, other=-float("inf"))
    at = row * shares + share
    best = _best(tl.where(inside, _key(x, place), NO_KEY), PICKS)
    tl.store(keys + at * PICKS + tl.arange(0, PICKS), best)
    top = tl.max(x, 0)
    total = tl.sum(tl.where(x > -float("inf"), tl.exp(x - top), 0.0), 0)
    tl.store(sums + at * 2, top)
    tl.store(sums + at * 2 + 1, total)


@triton.jit
def join_picks(
    keys, sums, V, SHARES, values, ids, argmax, log_sums,
    PICKS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """The best of a row's shares, at most MOST; grid [R].

    values fp32 and ids int32 [R, PICKS], best first, behind the V-th -inf and the largest int32;
    argmax int64 [R]; log_sums fp32 [R], the logarithm of the sum of exponentials.
    """
    row = tl.program_id(0)
    pick, place = tl.arange(0, PICKS), tl.arange(0, MOST * PICKS)
    known = tl.load(keys + row * SHARES * PICKS + place, mask=place < SHARES * PICKS, other=NO_KEY)
    best = _best(known, PICKS)
    ordered = (best >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & LOW)
    token = (best & LOW).to(tl.int32) ^ LOW
    x = tl.where(pick < V, bits.to(tl.float32, bitcast=True), -float("inf"))
    tl.store(values + row * PICKS + pick, x)
    tl.store(ids + row * PICKS + pick, tl.where(pick < V, token, LOW))
    tl.store(argmax + row, tl.sum(tl.where(pick == 0, token, 0), 0).to(tl.int64))
    share = tl.arange(0, MOST)
    at = sums + (row * SHARES + share) * 2
    top = tl.load(at, mask=share < SHARES, other=-float("inf"))
    total = tl.load(at + 1, mask=share < SHARES, other=0.0)
    highest = tl.max(top, 0)
    total = tl.sum(tl.where(top > -float("inf"), total * tl.exp(top - highest), 0.0), 0)
    tl.store(log_sums + row, highest + tl.log(total))


@triton.jit
def _best(keys, PICKS: tl.constexpr):
    """The largest of different keys, one after another, in descending order."""
    pick = tl.arange(0, PICKS)
    best, last = tl.full([PICKS], NO_KEY, tl.int64), tl.max(keys, 0)
    for count in tl.range(0, PICKS):
        best = tl.where(pick == count, last, best)
        last = tl.max(tl.where(keys < last, keys, NO_KEY), 0)
    return best


@triton.jit
def _key(x, place):
    """int64 that are ordered as (number, -place); -0 equals 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(x != x, NAN, bits)
    ordered = bits ^ ((bits >> 31) & LOW)
    return (ordered.to(tl.int64) << 32) | (place ^ LOW).to(tl.int64)
