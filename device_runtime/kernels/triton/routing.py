"""Routing of mixtures of experts: the chosen experts of a row, and their shares.

The steps are those of the function ROUTING (`core/onnx_functions.py`), in float32.
"""

import triton
import triton.language as tl

from edgellm.device_runtime.kernels.triton.picks import LOW, NO_KEY, ordered_key


@triton.jit
def route_rows(
    # inputs
    logits: "*fp32",
    offsets: "*fp32",
    bias: "*fp32",
    factors: "*fp32",
    # shape
    experts,
    top_k,
    offset,
    capped,
    sigmoid,
    biased,
    normalized,
    weighted,
    cap_bits,
    smallest_sum_bits,
    added_bits,
    scale_bits,
    # outputs
    ids: "*i64",
    shares: "*fp16",
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """Choose the top_k experts of a row; of equal ones the first.

    Grid [num_rows]. logits are [num_rows, experts]; offsets, bias and factors, [experts], are read
    if `offset`, `biased` and `weighted` are 1. ids and shares are [num_rows, top_k]. `*_bits` are
    float32 numbers. At most EXPERTS experts and CHOSEN of a row.
    """
    row = tl.program_id(0)
    n, at = tl.arange(0, EXPERTS), tl.arange(0, CHOSEN)
    inside = n < experts
    x = tl.load(logits + row * experts + n, mask=inside, other=0.0)
    x += tl.load(offsets + n, mask=n < tl.where(offset != 0, experts, 0), other=0.0)
    share = _shares(x, inside, cap_bits.to(tl.float32, bitcast=True), capped, sigmoid)
    rank = share + tl.load(bias + n, mask=n < tl.where(biased != 0, experts, 0), other=0.0)
    keys = tl.where(inside, ordered_key(rank, n), NO_KEY)
    chosen, taken = tl.zeros([CHOSEN], tl.int32), tl.zeros([CHOSEN], tl.float32)
    for count in tl.range(0, top_k):
        expert = (tl.max(keys, 0) & LOW).to(tl.int32) ^ LOW
        is_best = n == expert
        chosen = tl.where(at == count, expert, chosen)
        taken = tl.where(at == count, tl.sum(tl.where(is_best, share, 0.0), 0), taken)
        keys = tl.where(is_best, NO_KEY, keys)
    smallest_sum = smallest_sum_bits.to(tl.float32, bitcast=True)
    added = added_bits.to(tl.float32, bitcast=True)
    total = tl.maximum(tl.sum(taken, 0), smallest_sum) + added
    scale = scale_bits.to(tl.float32, bitcast=True)
    taken = taken / tl.where(normalized != 0, total, 1.0) * scale
    is_taken = at < top_k
    has_factor = at < tl.where(weighted != 0, top_k, 0)
    factor = tl.load(factors + chosen, mask=has_factor, other=1.0)
    half = (taken.to(tl.float16).to(tl.float32) * factor).to(tl.float16)
    tl.store(ids + row * top_k + at, chosen.to(tl.int64), mask=is_taken)
    tl.store(shares + row * top_k + at, half, mask=is_taken)


@triton.jit
def _shares(x, inside, cap, capped, sigmoid):
    """Sigmoid or softmax of logits, with a soft cap or without; 0 outside."""
    bounded = (1.0 - 2.0 / (tl.exp(2.0 * x / cap) + 1.0)) * cap  # tanh
    x = tl.where(inside, tl.where(capped != 0, bounded, x), -float("inf"))
    exponential = tl.exp(x - tl.max(x, 0))
    softmax = exponential / tl.sum(exponential, 0)
    return tl.where(sigmoid != 0, 1.0 / (1.0 + tl.exp(-x)), softmax)
