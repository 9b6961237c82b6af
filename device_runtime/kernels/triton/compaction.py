"""Accepted rows of a KV cache move together."""

import triton
import triton.language as tl

from edgellm.device_runtime.kernels.triton.cache import bound_capacity, find_rows, first_slot


@triton.jit
def keep_rows(path, outcome, write_index, table, SIZE, D: tl.constexpr, CODES: tl.constexpr):
    """The slots write_index + path[i] become write_index + i, for i below outcome[0].

    Grid [layers, kv_heads, 2] (K, then V). path int32, ascending from 0 on, and outcome int32 as
    `accept_greedy` writes them: the host need not know them. A thread moves the same elements of
    all rows, one row after another, and path[i] >= i: no row is overwritten before it was read.
    """
    layer, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    capacity = bound_capacity(table)
    first = first_slot(write_index)
    codes, scales = find_rows(table, layer, part, head, 0, SIZE, CODES)
    element = tl.arange(0, D)
    one = tl.arange(0, 1)
    for place in tl.range(1, tl.load(outcome)):  # the root stays
        source, target = first + tl.load(path + place + one), first + place + one
        fits = (source > target) & (source < capacity) & (target > 0)
        moves = fits & (element < SIZE)
        moved = tl.load(codes + source * SIZE + element, mask=moves, other=0)
        tl.store(codes + target * SIZE + element, moved, mask=moves)
        if CODES != "fp16":
            scale = tl.load(scales + source, mask=fits, other=0.0)
            tl.store(scales + target, scale, mask=fits)
