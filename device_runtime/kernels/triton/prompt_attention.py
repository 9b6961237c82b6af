"""Attention in tiles of few query rows for tokens and trees, of more for prompts.

A program reads all keys and values that its rows attend to. So a prompt in tiles of 64 rows reads
them a quarter as often as in tiles of 16. Tokens and trees keep small tiles, which fill the GPU. An
engine has one kernel for both, since a node of TensorRT has one; the tokens of a pass decide.
"""

import triton
import triton.language as tl

from edgellm.device_runtime.kernels.triton.attention import attend

PROMPT_TOKENS: tl.constexpr = tl.constexpr(128)  # of a pass, from which tiles are large


@triton.jit
def attend_tiles(
    q: "*fp16",
    tree: "*i8",
    positions: "*i64",
    write_index: "*i64",
    table: "*i64",
    layer,
    num_rows,
    mask_columns,
    group,
    window,
    cap_bits,
    head_dim,
    parts: "*fp32",
    stats: "*fp32",
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CODES: tl.constexpr,
    WINDOWED: tl.constexpr,
    GENERAL: tl.constexpr,
    MANY: tl.constexpr,
    PROMPT_ROWS: tl.constexpr,
    PROMPT_BLOCK: tl.constexpr,
):
    """`attend` in tiles of ROWS query rows, or of PROMPT_ROWS from PROMPT_TOKENS tokens on.

    The grid may have more programs than tiles.
    """
    inputs = q, tree, positions, write_index, table
    sizes = layer, num_rows, mask_columns, group, window, cap_bits, head_dim
    sums = parts, stats
    if num_rows >= PROMPT_TOKENS:
        first = tl.program_id(1) * PROMPT_ROWS if MANY == 0 else 0
        if first < num_rows * group:
            _attend(
                inputs, sizes, sums, D, PROMPT_ROWS, PROMPT_BLOCK, CODES, WINDOWED, GENERAL, MANY
            )
    else:
        _attend(inputs, sizes, sums, D, ROWS, BLOCK, CODES, WINDOWED, GENERAL, MANY)


@triton.jit
def _attend(
    inputs,
    sizes,
    sums,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CODES: tl.constexpr,
    WINDOWED: tl.constexpr,
    GENERAL: tl.constexpr,
    MANY: tl.constexpr,
):
    """`attend` in tiles of one size."""
    q, tree, positions, write_index, table = inputs
    layer, num_rows, mask_columns, group, window, cap_bits, head_dim = sizes
    parts, stats = sums
    attend(
        q,
        tree,
        positions,
        write_index,
        table,
        layer,
        num_rows,
        mask_columns,
        group,
        window,
        cap_bits,
        head_dim,
        parts,
        stats,
        D,
        ROWS,
        BLOCK,
        CODES,
        WINDOWED,
        GENERAL,
        MANY,
    )
