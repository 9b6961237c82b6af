"""Edgellm's compiled kernels on a device, against what numpy makes of the same numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from kernel_references import REFERENCES

from edgellm.device_runtime.kernels.triton import catalog
from edgellm.device_runtime.kernels.triton.catalog import Variant
from edgellm.device_runtime.runners.tensorrt.device import ALIGNMENT, Device

_TOP_K, _LEVELS, _NODES = 10, 3, 60
_REPEATS = 10


def check_kernels(device: Device, vocab_size: int = 128256) -> dict[str, float]:
    """Those of a round of EAGLE; GB/s of the one that reads most, and microseconds of the others.

    Raises:
        AssertionError: numbers differ.
        EdgeLLMError: there is no kernel for the device.
    """
    random, found = np.random.default_rng(0), {}
    for scored in catalog.SCORES:
        pool = _check_growth(device, random, scored, found)
    tree = [
        np.zeros(_NODES, np.int64),
        np.zeros(_NODES, np.int64),
        np.zeros(_NODES, np.float32),
        np.zeros(_NODES, np.int32),
    ]
    count, start = 1 + _TOP_K + (_LEVELS - 1) * _TOP_K**2, np.array([5, 7, 0, _NODES, 3])
    tokens, parents, *_ = _run(
        device, catalog.select_tree(512), [*pool, start, count, _NODES - 1, count, *tree], found
    )[-4:]
    laid_out = [
        np.zeros((1, _NODES), np.int64),
        np.zeros(1, np.int64),
        np.zeros((_NODES, _NODES), np.int8),
    ]
    _run(device, catalog.lay_out(64), [parents, start, _NODES, 1, 0, *laid_out], found)
    outcome = [np.zeros(_NODES, np.int32), np.zeros(3, np.int32)]
    likeliest = random.choice(tokens, _NODES)
    highest = random.random(_NODES).astype(np.float32)
    greedy = [tokens, parents, likeliest, highest, 1, _NODES, *outcome]
    _run(device, catalog.accept_greedy(64), greedy, found)
    values, ids = _check_picks(device, random, vocab_size, found)
    rules, uniforms = np.array([0.8, 20, 0.9, 0.0]), random.random(_NODES)
    sampled = [tokens, parents, values, ids, rules, uniforms, 1, _NODES, vocab_size, *outcome]
    _run(device, catalog.accept_sampled(64), sampled, found)
    return found


def _check_growth(
    device: Device, random: np.random.Generator, scored: str, found: dict[str, float]
) -> list[np.ndarray]:
    """Three levels; the pool: tokens, parents, scores and logarithms."""
    size, slots = 1 + _TOP_K + (_LEVELS - 1) * _TOP_K**2, 1 + _LEVELS * _TOP_K
    pool = [
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
        np.zeros(size),
        np.zeros(size, np.float32),
    ]
    pool[1][0], seen = -1, np.zeros((slots, slots), np.int8)
    seen[0, 0] = 1
    table = np.concatenate([np.sort(random.random(11)), np.sort(-random.random(11))])
    if scored == "places":
        table = -random.random(size)
    nodes, begin, rows = np.zeros(1, np.int32), 1, 1
    for level in range(_LEVELS):
        shape, used = (rows, _TOP_K), level * _TOP_K
        candidates = random.integers(0, 1000, shape), -random.random(shape).astype(np.float32)
        of_level = [np.zeros(_TOP_K, kind) for kind in (np.int32, np.int64, np.int32, np.int64)]
        mask = np.zeros((_TOP_K, used + _TOP_K), np.int8)
        left = _run(device, catalog.grow_level(128, scored), [
            *candidates, nodes, np.array([40, 43, 0, _LEVELS, 3]), table, *pool, seen, _TOP_K,
            begin, rows, _TOP_K, used, _TOP_K, slots, level, 1, size, 0, *of_level,
            np.zeros(1, np.int64), mask,
        ], found)  # fmt: skip
        pool, seen, nodes = left[5:9], left[9], left[10]
        begin, rows = begin + rows * _TOP_K, _TOP_K
    return pool


def _check_picks(
    device: Device, random: np.random.Generator, vocab_size: int, found: dict[str, float]
) -> tuple[np.ndarray, np.ndarray]:
    logits = np.round(random.normal(size=(_NODES, vocab_size)) * 3, 2).astype(np.float32)
    shares, picks = -(-vocab_size // catalog.SHARE), catalog.PICKS
    keys = np.zeros((_NODES, shares, picks), np.int64)
    sums = np.zeros((_NODES, shares, 2), np.float32)
    arguments = [logits, vocab_size, keys, sums]
    left = _run(device, catalog.PICK_SHARES, arguments, found, (_NODES, shares, 1))
    found["pick_shares_gb_per_s"] = logits.nbytes / found["pick_shares_us"] / 1e3
    picked = [
        np.zeros((_NODES, picks), np.float32),
        np.zeros((_NODES, picks), np.int32),
        np.zeros(_NODES, np.int64),
        np.zeros(_NODES, np.float32),
    ]
    arguments = [*left[1:], vocab_size, shares, *picked]
    values, ids, *_ = _run(device, catalog.JOIN_PICKS, arguments, found, (_NODES, 1, 1))[-4:]
    return values, ids


def _run(
    device: Device,
    kernel: Variant,
    arguments: Sequence[Any],
    found: dict[str, float],
    grid: tuple[int, int, int] = (1, 1, 1),
) -> list[np.ndarray]:
    """What a kernel leaves in its arrays, which is what its reference leaves; notes its time."""
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
    start = time.perf_counter()
    for _ in range(_REPEATS):
        device.launch(kernel, grid, given)
    device.synchronize()
    found[f"{name}_us"] = (time.perf_counter() - start) / _REPEATS * 1e6
    return left
