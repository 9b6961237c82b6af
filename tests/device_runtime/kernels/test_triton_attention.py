"""RoPE, the quantized cache, attention and compaction against float64; attention is torch's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from attention_references import host_memory
from interpreted import launch
from kernel_references import REFERENCES

from edgellm.device_runtime.kernels.triton import (
    attention,
    cache,
    catalog,
    compaction,
    prompt_attention,
)
from edgellm.device_runtime.runners.tensorrt.kernel_cache import MAGIC
from edgellm.device_runtime.runners.tensorrt.library.attention_nodes import (
    MAX_SHARES,
    PARTIAL_ROWS,
)
from edgellm.device_runtime.runners.tensorrt.ragged_batch import SHAPE

LAYERS, LAYER, BLOCK = 2, 1, 32
LARGEST = {"int8": 127.0, "fp8": 448.0}
NUMBERS = SimpleNamespace(max=max, min=min, cdiv=lambda a, b: -(-a // b))
# Of the largest error of an output: fp16 rounds weights and results, the others rows as well.
TOLERANCE = {"fp16": 4e-3, "int8": 3e-2, "fp8": 1.2e-1}


@dataclass
class Case:
    """Sizes of a forward pass, and options of the model."""

    rows: int
    index: int
    heads: int
    kv_heads: int
    dim: int = 64
    capacity: int = 128
    columns: int = 0  # of the tree; 0: as many as rows
    codes: str = "fp16"
    window: int = 0
    cap: float = 0.0
    sinks: bool = False
    shares: int = 4
    own_tables: bool = False
    seed: int = 0


class Cache:
    """K and V of `LAYERS` layers full of earlier positions, and their block table."""

    def __init__(self, case: Case, random: np.random.Generator) -> None:
        shape = LAYERS, 2, case.kv_heads, case.capacity, case.dim
        self.codes_name = case.codes
        values = random.standard_normal(shape).astype(np.float16)
        self.codes, self.scales = self.encode(values)
        self.write_table(case.capacity)

    def write_table(self, capacity: int) -> None:
        addresses = [
            (self.codes[layer, part].ctypes.data, self.scales[layer, part].ctypes.data)
            for layer in range(LAYERS)
            for part in range(2)
        ]
        entries = [capacity, capacity ^ cache.MAGIC.value]
        for k, v in zip(addresses[::2], addresses[1::2], strict=True):
            entries += [k[0], v[0], k[1], v[1]]
        self.table = np.array(entries, np.int64)

    def encode(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.codes_name == "fp16":
            return values.copy(), np.zeros(values.shape[:-1], np.float16)
        largest = LARGEST[self.codes_name]
        scales = (np.abs(values.astype(np.float32)).max(-1) / largest).astype(np.float16)
        exact = values.astype(np.float32) / scales[..., None].astype(np.float32)
        if self.codes_name == "int8":
            return np.floor(exact + 0.5).astype(np.int8), scales
        rounded = exact.clip(-largest, largest).astype(ml_dtypes.float8_e4m3fn)
        return rounded.view(np.int8), scales

    def values(self) -> np.ndarray:
        """float64 [layers, 2, kv_heads, C, D]."""
        if self.codes_name == "fp16":
            return self.codes.astype(np.float64)
        is_fp8 = self.codes_name == "fp8"
        codes = self.codes.view(ml_dtypes.float8_e4m3fn) if is_fp8 else self.codes
        return codes.astype(np.float64) * self.scales[..., None].astype(np.float64)


class Pass:
    """Inputs of one forward pass."""

    many = 0  # entries of a table of sequences; 0: a single sequence
    surplus = 0  # programs without rows

    def __init__(self, case: Case) -> None:
        random = np.random.default_rng(case.seed)
        self.case, half = case, case.dim // 2
        rows = case.rows
        self.q, self.k, self.v = (
            random.standard_normal((rows, heads, case.dim)).astype(np.float16)
            for heads in (case.heads, case.kv_heads, case.kv_heads)
        )
        self.positions = case.index + np.minimum(np.arange(rows), 5).astype(np.int64)
        places = random.integers(0, 99, rows) if case.own_tables else np.arange(case.capacity)
        angles = places[:, None] * 10000.0 ** (-np.arange(half) / half)
        self.cos, self.sin = np.cos(angles).astype(np.float16), np.sin(angles).astype(np.float16)
        columns = case.columns or rows
        self.tree = (random.random((rows, columns)) < 0.4).astype(np.int8)
        self.tree[np.arange(rows), columns - rows + np.arange(rows)] = 1
        self.index = np.array([case.index])
        self.sinks = random.standard_normal(case.heads).astype(np.float32)
        self.cache = Cache(case, random)

    def run(self, launch: Callable[..., None] = launch) -> np.ndarray:
        """Output [S, H, D] of the kernels or of their reference."""
        case, rows = self.case, self.case.rows
        group, several = case.heads // case.kv_heads, 8 if self.many else 0
        rotated, y = np.zeros_like(self.q), np.zeros_like(self.q)
        shape = case.shares, rows, case.heads
        parts = np.full((*shape, case.dim), np.nan, np.float32)
        stats = np.full((*shape, 2), np.nan, np.float32)
        launch(
            attention.store_rows, (rows, case.heads + case.kv_heads), self.q, self.k, self.v,
            self.cos, self.sin, self.positions, self.index, self.cache.table, LAYER, case.heads,
            case.kv_heads, int(case.own_tables), case.dim, rotated, D=catalog.tile(case.dim),
            CODES=case.codes, MANY=self.many,
        )  # fmt: skip
        given = rotated, self.tree, self.positions, self.index, self.cache.table
        cap_bits = int(np.float32(case.cap).view(np.int32))
        rules = case.window, cap_bits, several, case.dim
        sizes = LAYER, rows, self.tree.shape[1], group, *rules
        own, extra = {"BLOCK": BLOCK}, several + self.surplus
        variant = catalog.attend(case.dim, case.codes)
        blocks = catalog.attend_tiles(NUMBERS, rows, group) + extra
        launch(
            attention.attend, (case.kv_heads, blocks, case.shares), *given, *sizes, parts, stats,
            **{**variant.constants, **own},
        )  # fmt: skip
        variant = catalog.finish(case.dim, case.codes)
        blocks = catalog.finish_tiles(NUMBERS, rows, group) + extra
        launch(
            prompt_attention.finish, (case.kv_heads, blocks, -(-case.dim // 128)), *given, parts,
            stats, self.sinks, *sizes, case.shares, int(case.sinks), y,
            **{**variant.constants, **own},
        )  # fmt: skip
        return y

    def rotated(self, x: np.ndarray) -> np.ndarray:
        """RoPE by its definition, float64."""
        rows = np.arange(self.case.rows) if self.case.own_tables else self.positions
        c, s = (table[rows][:, None].astype(np.float64) for table in (self.cos, self.sin))
        a, b = np.split(x.astype(np.float64), 2, -1)
        return np.concatenate([a * c - b * s, b * c + a * s], -1)

    def visible(self) -> np.ndarray:
        """Live slots to which each row attends, bool [S, live]."""
        case, (rows, columns) = self.case, self.tree.shape
        live = case.index + rows
        seen = np.ones((rows, live), bool)
        seen[:, live - columns :] = self.tree
        if case.window:
            places = np.arange(live)
            places[live - rows :] = self.positions
            seen &= places[None] > self.positions[:, None] - case.window
        return seen

    def expected(self, before: np.ndarray) -> np.ndarray:
        """float64 [S, H, D]; `before`: values of the cache before the pass."""
        case = self.case
        keys, values = before[LAYER].copy()
        new = slice(case.index, case.index + case.rows)
        keys[:, new] = self.rotated(self.k).transpose(1, 0, 2)
        values[:, new] = self.v.transpose(1, 0, 2)
        q, group = self.rotated(self.q).transpose(1, 0, 2), case.heads // case.kv_heads
        keys, values = (
            np.pad(each[:, : new.stop].repeat(group, 0), ((0, 0), (0, 1), (0, 0)))
            for each in (keys, values)
        )
        bias = np.where(self.visible(), 0.0, -np.inf)[None].repeat(case.heads, 0)
        if case.cap:
            scores = q @ keys[:, :-1].transpose(0, 2, 1) / case.dim**0.5
            bias, q = bias + case.cap * np.tanh(scores / case.cap), np.zeros_like(q)
        sinks = self.sinks[:, None, None] if case.sinks else np.array(-np.inf)
        # A sink is a slot after the others, whose key and value are zeros.
        bias = np.concatenate([bias, np.broadcast_to(sinks, (*bias.shape[:2], 1))], 2)
        given = (torch.from_numpy(each) for each in (q, keys, values, bias))
        return torch.nn.functional.scaled_dot_product_attention(*given).numpy().transpose(1, 0, 2)


CASES = {
    "first token": Case(1, 0, 14, 2),
    "one token": Case(1, 77, 14, 2, dim=80),
    "older tree slots": Case(5, 60, 4, 2, dim=112, columns=9),
    "many rows": Case(20, 37, 4, 1, dim=128, shares=2),
    "a full cache": Case(8, 120, 4, 2, dim=96, shares=8),
    "a window": Case(7, 90, 4, 2, window=20),
    "a window within the tree": Case(9, 70, 4, 2, dim=128, window=3),
    "capped": Case(5, 50, 4, 2, cap=1.5),
    "sinks": Case(5, 50, 4, 2, dim=16, sinks=True),
    "all": Case(6, 60, 4, 1, dim=256, window=30, cap=3.0, sinks=True),
    "rows' own angles": Case(6, 60, 4, 1, own_tables=True),
    "a prompt": Case(129, 20, 2, 1, dim=128, capacity=160),
    "a prompt in windows": Case(130, 9, 1, 1, dim=80, capacity=160, window=10, cap=2.0),
    "a prompt with sinks": Case(128, 30, 2, 1, capacity=160, window=16, sinks=True),
    "a prompt of wide heads": Case(128, 5, 1, 1, dim=256, capacity=140, columns=131),
}
PROMPTS = [name for name, case in CASES.items() if case.rows >= catalog.PROMPT_TOKENS]
CODED = ("one token", "older tree slots", "all", "a prompt with sinks")
RUNS = [(name, "fp16") for name in CASES] + [(n, c) for n in CODED for c in ("int8", "fp8")]


def test_the_cases_have_every_kernel():
    """Of each tile, for few rows and for prompts."""
    for few in (True, False):
        cases = (case for name, case in CASES.items() if (name in PROMPTS) != few)
        assert {catalog.tile(case.dim) for case in cases} == {*catalog.TILES}


def by_reference(kernel, grid, *arguments, **constants) -> None:
    """Run the reference that the fake GPU runs."""
    flat = [each.reshape(-1) if isinstance(each, np.ndarray) else each for each in arguments]
    facts = {**constants, "grid": (*grid, 1)[:3], "memory": host_memory}
    REFERENCES[kernel.__name__](*flat, constants=facts)


@pytest.mark.each_change(
    "a window within the tree-fp16",
    "sinks-fp16",
    "capped-fp16",
    "older tree slots-fp8",
    "older tree slots-int8",
    "rows' own angles-fp16",
    "one token-int8",
    "one token-fp8",
    "a prompt with sinks-fp16",
)
@pytest.mark.parametrize(("name", "codes"), RUNS)
def test_attention_equals_float64(name, codes):
    case = dataclasses.replace(CASES[name], codes=codes)
    one = Pass(case)
    before = one.cache.values()
    stored = one.cache.codes.copy()
    y = one.run()
    assert np.abs(y - one.expected(before)).max() < TOLERANCE[codes]
    other = Pass(case)
    assert np.abs(other.run(by_reference) - y).max() < TOLERANCE["fp16"]
    np.testing.assert_array_equal(other.cache.values(), one.cache.values())
    new = slice(case.index, case.index + case.rows)
    changed = np.any(one.cache.codes != stored, axis=-1)
    assert changed[LAYER, :, :, new].all()
    changed[LAYER, :, :, new] = False
    assert not changed.any()  # other slots and layers


def _image(rows: int) -> np.ndarray:
    """A prompt's mask whose rows 20 to 59 are an image: they attend to each other."""
    mask = np.tri(rows, dtype=np.int8)
    mask[20:60, 20:60] = 1
    return mask


