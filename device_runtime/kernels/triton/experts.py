"""Mixtures of experts: feed-forward networks of the experts that a router chose for each row.

A pair is a row and one of its top_k experts, which are numbered row by row. `group_rows` sorts the
pairs by experts. `expert_gates` and `expert_downs` read an expert's weights for its pairs, ROWS at
a time; so the bits of a pair do not depend on the others. `sum_experts` adds up the pairs of a row.

The table of experts, int64, has their number E, E ^ MAGIC (`cache.py`), then for gates, ups and
downs of each layer four addresses: weights [E, out, in], scales and shifts fp16
[E, out, in / block], biases fp16 [E, out]; 0: there are none. A weight is fp16, or
code * scale + shift. CODES are fp16; int8; fp8 (E4M3); int4, pairs of codes counted from 8; fp4,
pairs of E2M1 codes, doubled. The first of a pair is the lower half of a byte. Products do nothing
if the magic is wrong, because TensorRT times plugins on random inputs.

Widths and blocks are multiples of GROUP.
"""

import triton
import triton.language as tl

from edgellm.device_runtime.kernels.triton.cache import FAR, HEADER, bound_capacity, decode

GROUP: tl.constexpr = tl.constexpr(16)  # neighbours that share a scale
ADDRESSES: tl.constexpr = tl.constexpr(4)  # of a projection
PROJECTIONS: tl.constexpr = tl.constexpr(3)


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
    layer,
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
    expert = tl.program_id(0)
    n = tl.program_id(1) * OUT + tl.arange(0, OUT)
    if expert < bound_capacity(table):
        last = tl.load(begins + expert + 1)
        alpha, limit = _number(alpha_bits), _number(limit_bits)
        offset, cubic = _number(offset_bits), _number(cubic_bits)
        sizes = hidden, inner, block
        for first in tl.range(tl.load(begins + expert), last, ROWS):
            i = first + tl.arange(0, ROWS)
            inside = i < last
            row = tl.load(order + i, mask=inside, other=0) // top_k
            own = table, layer, expert
            g = _product(x, row, inside, own, 0, n, sizes, CODES, ROWS, OUT, STEP)
            u = _product(x, row, inside, own, 1, n, sizes, CODES, ROWS, OUT, STEP)
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
    layer,
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
    expert = tl.program_id(0)
    n = tl.program_id(1) * OUT + tl.arange(0, OUT)
    if expert < bound_capacity(table):
        last = tl.load(begins + expert + 1)
        sizes = inner, hidden, block
        for first in tl.range(tl.load(begins + expert), last, ROWS):
            i = first + tl.arange(0, ROWS)
            inside = i < last
            pair = tl.load(order + i, mask=inside, other=0)
            own = table, layer, expert
            found = _product(x, i, inside, own, 2, n, sizes, CODES, ROWS, OUT, STEP)
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


@triton.jit
def _product(
    x,
    row,
    inside,
    own,
    projection,
    n,
    sizes,
    CODES: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    STEP: tl.constexpr,
):
    """Rows of x [., width] times an expert's weights of outputs n, and biases: [ROWS, OUT].

    `own` are table, layer and expert; `sizes` are width, outputs of all, and block.
    """
    table, layer, expert = own
    width, out, block = sizes
    at = table + HEADER + (layer * PROJECTIONS + projection) * ADDRESSES
    outputs = expert.to(tl.int64) * out  # of the experts before
    PAIR: tl.constexpr = 2 if CODES == "int4" or CODES == "fp4" else 1
    ELEMENT: tl.constexpr = tl.float16 if CODES == "fp16" else tl.int8
    stride = tl.multiple_of(width // PAIR, 8)
    codes = tl.multiple_of(tl.load(at).to(tl.pointer_type(ELEMENT)), 16) + outputs * stride
    is_out = n < out
    total = tl.zeros([ROWS, OUT], tl.float32)
    for first in tl.range(0, width, STEP):
        k = first + tl.arange(0, STEP)
        given = x + row[:, None] * width + k[None, :]
        given = tl.load(given, mask=inside[:, None] & (k < width)[None, :], other=0.0)
        j = first // PAIR + tl.arange(0, STEP // PAIR)
        found = codes + n[:, None] * stride + j[None, :]
        found = tl.load(found, mask=is_out[:, None] & (j < stride)[None, :], other=0)
        if CODES != "fp16":
            factors = at, outputs * (width // block), width // block, block, width
            found = _scaled(found, factors, n, is_out, first, CODES, OUT, STEP)
        total = tl.dot(given, tl.trans(found), total)
    bias = tl.load(at + 3)
    biases = bias.to(tl.pointer_type(tl.float16)) + outputs + n
    has_bias = n < tl.where(bias != 0, out, 0)
    return total + tl.load(biases, mask=has_bias, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _scaled(
    codes, factors, n, is_out, first, CODES: tl.constexpr, OUT: tl.constexpr, STEP: tl.constexpr
):
    """Weights of stored codes, fp16 [OUT, STEP]; 0 beyond the last input.

    `factors` are the table at a projection, factors before the expert's, those of an output, the
    block and the width.
    """
    at, before, blocks, block, width = factors
    group = first // GROUP + tl.arange(0, STEP // GROUP)
    own = n[:, None] * blocks + (group * GROUP // block)[None, :]
    inside = is_out[:, None] & (group * GROUP < width)[None, :]
    scales = tl.load(at + 1).to(tl.pointer_type(tl.float16)) + before
    shift = tl.load(at + 2)
    shifts = shift.to(tl.pointer_type(tl.float16)) + before
    scale = tl.load(scales + own, mask=inside, other=0.0)
    is_shifted = inside & (group * GROUP < tl.where(shift != 0, width, 0))[None, :]
    shifted = tl.load(shifts + own, mask=is_shifted, other=0.0)
    values = tl.reshape(_values(codes, CODES), [OUT, STEP // GROUP, GROUP])
    return tl.reshape(values * scale[:, :, None] + shifted[:, :, None], [OUT, STEP])


@triton.jit
def _values(codes, CODES: tl.constexpr):
    """Numbers of codes, fp16; two of a pair."""
    if CODES == "int4" or CODES == "fp4":
        both = tl.interleave(codes & 15, (codes >> 4) & 15).to(tl.int16)
        # Bits of float16 are cheaper than conversions.
        if CODES == "int4":
            found = (both | 0x6400).to(tl.float16, bitcast=True) - 1032.0  # 1024 + code
        else:
            bits = ((both & 8) << 12) | ((both & 7) << 9)  # with exponents 14 smaller
            found = bits.to(tl.float16, bitcast=True) * 32768.0
    else:
        found = decode(codes, CODES)
    return found
