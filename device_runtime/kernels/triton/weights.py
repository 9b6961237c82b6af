"""Weights by address: their table, their stored forms, and products with them.

The table, int64, has the number M of matrices, M ^ MAGIC (`cache.py`), then for each matrix four
addresses: weights [out, in], scales and shifts fp16 [out, in / block], biases fp16 [out]; 0: there
are none. Experts are a matrix [E, out, in], and their factors and biases accordingly. A weight is
fp16, or code * scale + shift. CODES are fp16; int8; fp8 (E4M3); int4, pairs of codes counted from
8; fp4, pairs of E2M1 codes, doubled. The first of a pair is the lower half of a byte. Kernels do
nothing if the magic is wrong, because TensorRT times plugins on random inputs.

Inputs and blocks are multiples of GROUP.
"""

import triton
import triton.language as tl

from edgellm.device_runtime.kernels.triton.cache import HEADER, bound_capacity, decode

GROUP: tl.constexpr = tl.constexpr(16)  # neighbours that share a scale
ADDRESSES: tl.constexpr = tl.constexpr(4)  # of a matrix


@triton.jit
def has_matrix(table, matrix):
    """Whether a table is valid and has a matrix."""
    return matrix < bound_capacity(table)


@triton.jit
def find_matrix(table, matrix):
    """Where the addresses of a matrix are."""
    return table + HEADER + matrix * ADDRESSES


@triton.jit
def multiply(
    x,
    row,
    inside,
    own,
    sizes,
    CODES: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    STEP: tl.constexpr,
):
    """Rows of x [., width] times OUT outputs of a matrix, and their biases: [ROWS, OUT].

    `own` are the matrix of `find_matrix`, the expert, and the first output; `sizes` are width,
    outputs of an expert, and block.
    """
    at, expert, first_out = own
    width, out, block = sizes
    before = expert.to(tl.int64) * out + first_out
    n = tl.arange(0, OUT)
    is_out = n < out - first_out
    total = tl.zeros([ROWS, OUT], tl.float32)
    for first in tl.range(0, width, STEP):
        k = first + tl.arange(0, STEP)
        given = x + row[:, None] * width + k[None, :]
        given = tl.load(given, mask=inside[:, None] & (k < width)[None, :], other=0.0)
        found = read_weights(at, before, is_out, first, (width, block), CODES, OUT, STEP)
        total = tl.dot(given, tl.trans(found), total)
    bias = tl.load(at + 3)
    biases = bias.to(tl.pointer_type(tl.float16)) + before + n
    has_bias = n < tl.where(bias != 0, out - first_out, 0)
    return total + tl.load(biases, mask=has_bias, other=0.0).to(tl.float32)[None, :]


@triton.jit
def read_weights(
    at, before, is_out, first, sizes, CODES: tl.constexpr, OUT: tl.constexpr, STEP: tl.constexpr
):
    """Weights of OUT outputs after `before`, from an input on: fp16 [OUT, STEP], 0 beyond the last.

    `sizes` are width and block.
    """
    width, _ = sizes
    PAIR: tl.constexpr = 2 if CODES == "int4" or CODES == "fp4" else 1
    ELEMENT: tl.constexpr = tl.float16 if CODES == "fp16" else tl.int8
    stride = tl.multiple_of(width // PAIR, 8)
    codes = tl.multiple_of(tl.load(at).to(tl.pointer_type(ELEMENT)), 16) + before * stride
    j = first // PAIR + tl.arange(0, STEP // PAIR)
    found = codes + tl.arange(0, OUT)[:, None] * stride + j[None, :]
    found = tl.load(found, mask=is_out[:, None] & (j < stride)[None, :], other=0)
    if CODES != "fp16":
        found = _scaled(found, at, before, is_out, first, sizes, CODES, OUT, STEP)
    return found


@triton.jit
def _scaled(
    codes,
    at,
    before,
    is_out,
    first,
    sizes,
    CODES: tl.constexpr,
    OUT: tl.constexpr,
    STEP: tl.constexpr,
):
    """Weights of stored codes, fp16 [OUT, STEP]; 0 beyond the last input."""
    width, block = sizes
    blocks = width // block
    group = first // GROUP + tl.arange(0, STEP // GROUP)
    own = tl.arange(0, OUT)[:, None] * blocks + (group * GROUP // block)[None, :]
    inside = is_out[:, None] & (group * GROUP < width)[None, :]
    scales = tl.load(at + 1).to(tl.pointer_type(tl.float16)) + before * blocks
    shift = tl.load(at + 2)
    shifts = shift.to(tl.pointer_type(tl.float16)) + before * blocks
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
