"""edgellm's compiled kernels on a device, against numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from kernel_references import FIELDS, REFERENCES

from edgellm.device_runtime.kernels.triton import catalog
from edgellm.device_runtime.kernels.triton.catalog import Variant
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import ALIGNMENT, Device
from harness.gpu.device import seconds_of

_TOP_K, _LEVELS, _NODES = 10, 3, 60
_POOL = 1 + _TOP_K + (_LEVELS - 1) * _TOP_K**2
_SEVERAL = 1, 2, 4  # sequences of a batch


def check_kernels(device: Device, vocab_size: int = 128256) -> dict[str, float]:
    """Check the kernels of EAGLE rounds; return GB/s of the largest, microseconds of the others.

    Raises:
        AssertionError: results differ.
        EdgeLLMError: there is no kernel for the device.
    """
    random, found = np.random.default_rng(0), {}
    picks = _check_picks(device, random, vocab_size, found)
    for several in _SEVERAL:
        times: dict[str, float] = {}
        for scored in catalog.SCORES:
            pool = _check_growth(device, random, scored, several, times)
        trees = _check_trees(device, pool, several, times)
        _check_acceptance(device, random, trees, picks, vocab_size, times)
        of = f"_of_{several}" if several > 1 else ""
        found |= {f"{name}{of}_us": us for name, us in times.items()}
    return found


def _check_growth(
    device: Device, random: np.random.Generator, scored: str, several: int, times: dict[str, float]
) -> list[np.ndarray]:
    """Check three levels of each sequence; return pools: tokens, parents, scores, logarithms."""
    size, slots = _POOL, 1 + _LEVELS * _TOP_K
    pool = [np.zeros((several, size), kind) for kind in (np.int64, np.int64, float, np.float32)]
    pool[1][:, 0], seen = -1, np.zeros((several, slots, slots), np.int8)
    seen[:, 0, 0] = 1
    curves = random.random((several, 11)), -random.random((several, 11))
    table = np.concatenate([np.sort(each, axis=1) for each in curves], axis=1)
    if scored == "places":
        table = -np.sort(random.random(size))  # no child is better than its parent
    nodes, begin, rows = np.zeros((several, 1), np.int32), 1, 1
    for level in range(_LEVELS):
        shape, used = (several, rows, _TOP_K), level * _TOP_K
        candidates = random.integers(0, 1000, shape), -random.random(shape).astype(np.float32)
        kinds = np.int32, np.int64, np.int32, np.int64
        of_level = [np.zeros((several, _TOP_K), kind) for kind in kinds]
        slot, many = _seats(several)
        mask = np.zeros((several, _TOP_K, used + _TOP_K), np.int8)
        left = _run(device, catalog.grow_level(128, scored), [
            *candidates, nodes, _starts(several, _LEVELS), table, *pool, seen, _TOP_K,
            begin, rows, _TOP_K, used, _TOP_K, slots, level, 1, size, many, *of_level, slot, mask,
        ], times, (several, 1, 1))  # fmt: skip
        pool, seen, nodes = left[5:9], left[9], left[10]
        begin, rows = begin + rows * _TOP_K, _TOP_K
    return pool


def _starts(several: int, largest: int) -> np.ndarray:
    """Return starts of rounds for trees of decreasing size; the fourth has no sequence."""
    at = np.arange(several)
    sizes = np.where(at < _LEVELS, np.maximum(largest - at, 1), 0)
    return np.stack([40 + 9 * at, 43 + 7 * at, 100 * at, sizes, 3 + at], axis=1)


def _seats(several: int) -> tuple[np.ndarray, int]:
    """What a kernel says of the rows of a pass, and the sequences that it has room for."""
    if several == 1:
        return np.zeros(1, np.int64), 0
    return np.full((catalog.SEQUENCES, FIELDS), -1), catalog.SEQUENCES


def _check_trees(
    device: Device, pool: list[np.ndarray], several: int, times: dict[str, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the trees of pools: tokens and parents [B, N]."""
    start, grid = _starts(several, _NODES), (several, 1, 1)
    kinds = np.int64, np.int64, np.float32, np.int32
    tree = [np.zeros((several, _NODES), kind) for kind in kinds]
    sizes = _POOL, _NODES - 1, _POOL
    left = _run(device, catalog.select_tree(512), [*pool, start, *sizes, *tree], times, grid)
    tokens, parents = left[-4:-2]
    slot, many = _seats(several)
    positions = np.zeros((1, several, _NODES), np.int64)
    mask = np.zeros((several, _NODES, _NODES), np.int8)
    laid_out = [parents, start, _NODES, 1, many, positions, slot, mask]
    _run(device, catalog.lay_out(64), laid_out, times, grid)
    return tokens, parents