@pytest.mark.parametrize(
    "kind",
    [
        "text",
        "image",
        "window",
        pytest.param("many", marks=pytest.mark.nightly),
        pytest.param("many images", marks=pytest.mark.nightly),
    ],
)
def test_prompts_read_no_block_that_no_row_attends_to(monkeypatch, kind):
    """Nothing above the diagonal, nothing before the window; the values are those of the whole.

    Tiles have 64 query rows, which two query heads share. Programs without a tile read nothing.
    """
    case = Case(132, 9, 2, 1, shares=1, capacity=160, window=40 if kind == "window" else 0)
    blocks, decode = [], cache.decode
    monkeypatch.setattr(Pass, "surplus", 3)
    one, steps = Pass(case), catalog.PROMPT_ROWS * case.kv_heads // case.heads
    one.tree[:] = _image(case.rows) if "image" in kind else np.tri(case.rows, dtype=np.int8)
    if case.window:
        one.positions[:] = case.index + np.arange(case.rows)
    seen, before = one.visible(), one.cache.values()
    given = SharedPass([one], 0 if kind == "many" else -1) if "many" in kind else one
    monkeypatch.setattr(attention, "decode", lambda *each: (blocks.append(1), decode(*each))[1])
    y = given.run()[: case.rows]
    expected = one.expected(before)
    assert np.abs(y - expected).max() < TOLERANCE["fp16"] * np.abs(expected).max()
    live = case.index + case.rows
    found = [part.any(0).nonzero()[0] for part in np.split(seen, range(steps, case.rows, steps))]
    wanted = [int(each[-1]) // BLOCK + 1 - int(each[0]) // BLOCK for each in found]
    # What lies less than a block before the end is read.
    most = [
        -(-live // BLOCK) - int(each[0]) // BLOCK if live - each[-1] <= BLOCK else count
        for each, count in zip(found, wanted, strict=True)
    ]
    assert 2 * sum(wanted) <= len(blocks) <= 2 * sum(most) < 2 * len(found) * -(-live // BLOCK)


class SharedPass(Pass):
    """Passes of several sequences in one batch, with one cache for all, in their order."""

    many = catalog.SEQUENCES

    def __init__(self, passes: list[Pass], causal: int) -> None:
        """Join the passes; `causal` has no mask, and one row of padding is last."""
        first, columns = passes[0], max(one.tree.shape[1] for one in passes)
        rows = [one.case.rows for one in passes]
        self.passes, self.rows = passes, rows
        self.case = dataclasses.replace(first.case, rows=sum(rows) + 1)
        self.q, self.k, self.v = (
            np.concatenate([*(getattr(one, name) for one in passes), getattr(first, name)[:1]])
            for name in ("q", "k", "v")
        )
        self.positions = np.concatenate([*(one.positions for one in passes), [0]])
        self.cos, self.sin, self.sinks = first.cos, first.sin, first.sinks
        self.tree = np.ones((self.case.rows, columns), np.int8)
        self.index = np.zeros((self.many, cache.FIELDS.value), np.int64)
        for at, (one, begin) in enumerate(zip(passes, self.begins, strict=True)):
            wide = 0 if at == causal else one.tree.shape[1]
            self.tree[begin : begin + rows[at], :wide] = one.tree[:, :wide]
            # Not in the order of the table, which has gaps
            entry = begin, rows[at], at * one.case.capacity, one.case.index, wide
            self.index[(3 * at + 2) % self.many] = entry
        self.cache = Cache(dataclasses.replace(first.case, capacity=0), np.random.default_rng(0))
        capacity = sum(one.case.capacity for one in passes)
        self.cache.codes, self.cache.scales = (
            np.concatenate([getattr(one.cache, name) for one in passes], axis=3)
            for name in ("codes", "scales")
        )
        self.cache.write_table(capacity)

    @property
    def begins(self) -> list[int]:
        return np.cumsum([0, *self.rows[:-1]]).tolist()


# Rows of sequences that share a pass, rows before, columns of the mask; the last has none.
MIXED = (2, 30, 3), (1, 9, 0), (9, 3, 0)
PROMPTS_OF_BATCH = (129, 3, 0), (128, 9, 0)  # each a prompt alone, too


@pytest.mark.each_change("fp16-kind0-sequences0")
@pytest.mark.parametrize(
    ("codes", "kind", "sequences"),
    [
        ("fp16", {}, MIXED),
        ("int8", {"window": 20, "dim": 128}, MIXED),
        ("fp8", {"dim": 96, "cap": 2.0}, MIXED),
        ("fp16", {"sinks": True, "capacity": 140}, PROMPTS_OF_BATCH),
    ],
)
def test_attention_is_batch_invariant(codes, kind, sequences):
    """So are the cached positions."""
    given = {"codes": codes, "capacity": 64, "shares": 2, **kind}
    cases = [
        Case(count, at, 2, 1, columns=columns, seed=seed, **given)
        for seed, (count, at, columns) in enumerate(sequences)
    ]
    alone, causal = [Pass(case) for case in cases], len(cases) - 1
    rows = cases[causal].rows
    alone[causal].tree[:] = np.tri(rows, dtype=np.int8)
    for one in alone:
        one.sinks = alone[0].sinks
    together, other = SharedPass(alone, causal), SharedPass(alone, causal)
    y, expected = together.run(), [one.run() for one in alone]
    np.testing.assert_array_equal(y[:-1], np.concatenate(expected))
    for name in ("codes", "scales"):
        whole = np.concatenate([getattr(one.cache, name) for one in alone], axis=3)
        np.testing.assert_array_equal(getattr(together.cache, name), whole)
    reference = other.run(by_reference)[:-1]
    assert np.abs(reference - y[:-1]).max() < TOLERANCE["fp16"]
    np.testing.assert_array_equal(other.cache.codes, together.cache.codes)


@pytest.mark.parametrize("codes_name", ["int8", "fp8"])
def test_quantization_equals_numpy(codes_name):
    one = Pass(Case(8, 20, 4, 2, codes=codes_name))
    one.v[0], one.v[1, 0, 0] = 0, 60000
    one.run()
    codes, scales = one.cache.encode(one.v[1:])
    found = one.cache.codes[LAYER, 1, :, 20:28].transpose(1, 0, 2)
    assert (found[0] == 0).all()
    zero = codes == -128 if codes_name == "fp8" else np.zeros(codes.shape, bool)  # -0
    np.testing.assert_array_equal(np.where(zero, 0, codes), np.where(zero, 0, found[1:]))
    np.testing.assert_array_equal(one.cache.scales[LAYER, 1, :, 20:28].T[1:], scales)


def test_the_runtime_writes_tables_that_are_followed():
    assert cache.MAGIC.value == MAGIC
    assert attention.PROMPT_TOKENS.value == catalog.PROMPT_TOKENS == PARTIAL_ROWS
    assert prompt_attention.MAX_SHARES.value == MAX_SHARES
    assert (catalog.SEQUENCES, cache.FIELDS.value) == SHAPE
    assert attention.SEQUENCES.value == catalog.SEQUENCES


def test_invalid_table_is_not_followed():
    """TensorRT times plugins on random inputs."""
    one = Pass(Case(4, 10, 4, 2))
    stored = one.cache.codes.copy()
    one.cache.table[1] += 1
    assert (one.run() == 0).all()
    np.testing.assert_array_equal(one.cache.codes, stored)


@pytest.mark.parametrize("index", [-3, 126, 1 << 40])
def test_rows_outside_the_cache_are_dropped(index):
    one = Pass(Case(4, 10, 4, 2))
    one.index[0] = index
    stored = one.cache.codes.copy()
    one.run()
    changed = np.any(one.cache.codes != stored, axis=-1)[LAYER, 0, 0]
    assert np.flatnonzero(changed).tolist() == [s for s in range(index, index + 4) if 0 <= s < 128]


@pytest.mark.parametrize("codes", ["fp16", "int8"])
def test_compaction_of_accepted_positions(codes):
    one = Cache(Case(0, 0, 4, 2, codes=codes), np.random.default_rng(0))
    codes_before, scales_before = one.codes.copy(), one.scales.copy()
    path = np.array([0, 2, 3, 7, 11, -1, -1], np.int32)
    launch(
        compaction.keep_rows, (LAYERS, 2, 2), path, np.array([5, 9, 0], np.int32), np.array([30]),
        one.table, 64, D=64, CODES=codes,
    )  # fmt: skip
    other = Cache(Case(0, 0, 4, 2, codes=codes), np.random.default_rng(0))
    given = path, np.array([5, 9, 0], np.int32), np.array([30]), other.table, 64
    by_reference(compaction.keep_rows, (LAYERS, 2, 2), *given, D=64, CODES=codes)
    np.testing.assert_array_equal(other.codes, one.codes)
    np.testing.assert_array_equal(other.scales, one.scales)
    rows = np.arange(128)
    rows[30:35] = 30 + path[:5]
    np.testing.assert_array_equal(one.codes, codes_before[:, :, :, rows])
    if codes != "fp16":
        np.testing.assert_array_equal(one.scales, scales_before[:, :, :, rows])
