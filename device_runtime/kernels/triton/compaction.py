"""Compaction of the accepted rows of a KV cache."""

import triton
import triton.language as tl

from edgellm.device_runtime.kernels.triton.cache import bound_capacity, find_rows, first_slot


@triton.jit
def keep_rows(
    # inputs
    path: "*i32", outcome: "*i32", write_index: "*i64", table: "*i64",
    # shape
    head_dim,
    D: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Move the slots write_index + path[i] to write_index + i, for i below outcome[0].

    Grid [layers, kv_heads, 2] (K, then V). path (ascending from 0) and outcome are those that
    `accept_greedy` writes, so the host need not read them. A thread moves the same elements of all
    rows in order, and path[i] >= i, so no row is overwritten before it is read.
    """
    layer, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    capacity = bound_capacity(table)
    first = first_slot(write_index)
    codes, scales = find_rows(table, layer, part, head, 0, head_dim, CODES)
    element = tl.arange(0, D)
    one = tl.arange(0, 1)
    for place in tl.range(1, tl.load(outcome)):  # the root keeps its slot
        source, target = first + tl.load(path + place + one), first + place + one
        fits = (source > target) & (source < capacity) & (target > 0)
        moves = fits & (element < head_dim)
        moved = tl.load(codes + source * head_dim + element, mask=moves, other=0)
        tl.store(codes + target * head_dim + element, moved, mask=moves)
        if CODES != "fp16":
            scale = tl.load(scales + source, mask=fits, other=0.0)
            tl.store(scales + target, scale, mask=fits)
