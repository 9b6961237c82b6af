"""The end of attention: shares of few query rows are joined, prompts are attended whole.

Prompts have enough rows to fill a GPU without shares, so nothing is joined, and no partial sum is
written. A program has a tile of ROWS query rows of a KV head, of all its query heads, so it reads
keys and values once for them. It reads none that no row attends to. Both are one kernel, since the
number of rows decides and a node of TensorRT has one kernel; so `attend` keeps few registers.
"""

import triton
import triton.language as tl

from edgellm.device_runtime.kernels.triton.attention import (
    LOG2_E,
    NOTHING,
    PROMPT_TOKENS,
    attend_rows,
    numbers,
)

MAX_SHARES: tl.constexpr = tl.constexpr(16)
TOGETHER: tl.constexpr = tl.constexpr(4)  # shares that are read together


@triton.jit
def finish(
    # inputs
    q: "*fp16", tree: "*i8", positions: "*i64", write_index: "*i64", table: "*i64",
    parts: "*fp32", stats: "*fp32", sinks: "*fp32",
    # shape, rules
    layer, num_rows, mask_columns, group, window, cap_bits, sequences, head_dim, num_shares, sunk,
    # outputs
    y: "*fp16",
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OUT: tl.constexpr,
    JOINED: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Attend ROWS query rows of a prompt, or join the shares of JOINED rows that `attend` left.

    Grid [kv_heads, tiles, D / OUT], tiles of ROWS or of JOINED rows, and OUT values of a head. See
    `attend` for the inputs. y is [num_rows, heads, head_dim]. sinks [heads], if `sunk`, are scores
    that add to the sum of weights only.
    """
    sinks_and_heads = sinks, tl.num_programs(0) * group, sunk
    if num_rows >= PROMPT_TOKENS:
        if (sequences != 0) | (tl.program_id(1) * ROWS < num_rows * group):
            inputs = q, tree, positions, write_index, table
            sizes = layer, num_rows, mask_columns, group, window, cap_bits, sequences, head_dim
            _attend_whole(inputs, sizes, sinks_and_heads, y, D, ROWS, BLOCK, OUT, CODES)
    else:
        sizes_of_few = num_rows, group, head_dim, num_shares
        _join(parts, stats, sizes_of_few, sinks_and_heads, y, JOINED, OUT)


@triton.jit
def _attend_whole(
    inputs,
    sizes,
    sinks_and_heads,
    y,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT: tl.constexpr,
    CODES: tl.constexpr,
):
    """Attend the query rows of a program to all of their slots."""
    first = tl.program_id(2) * OUT
    sums, top, total, query, inside = attend_rows(
        inputs, sizes, (0, 1, first), D, ROWS, BLOCK, OUT, CODES, True
    )
    sink = _sink(sinks_and_heads, query)
    highest = tl.maximum(top, sink)
    weight = tl.exp2(top - highest)
    divisor = total * weight + tl.exp2(sink - highest)
    sums *= (weight / tl.maximum(divisor, 1e-30))[:, None]
    _store(y, sums, query, inside, first, sizes[7], OUT)


@triton.jit
def _sink(sinks_and_heads, query):
    """Scores of the rows' sinks, base 2; without sinks they add nothing."""
    sinks, heads, sunk = sinks_and_heads
    head = query % heads
    return tl.load(sinks + head, mask=head < tl.where(sunk != 0, heads, 0), other=NOTHING) * LOG2_E


@triton.jit
def _join(parts, stats, sizes, sinks_and_heads, y, JOINED: tl.constexpr, OUT: tl.constexpr):
    """Join all shares of the query rows of a program."""
    num_rows, group, size, num_shares = sizes
    heads = sinks_and_heads[1]
    rows, first = tl.program_id(1) * JOINED + tl.arange(0, JOINED), tl.program_id(2) * OUT
    step = rows // group
    inside = step < num_rows
    query = step * heads + tl.program_id(0) * group + rows % group
    share, out = tl.arange(0, MAX_SHARES), first + tl.arange(0, OUT)
    at = share[None, :] * (num_rows * heads) + query[:, None]
    there = numbers(inside, share, num_shares)
    top = tl.load(stats + at * 2, mask=there, other=NOTHING)
    total = tl.load(stats + at * 2 + 1, mask=there, other=0.0)
    sink = _sink(sinks_and_heads, query)
    highest = tl.maximum(tl.max(top, 1), sink)
    divisor = tl.sum(total * tl.exp2(top - highest[:, None]), 1) + tl.exp2(sink - highest)
    sums = tl.zeros([JOINED, OUT], tl.float32)
    for begin in tl.range(0, num_shares, TOGETHER):
        for each in tl.static_range(TOGETHER):
            own = (begin + each) * (num_rows * heads) + query
            has = step < tl.where(begin + each < num_shares, num_rows, 0)
            weight = tl.exp2(tl.load(stats + own * 2, mask=has, other=NOTHING) - highest)
            own_parts = parts + own[:, None] * size + out[None, :]
            x = tl.load(own_parts, mask=numbers(has, out, size), other=0.0)
            sums += x * weight[:, None]
    sums /= tl.maximum(divisor, 1e-30)[:, None]
    _store(y, sums, query, inside, first, size, OUT)


@triton.jit
def _store(y, sums, query, inside, first, size, OUT: tl.constexpr):
    out = first + tl.arange(0, OUT)
    at = y + query[:, None] * size + out[None, :]
    tl.store(at, sums.to(tl.float16), mask=numbers(inside, out, size))
