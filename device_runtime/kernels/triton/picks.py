"""Top-k and log-sum-exp of rows of logits.

A number and its index are compared as one int64: the number's bits, mapped to ordered integers,
then the inverted index, so the first of equal numbers wins.
"""

import triton
import triton.language as tl

NAN: tl.constexpr = tl.constexpr(0x7FC00000)
LOW: tl.constexpr = tl.constexpr(0x7FFFFFFF)
NO_KEY: tl.constexpr = tl.constexpr(-(1 << 63))


@triton.jit
def pick_shares(
    # inputs
    logits: "*fp32",
    # shape
    vocab_size,
    # outputs
    keys: "*i64", sums: "*fp32",
    PICKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the PICKS largest logits of one share of a row.

    Grid [rows, cdiv(vocab_size, BLOCK)]. logits are [rows, vocab_size]. keys [rows, shares, PICKS]
    are descending; sums [rows, shares, 2] are the largest logit x of the share and the sum of
    exp(logit - x). NaN counts as the largest number.
    """
    row, share, shares = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    place = share * BLOCK + tl.arange(0, BLOCK)
    inside = place < vocab_size
    x = tl.load(logits + row.to(tl.int64) * vocab_size + place, mask=inside, other=-float("inf"))
    at = row * shares + share
    best = _best(tl.where(inside, ordered_key(x, place), NO_KEY), PICKS)
    tl.store(keys + at * PICKS + tl.arange(0, PICKS), best)
    top = tl.max(x, 0)
    total = tl.sum(tl.where(x > -float("inf"), tl.exp(x - top), 0.0), 0)
    tl.store(sums + at * 2, top)
    tl.store(sums + at * 2 + 1, total)


@triton.jit
def join_picks(
    # inputs
    keys: "*i64", sums: "*fp32",
    # shape
    vocab_size, num_shares,
    # outputs
    values: "*fp32", ids: "*i32", argmax: "*i64", log_sums: "*fp32",
    PICKS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Join the shares of a row, at most MOST.

    Grid [rows]. values and ids [rows, PICKS] are descending; after vocab_size entries they are -inf
    and the largest int32. argmax and log_sums (log-sum-exp) are [rows].
    """
    row = tl.program_id(0)
    pick, place = tl.arange(0, PICKS), tl.arange(0, MOST * PICKS)
    inside = place < num_shares * PICKS
    known = tl.load(keys + row * num_shares * PICKS + place, mask=inside, other=NO_KEY)
    best = _best(known, PICKS)
    ordered = (best >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & LOW)
    token = (best & LOW).to(tl.int32) ^ LOW
    x = tl.where(pick < vocab_size, bits.to(tl.float32, bitcast=True), -float("inf"))
    tl.store(values + row * PICKS + pick, x)
    tl.store(ids + row * PICKS + pick, tl.where(pick < vocab_size, token, LOW))
    tl.store(argmax + row, tl.sum(tl.where(pick == 0, token, 0), 0).to(tl.int64))
    share = tl.arange(0, MOST)
    at = sums + (row * num_shares + share) * 2
    top = tl.load(at, mask=share < num_shares, other=-float("inf"))
    total = tl.load(at + 1, mask=share < num_shares, other=0.0)
    highest = tl.max(top, 0)
    total = tl.sum(tl.where(top > -float("inf"), total * tl.exp(top - highest), 0.0), 0)
    tl.store(log_sums + row, highest + tl.log(total))


@triton.jit
def _best(keys, PICKS: tl.constexpr):
    """The PICKS largest of distinct keys, in descending order."""
    pick = tl.arange(0, PICKS)
    best, last = tl.full([PICKS], NO_KEY, tl.int64), tl.max(keys, 0)
    for count in tl.range(0, PICKS):
        best = tl.where(pick == count, last, best)
        last = tl.max(tl.where(keys < last, keys, NO_KEY), 0)
    return best


@triton.jit
def ordered_key(x, place):
    """int64 keys in the order of (number, -place); -0 equals 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(x != x, NAN, bits)
    ordered = bits ^ ((bits >> 31) & LOW)
    return (ordered.to(tl.int64) << 32) | (place ^ LOW).to(tl.int64)
