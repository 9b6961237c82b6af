"""The address table of a KV cache, the table of a pass's sequences, and the dtypes of the cache.

The address table, int64, has the capacity C (rows), C ^ MAGIC, then for each layer the addresses of
K and V [kv_heads, C, head_dim] and of their scales, fp16 [kv_heads, C]. CODES are fp16 (without
scales), int8 or fp8 (E4M3), with a scale for each row. Kernels do nothing if the magic is wrong,
because TensorRT times plugins on random inputs.

In a pass of several sequences each has its own rows of the cache, and `write_index` is a table of
the sequences, int64 [MANY, FIELDS]: the first row in the pass, rows of the pass (0: the entry is
unused), the first row in the cache, cached rows, and columns of the mask (0: causal). MANY is 0 in
a pass of one sequence.

head_dim is a multiple of 16. Kernels compute in tiles of D, a power of two, and mask the rest.
"""

import triton
import triton.language as tl

MAGIC: tl.constexpr = tl.constexpr(0x656467656C6C6D)
HEADER: tl.constexpr = tl.constexpr(2)  # entries of the table before the layers'
PARTS: tl.constexpr = tl.constexpr(4)  # entries of a layer: K, V and their scales
FIELDS: tl.constexpr = tl.constexpr(5)  # of a sequence
FAR: tl.constexpr = tl.constexpr(1 << 29)  # more rows than any cache has
SMALLEST_SCALE: tl.constexpr = tl.constexpr(1e-6)  # of a row of zeros; fp16 holds it


@triton.jit
def bound_capacity(table):
    """Capacity of the caches of an address table; 0 if the table is invalid."""
    capacity = tl.load(table)
    return tl.where(tl.load(table + 1) == (capacity ^ MAGIC), capacity, 0).to(tl.int32)


@triton.jit
def first_slot(write_index):
    """The first slot of a pass as int32, clamped to [-FAR, FAR]."""
    return tl.minimum(tl.maximum(tl.load(write_index), -FAR), FAR).to(tl.int32)


@triton.jit
def own_slot(sequences, row, MANY: tl.constexpr):
    """The slot of a row as int32; -1 if the row belongs to no sequence."""
    at = sequences + tl.arange(0, MANY) * FIELDS
    step = row - tl.load(at)
    is_own = (step >= 0) & (step < tl.load(at + 1))
    slot = tl.load(at + 2) + tl.load(at + 3) + step
    return tl.max(tl.where(is_own & (slot >= 0) & (slot < FAR), slot, -1), 0).to(tl.int32)


@triton.jit
def find_sequence(sequences, entries, table, block, group, ROWS: tl.constexpr, MANY: tl.constexpr):
    """The sequence of a block of ROWS query rows; no block has rows of two sequences.

    `entries` of the table are read, at most MANY.

    Returns:
        The sequence's first block, then its entries, with cached and new rows together in the place
        of cached rows. A block without a sequence has no rows.
    """
    entry = tl.arange(0, MANY)
    counts = tl.load(sequences + entry * FIELDS + 1, mask=entry < entries, other=0).to(tl.int32)
    ends = tl.cumsum(tl.cdiv(counts * group, ROWS), 0)
    place = tl.sum((ends <= block).to(tl.int32), 0)
    capacity = bound_capacity(table)
    exists = (place < MANY) & (capacity > 0)
    at = sequences + place * FIELDS
    first = tl.load(at, mask=exists, other=0).to(tl.int32)
    count = tl.load(at + 1, mask=exists, other=0).to(tl.int32)
    base = tl.load(at + 2, mask=exists, other=0)
    live = tl.load(at + 3, mask=exists, other=0).to(tl.int32) + count
    columns = tl.load(at + 4, mask=exists, other=0).to(tl.int32)
    before = tl.max(tl.where(ends <= block, ends, 0), 0)
    return before, first, count, base, tl.minimum(live, capacity), columns


@triton.jit
def find_rows(table, layer, part, head, base, size, CODES: tl.constexpr):
    """Pointers to row `base` of K (part 0) or V (1) of a layer and head, and to its scale."""
    at = table + HEADER + layer * PARTS + part
    first = head * tl.load(table) + base
    ELEMENT: tl.constexpr = tl.float16 if CODES == "fp16" else tl.int8
    codes = tl.load(at).to(tl.pointer_type(ELEMENT)) + first * size
    scales = tl.load(at + 2).to(tl.pointer_type(tl.float16)) + first
    # The pointer was an integer: without the hint loads have 2 bytes instead of 16.
    return tl.multiple_of(codes, 16), scales


@triton.jit
def encode(x, CODES: tl.constexpr):
    """Round float32 numbers, divided by their scale, to the dtype of the cache."""
    if CODES == "int8":
        y = tl.floor(x + 0.5).to(tl.int8)
    elif CODES == "fp8":
        # To 3 bits of mantissa first, nearest even: Triton 3.9's interpreter loses the carry.
        x = tl.clamp(x, -448.0, 448.0)
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        rounded = bits.to(tl.float32, bitcast=True)
        # Below 2^-6 steps are 2^-9, as those of floats between 2^14 and 2^15.
        rounded = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, rounded)
        y = rounded.to(tl.float8e4nv).to(tl.int8, bitcast=True)
    else:
        y = x.to(tl.float16)
    return y


@triton.jit
def decode(codes, CODES: tl.constexpr):
    """Cached numbers as fp16, not yet multiplied by their scale."""
    return (codes.to(tl.float8e4nv, bitcast=True) if CODES == "fp8" else codes).to(tl.float16)


@triton.jit
def store_row(codes, scales, slot, low, high, size, D: tl.constexpr, CODES: tl.constexpr):
    """Write the halves of one row, float32 [D/2] each and padded with 0, to its slot."""
    half = tl.arange(0, D // 2)
    inside = half < size // 2
    if CODES != "fp16":
        LARGEST: tl.constexpr = 127.0 if CODES == "int8" else 448.0
        largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 0)
        scale = tl.maximum(largest / LARGEST, SMALLEST_SCALE).to(tl.float16)
        tl.store(scales + slot, scale)
        low, high = low / scale.to(tl.float32), high / scale.to(tl.float32)
    at = codes + slot * size + half
    tl.store(at, encode(low, CODES), mask=inside)
    tl.store(at + size // 2, encode(high, CODES), mask=inside)
