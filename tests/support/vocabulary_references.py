"""Embeddings and heads as the GPU kernels compute them, in NumPy; see `expert_references`."""

from __future__ import annotations

import numpy as np
from expert_references import has_matrix, read_matrix


def look_up_rows(ids, table, matrix, vocab, hidden, block, y, *, constants):
    count, tiles, _ = constants["grid"]
    assert tiles * constants["STEP"] >= hidden
    if has_matrix(table, matrix):
        rows, _ = read_matrix(table, matrix, 0, (hidden, vocab, block), constants)
        y[: count * hidden] = rows[np.clip(ids[:count], 0, vocab - 1)].reshape(-1)


def head_rows(x, table, matrix, num_rows, vocab, hidden, block, y, *, constants):
    tiles, parts, _ = constants["grid"]
    assert tiles * constants["ROWS"] >= num_rows
    assert parts * constants["OUT"] >= vocab
    if has_matrix(table, matrix):
        weights, _ = read_matrix(table, matrix, 0, (hidden, vocab, block), constants)
        rows = x[: num_rows * hidden].reshape(num_rows, hidden).astype(np.float64)
        y[: num_rows * vocab] = (rows @ weights.astype(np.float64).T).reshape(-1)
