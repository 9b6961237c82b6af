"""Embeddings and heads: rows of a table by token id, and logits of a few rows.

A head may be the table of embeddings, so both read a matrix of `weights.py`. Widths and blocks are
multiples of its GROUP, the vocabulary has any size.
"""

import triton
import triton.language as tl

from edgellm.device_runtime.kernels.triton.weights import (
    find_matrix,
    has_matrix,
    multiply,
    read_weights,
)


@triton.jit
def look_up_rows(
    # inputs
    ids: "*i64",
    table: "*i64",
    # shape
    matrix,
    vocab,
    hidden,
    block,
    # outputs
    y: "*fp16",
    CODES: tl.constexpr,
    STEP: tl.constexpr,
):
    """Rows `ids` of a matrix [vocab, hidden], clamped to it. Grid [ids, cdiv(hidden, STEP)]."""
    if has_matrix(table, matrix):
        row = tl.load(ids + tl.program_id(0))
        before = tl.minimum(tl.maximum(row, 0), vocab - 1)
        first = tl.program_id(1) * STEP
        k = first + tl.arange(0, STEP)
        is_out = tl.full([1], 1, tl.int1)
        own = find_matrix(table, matrix)
        found = read_weights(own, before, is_out, first, (hidden, block), CODES, 1, STEP)
        at = y + tl.program_id(0) * hidden + k[None, :]
        tl.store(at, found, mask=(k < hidden)[None, :])


@triton.jit
def head_rows(
    # inputs
    x: "*fp16",
    table: "*i64",
    # shape
    matrix,
    num_rows,
    vocab,
    hidden,
    block,
    # outputs
    y: "*fp32",
    CODES: tl.constexpr,
    FEW: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    STEP: tl.constexpr,
):
    """Logits of x [num_rows, hidden], float32 [num_rows, vocab].

    Grid [cdiv(num_rows, ROWS), cdiv(vocab, OUT)]. FEW rows are one tile, more are tiles of ROWS.
    Programs of equal outputs follow one another, so that they find weights in the cache.
    """
    if has_matrix(table, matrix):
        own = find_matrix(table, matrix), num_rows * 0, tl.program_id(1) * OUT
        sizes = hidden, vocab, block
        if num_rows <= FEW:
            _head_tile(x, y, num_rows, own, sizes, CODES, FEW, OUT, STEP)
        else:
            _head_tile(x, y, num_rows, own, sizes, CODES, ROWS, OUT, STEP)


@triton.jit
def _head_tile(
    x,
    y,
    num_rows,
    own,
    sizes,
    CODES: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    STEP: tl.constexpr,
):
    """Logits of ROWS rows and OUT outputs."""
    _, _, first = own
    _, vocab, _ = sizes
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = first + tl.arange(0, OUT)
    found = multiply(x, row, row < num_rows, own, sizes, CODES, ROWS, OUT, STEP)
    mask = (row < num_rows)[:, None] & (n < vocab)[None, :]
    tl.store(y + row[:, None] * vocab + n[None, :], found, mask=mask)
