"""Mixtures of experts: feed-forward networks of the experts that a router chose for each row.

A pair is a row and one of its top_k experts, which are numbered row by row. `group_rows` sorts the
pairs by experts. `expert_gates` and `expert_downs` read an expert's weights for its pairs, ROWS at
a time; so the bits of a pair do not depend on the others. `sum_experts` adds up the pairs of a row.

Gates, ups and downs of a layer are three matrices of `weights.py`, one after the other. Their
widths and outputs are multiples of its GROUP.
"""

import triton
import triton.language as tl

from edgellm.device_runtime.kernels.triton.cache import FAR
from edgellm.device_runtime.kernels.triton.weights import find_matrix, has_matrix, multiply


@triton.jit
def group_rows(
    # inputs
    ids: "*i64",
    # shape
    num_pairs,
    # outputs
    order: "*i32",
    begins: "*i32",
    BLOCK: tl.constexpr,
):
    """Sort pairs by their experts `ids`; pairs of an expert keep their order.

    Grid [experts + 1]. begins[e] is the place of the first pair of expert e in `order`, the last of
    them num_pairs.
    """
    expert = tl.program_id(0)
    smaller = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        own = tl.load(ids + pair, mask=pair < num_pairs, other=FAR).to(tl.int32)
        smaller += (own < expert).to(tl.int32)
    place = tl.sum(smaller, 0)
    tl.store(begins + expert, place)
    for first in tl.range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        own = tl.load(ids + pair, mask=pair < num_pairs, other=FAR).to(tl.int32)
        is_own = (own == expert).to(tl.int32)
        rank = tl.cumsum(is_own, 0) - is_own
        tl.store(order + place + rank, pair, mask=is_own != 0)
        place += tl.sum(is_own, 0)


@triton.jit
def expert_gates(
    # inputs
    x: "*fp16",
    order: "*i32",
    begins: "*i32",
    table: "*i64",
    # shape
    matrix,
    hidden,
    inner,
    block,
    top_k,
    alpha_bits,
    limit_bits,
    offset_bits,
    cubic_bits,
    # outputs
    y: "*fp16",
    CODES: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    STEP: tl.constexpr,
):
    """Gates times ups of all pairs, fp16 [num_pairs, inner] in the order of `order`.

    Grid [experts, cdiv(inner, OUT)]. x is [num_rows, hidden]. With gates g up to a limit and ups u
    within +-limit, the result is g * sigmoid(g * (alpha + cubic * g^2)) * (u + offset); `*_bits`
    are float32 numbers.
    """
    expert, first_out = tl.program_id(0), tl.program_id(1) * OUT
    n = first_out + tl.arange(0, OUT)
    if has_matrix(table, matrix):
        last = tl.load(begins + expert + 1)
        alpha, limit = _number(alpha_bits), _number(limit_bits)
        offset, cubic = _number(offset_bits), _number(cubic_bits)
        sizes = hidden, inner, block
        for first in tl.range(tl.load(begins + expert), last, ROWS):
            i = first + tl.arange(0, ROWS)
            inside = i < last
            row = tl.load(order + i, mask=inside, other=0) // top_k
            gate = find_matrix(table, matrix), expert, first_out
            up = find_matrix(table, matrix + 1), expert, first_out
            g = multiply(x, row, inside, gate, sizes, CODES, ROWS, OUT, STEP)
            u = multiply(x, row, inside, up, sizes, CODES, ROWS, OUT, STEP)
            g = tl.minimum(g, limit)
            u = tl.maximum(tl.minimum(u, limit), -limit)
            activated = g / (1.0 + tl.exp(-g * (alpha + cubic * g * g)))
            found = (activated * (u + offset)).to(tl.float16)
            at = i[:, None] * inner + n[None, :]
            tl.store(y + at, found, mask=inside[:, None] & (n < inner)[None, :])


@triton.jit
def expert_downs(
    # inputs
    x: "*fp16",
    shares: "*fp16",
    order: "*i32",
    begins: "*i32",
    table: "*i64",
    # shape
    matrix,
    hidden,
    inner,
    block,
    # outputs
    y: "*fp16",
    CODES: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    STEP: tl.constexpr,
):
    """Outputs of all pairs times their `shares`, fp16 [num_pairs, hidden].

    Grid [experts, cdiv(hidden, OUT)]. x is the output of `expert_gates`.
    """
    expert, first_out = tl.program_id(0), tl.program_id(1) * OUT
    n = first_out + tl.arange(0, OUT)
    if has_matrix(table, matrix):
        last = tl.load(begins + expert + 1)
        sizes = inner, hidden, block
        for first in tl.range(tl.load(begins + expert), last, ROWS):
            i = first + tl.arange(0, ROWS)
            inside = i < last
            pair = tl.load(order + i, mask=inside, other=0)
            own = find_matrix(table, matrix), expert, first_out
            found = multiply(x, i, inside, own, sizes, CODES, ROWS, OUT, STEP)
            share = tl.load(shares + pair, mask=inside, other=0.0).to(tl.float32)
            found = (found * share[:, None]).to(tl.float16)
            at = pair[:, None] * hidden + n[None, :]
            tl.store(y + at, found, mask=inside[:, None] & (n < hidden)[None, :])


@triton.jit
def sum_experts(
    # inputs
    parts: "*fp16",
    # shape
    hidden,
    top_k,
    # outputs
    y: "*fp16",
    BLOCK: tl.constexpr,
):
    """Sums of the pairs of a row, in their order. Grid [num_rows, cdiv(hidden, BLOCK)]."""
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for at in tl.range(0, top_k):
        part = tl.load(parts + (row * top_k + at) * hidden + n, mask=inside, other=0.0)
        total += part.to(tl.float32)
    tl.store(y + row * hidden + n, total.to(tl.float16), mask=inside)


@triton.jit
def _number(bits):
    """A float32 of the bits of an int32."""
    return bits.to(tl.float32, bitcast=True)