def _check_acceptance(
    device: Device,
    random: np.random.Generator,
    trees: tuple[np.ndarray, np.ndarray],
    picks: tuple[np.ndarray, np.ndarray],
    vocab_size: int,
    times: dict[str, float],
) -> None:
    """Of trees, greedily and by what was picked of rows of logits."""
    several, grid = len(trees[0]), (len(trees[0]), 1, 1)
    outcome = [np.zeros((several, _NODES), np.int32), np.zeros((several, 3), np.int32)]
    likeliest = random.permuted(trees[0], axis=1)
    np.put_along_axis(likeliest, trees[1], trees[0], axis=1)  # of a child, if any
    highest = random.random((several, _NODES)).astype(np.float32)
    greedy = [*trees, likeliest, highest, several, _NODES, *outcome]
    _run(device, catalog.accept_greedy(64), greedy, times, grid)
    rows = np.concatenate([random.permutation(_NODES) for _ in range(several)])
    rules, uniforms = np.tile([0.8, 20, 0.9, 0.0], (several, 1)), random.random(several * _NODES)
    drawn = [each[rows] for each in picks]
    sampled = [*trees, *drawn, rules, uniforms, several, _NODES, vocab_size, *outcome]
    _run(device, catalog.accept_sampled(64), sampled, times, grid)


def _check_picks(
    device: Device, random: np.random.Generator, vocab_size: int, found: dict[str, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Of rows of logits: what was picked, [N, PICKS], and which numbers of the row these are."""
    logits = np.round(random.normal(size=(_NODES, vocab_size)) * 3, 2).astype(np.float32)
    shares, picks = -(-vocab_size // catalog.SHARE), catalog.PICKS
    keys = np.zeros((_NODES, shares, picks), np.int64)
    sums = np.zeros((_NODES, shares, 2), np.float32)
    arguments = [logits, vocab_size, keys, sums]
    times: dict[str, float] = {}
    left = _run(device, catalog.PICK_SHARES, arguments, times, (_NODES, shares, 1))
    found["pick_shares_gb_per_s"] = logits.nbytes / times["pick_shares"] / 1e3
    picked = [
        np.zeros((_NODES, picks), np.float32),
        np.zeros((_NODES, picks), np.int32),
        np.zeros(_NODES, np.int64),
        np.zeros(_NODES, np.float32),
    ]
    arguments = [*left[1:], vocab_size, shares, *picked]
    values, ids, *_ = _run(device, catalog.JOIN_PICKS, arguments, times, (_NODES, 1, 1))[-4:]
    found |= {f"{name}_us": us for name, us in times.items()}
    return values, ids


def _run(
    device: Device,
    kernel: Variant,
    arguments: Sequence[Any],
    times: dict[str, float],
    grid: tuple[int, int, int],
) -> list[np.ndarray]:
    """Compare a kernel's output with its reference's; record microseconds."""
    arrays = [each for each in arguments if isinstance(each, np.ndarray)]
    sizes = [-(-each.nbytes // ALIGNMENT) * ALIGNMENT for each in arrays]
    places = np.cumsum([0, *sizes])
    memory, host = device.allocate(int(places[-1])), device.pinned(int(places[-1]))
    for at, each in zip(places.tolist(), arrays, strict=False):
        host[at : at + each.nbytes] = np.ascontiguousarray(each).reshape(-1).view(np.uint8)
    addresses = iter((memory.address + places[:-1]).tolist())
    given = [next(addresses) if isinstance(each, np.ndarray) else int(each) for each in arguments]
    device.upload(memory.address, host)
    device.launch(kernel, grid, given)
    device.download(host, memory.address)
    device.synchronize()
    left = [
        host[at : at + each.nbytes].copy().view(each.dtype).reshape(each.shape)
        for at, each in zip(places.tolist(), arrays, strict=False)
    ]
    name = kernel.kernel.name
    copies = [
        each.copy().reshape(-1) if isinstance(each, np.ndarray) else each for each in arguments
    ]
    REFERENCES[name](*copies, constants={**kernel.constants, "grid": grid})
    expected = [each for each in copies if isinstance(each, np.ndarray)]
    for one, other in zip(left, expected, strict=True):
        np.testing.assert_allclose(one.reshape(-1), other, rtol=1e-5, err_msg=name)
    times[name] = seconds_of(device, lambda: device.launch(kernel, grid, given)) * 1e6
    return left
