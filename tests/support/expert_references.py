"""Mixtures of experts as the GPU kernels compute them, in NumPy: expert by expert, in float64.

Weights are found by their table; `constants["memory"]` is as in `attention_references`.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

_MAGIC, _HEADER, _ADDRESSES = 0x656467656C6C6D, 2, 4
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def has_matrix(table, matrix):
    """Whether the table is valid."""
    count, magic = table[:_HEADER].tolist()
    return count ^ _MAGIC == magic and matrix < count


def read_matrix(table, matrix, expert, sizes, constants):
    """Weights [out, in] and biases [out] of an expert."""
    width, out, block = sizes
    at = _HEADER + matrix * _ADDRESSES
    places, count = table[at : at + _ADDRESSES].tolist(), out * width

    def read(part, numbers, dtype):
        size = np.dtype(dtype).itemsize
        return constants["memory"](places[part] + expert * numbers * size, numbers, dtype)

    bias = read(3, out, np.float16) if places[3] else np.zeros(out)
    codes = constants["CODES"]
    if codes == "fp16":
        return read(0, count, np.float16).reshape(out, width), bias
    if codes in ("int4", "fp4"):
        pairs = read(0, count // 2, np.uint8)
        found = np.stack([pairs & 15, pairs >> 4], -1).reshape(out, width)
        doubled = 2 * np.concatenate([_E2M1, -_E2M1])
        values = found - 8.0 if codes == "int4" else doubled[found]
    else:
        dtype = np.int8 if codes == "int8" else ml_dtypes.float8_e4m3fn
        values = read(0, count, np.uint8).view(dtype).reshape(out, width).astype(np.float64)
    factors = [
        read(part, count // block, np.float16).reshape(out, -1).repeat(block, 1).astype(np.float64)
        if places[part]
        else 0
        for part in (1, 2)
    ]
    return values * factors[0] + factors[1], bias


def _products(rows, matrix):
    weights, biases = matrix
    return rows.astype(np.float64) @ weights.astype(np.float64).T + biases


def _chosen(table, matrix, order, begins, constants):
    """Places, pairs and number of each expert that a row chose; none if the table is invalid."""
    for expert in range(constants["grid"][0] if has_matrix(table, matrix) else 0):
        places = slice(begins[expert], begins[expert + 1])
        if places.start < places.stop:
            yield places, order[places], expert


def route_rows(logits, offsets, bias, factors, experts, top_k, *facts_and_outputs, constants):
    offset, capped, sigmoid, biased, normalized, weighted = facts_and_outputs[:6]
    numbers = np.array(facts_and_outputs[6:10], np.int32).view(np.float32)
    (cap, smallest_sum, added, scale), (ids, shares) = numbers, facts_and_outputs[10:]
    rows = constants["grid"][0]
    assert experts <= constants["EXPERTS"]
    assert top_k <= constants["CHOSEN"]
    x = logits[: rows * experts].reshape(rows, experts)
    x = x + offsets[:experts] if offset else x
    x = np.tanh(x / cap) * cap if capped else x
    with np.errstate(over="ignore"):
        share = 1 / (1 + np.exp(-x))
    if not sigmoid:
        share = np.exp(x - x.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
    rank = share + bias[:experts] if biased else share
    chosen = np.argsort(-rank, axis=-1, kind="stable")[:, :top_k]
    taken = np.take_along_axis(share, chosen, -1)
    if normalized:
        taken = taken / (np.maximum(taken.sum(-1, keepdims=True), smallest_sum) + added)
    taken = (taken * scale).astype(np.float16)
    ids[: rows * top_k] = chosen.reshape(-1)
    each = taken * factors[chosen].astype(np.float16) if weighted else taken
    shares[: rows * top_k] = each.reshape(-1)


def group_rows(ids, num_pairs, order, begins, *, constants):
    own = ids[:num_pairs]
    order[:num_pairs] = np.argsort(own, kind="stable")
    experts = np.arange(constants["grid"][0])
    begins[: len(experts)] = np.searchsorted(np.sort(own), experts)


def expert_gates(
    x, order, begins, table, matrix, hidden, inner, block, top_k, *bits_and_y, constants
):
    *bits, y = bits_and_y
    assert constants["grid"][1] * constants["OUT"] >= inner
    alpha, limit, offset, cubic = np.array(bits, np.int32).view(np.float32).astype(np.float64)
    sizes = hidden, inner, block
    out = y[: y.size // inner * inner].reshape(-1, inner)
    rows = x[: x.size // hidden * hidden].reshape(-1, hidden)
    for places, pairs, expert in _chosen(table, matrix, order, begins, constants):
        gate, up = (
            _products(rows[pairs // top_k], read_matrix(table, at, expert, sizes, constants))
            for at in (matrix, matrix + 1)
        )
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        with np.errstate(over="ignore"):
            gate = gate / (1 + np.exp(-gate * (alpha + cubic * gate**2)))
        out[places] = gate * (up + offset)


def expert_downs(x, shares, order, begins, table, matrix, hidden, inner, block, y, *, constants):
    assert constants["grid"][1] * constants["OUT"] >= hidden
    sizes = inner, hidden, block
    out = y[: y.size // hidden * hidden].reshape(-1, hidden)
    rows = x[: x.size // inner * inner].reshape(-1, inner)
    for places, pairs, expert in _chosen(table, matrix, order, begins, constants):
        found = _products(rows[places], read_matrix(table, matrix, expert, sizes, constants))
        out[pairs] = found * shares[pairs, None].astype(np.float64)


def sum_experts(parts, hidden, top_k, y, *, constants):
    rows = constants["grid"][0]
    assert constants["grid"][1] * constants["BLOCK"] >= hidden
    found = parts[: rows * top_k * hidden].reshape(rows, top_k, hidden).astype(np.float32)
    y[: rows * hidden] = found.sum(1).reshape(-1)
