"""Recurrent layers on GPUs, every row and accepted prefix: float64, torch, transformers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from interpreted import by_reference, launch

from edgellm.device_runtime.kernels.triton import cache, catalog, recurrent

ENTRIES, ENTRY = 3, 1  # of the table
CAPACITY = 40  # rows that can be stored


def make_table(parts: list[np.ndarray], magic: int = cache.MAGIC.value) -> np.ndarray:
    table = np.zeros(2 + 4 * ENTRIES, np.int64)
    table[:2] = CAPACITY, CAPACITY ^ magic
    table[2 + 4 * ENTRY :][: len(parts)] = [each.ctypes.data for each in parts]
    return table


def make_parents(rows: int, shape: str) -> np.ndarray:
    """Parents of a chain, a tree, or of roots that all follow the state."""
    random = np.random.default_rng(rows)
    if shape == "chain":
        return np.arange(-1, rows - 1)
    first = -1 if shape == "roots" else 0
    near = [int(random.integers(max(first, row - 6), row)) for row in range(1, rows)]
    return np.array([-1, *near])


def ancestors(parents: np.ndarray, row: int) -> list[int]:
    """A row with its ancestors, the oldest first."""
    return [*(ancestors(parents, int(parents[row])) if parents[row] >= 0 else ()), row]


def make_tree(parents: np.ndarray, columns: int) -> np.ndarray:
    """The mask, with columns of earlier tokens in front."""
    rows = len(parents)
    tree = np.ones((rows, columns), np.int8)
    tree[:, columns - rows :] = 0
    for row in range(rows):
        tree[row, columns - rows + np.array(ancestors(parents, row))] = 1
    return tree


class Convolution:
    """A pass of a layer with a short convolution."""

    def __init__(self, parents: np.ndarray, width: int, size: int) -> None:
        random, rows = np.random.default_rng(width), len(parents)
        half = lambda *shape: random.standard_normal(shape).astype(np.float16)  # noqa: E731
        self.parents, self.width, self.size = parents, width, size
        self.x, self.taps, self.window = half(rows, width), half(size, width), half(size - 1, width)
        self.stored = np.zeros((CAPACITY, width), np.float16)
        self.table = make_table([self.window, self.stored])

    def run(self, launch: Callable[..., None]) -> np.ndarray:
        y = np.zeros_like(self.x)
        grid = len(self.x), -(-self.width // catalog.CHANNELS)
        constants = catalog.CONVOLVE_ROWS.constants
        sizes = ENTRY, self.width, self.size
        launch(
            recurrent.convolve_rows,
            grid,
            self.x,
            self.taps,
            self.parents,
            self.table,
            *sizes,
            y,
            **constants,
        )
        return y

    def advance(self, launch: Callable[..., None], path: list[int]) -> None:
        grid, entries = (-(-self.width // catalog.CHANNELS), 1), np.array([ENTRY], np.int32)
        launch(
            recurrent.advance_window,
            grid,
            *accepted(path),
            self.table,
            entries,
            self.width,
            self.size,
            **catalog.ADVANCE_WINDOW.constants,
        )

    def inputs_of(self, path: list[int]) -> np.ndarray:
        """The window with rows after it, float64."""
        return np.concatenate([self.window, self.x[path]]).astype(np.float64)


def accepted(path: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """As `accept_greedy` writes it."""
    padded = np.full(CAPACITY, -1, np.int32)
    padded[: len(path)] = path
    return padded, np.array([len(path), 7, 0], np.int32)


@pytest.mark.parametrize(
    ("rows", "width", "size", "shape"),
    [(1, 24, 3, "chain"), (9, 264, 4, "tree"), (20, 8, 3, "roots"), (33, 24, 2, "chain")],
)
def test_convolutions_equal_their_definition(rows, width, size, shape):
    parents = make_parents(rows, shape)
    one, other = (Convolution(parents, width, size) for _ in range(2))
    y = one.run(launch)
    for row in range(rows):
        newest = one.inputs_of(ancestors(parents, row))[-size:]
        np.testing.assert_allclose(y[row], (newest * one.taps).sum(0), atol=1e-2)
    np.testing.assert_array_equal(one.stored[:rows], one.x)
    np.testing.assert_allclose(other.run(by_reference), y, atol=4e-3)
    path, before = ancestors(parents, rows - 1), one.window.copy()
    for count in {0, 1, len(path) // 2, len(path)}:
        expected = one.inputs_of(path[:count])[-(size - 1) :]
        for pass_, how in ((one, launch), (other, by_reference)):
            pass_.advance(how, path[:count])
            np.testing.assert_array_equal(pass_.window, expected)
            pass_.window[:] = before


def test_a_convolution_equals_torch():
    torch = pytest.importorskip("torch")
    one = Convolution(make_parents(30, "chain"), 48, 4)
    y = one.run(launch)
    x = torch.from_numpy(one.inputs_of(list(range(30)))).T[None]
    taps = torch.from_numpy(one.taps.astype(np.float64)).T[:, None]
    expected = torch.nn.functional.conv1d(x, taps, groups=48)[0].T
    np.testing.assert_allclose(y, expected.numpy(), atol=1e-2)


class Delta:
    """A pass of a layer of linear attention."""

    def __init__(
        self, parents: np.ndarray, sizes: tuple[int, int, int, int], *, takes: bool
    ) -> None:
        key_heads, heads, key_dim, value_dim = sizes
        random, rows = np.random.default_rng(sum(sizes)), len(parents)
        wide = lambda *shape: random.standard_normal(shape).astype(np.float32)  # noqa: E731
        self.parents, self.sizes, self.takes = parents, sizes, takes
        self.q, self.k = wide(rows, key_heads, key_dim), wide(rows, key_heads, key_dim)
        if takes:
            self.q, self.k = (x / np.linalg.norm(x, axis=-1)[..., None] for x in (self.q, self.k))
        self.v = wide(rows, heads, value_dim)
        self.g = -random.random((rows, heads)).astype(np.float32) * 0.6
        self.b = random.random((rows, heads)).astype(np.float32)
        self.state = wide(heads, key_dim, value_dim) * 0.3
        self.keys = np.full((CAPACITY, key_heads, key_dim), np.nan, np.float16)
        self.deltas = np.full((CAPACITY, heads, value_dim), np.nan, np.float32)
        self.decays = np.full((2, CAPACITY, heads), np.nan, np.float32)
        self.table = make_table([self.state, self.keys, self.deltas, self.decays])
        self.tree = make_tree(parents, rows + 3)

    def run(self, launch: Callable[..., None]) -> np.ndarray:
        y = np.full_like(self.v, np.nan)
        _, heads, _, value_dim = self.sizes
        sizes = ENTRY, len(self.v), self.tree.shape[1], *self.sizes
        launch(
            recurrent.delta_rows,
            (heads, -(-value_dim // catalog.VALUES)),
            self.q,
            self.k,
            self.v,
            self.g,
            self.b if self.takes else self.g,
            self.tree,
            self.table,
            *sizes,
            y,
            **catalog.delta_rows(takes=self.takes).constants,
        )
        return y

    def advance(self, launch: Callable[..., None], path: list[int]) -> None:
        _, heads, _, value_dim = self.sizes
        launch(
            recurrent.advance_state,
            (heads, -(-value_dim // catalog.VALUES), 1),
            *accepted(path),
            self.table,
            np.array([ENTRY], np.int32),
            *self.sizes,
            **catalog.ADVANCE_STATE.constants,
        )

    def expected(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """Outputs, and the state after each row, by the rule's definition in float64."""
        sharing, after, y = self.sizes[1] // self.sizes[0], [], np.zeros(self.v.shape)
        for row, above in enumerate(self.parents.tolist()):
            before = self.state.astype(np.float64) if above < 0 else after[above]
            keys, queries = (np.repeat(x[row], sharing, 0) for x in (self.k, self.q))
            before = before * np.exp(self.g[row].astype(np.float64))[:, None, None]
            delta = self.v[row].astype(np.float64)
            if self.takes:
                delta = (delta - (before * keys[..., None]).sum(1)) * self.b[row][:, None]
            after.append(before + keys[..., None] * delta[:, None])
            y[row] = (after[-1] * queries[..., None]).sum(1)
        return y, after


def assert_close(found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    assert np.abs(found - expected).max() < tolerance * np.abs(expected).max()


@pytest.mark.each_change("9-True-tree-sizes0", "35-True-chain-sizes1", "20-False-roots-sizes2")
@pytest.mark.parametrize(
    ("rows", "takes", "shape", "sizes"),
    [
        (9, True, "tree", (1, 2, 128, 40)),
        (35, True, "chain", (1, 2, 16, 24)),
        (20, False, "roots", (1, 2, 24, 16)),
        (1, True, "chain", (2, 2, 64, 64)),
        (33, True, "tree", (1, 2, 136, 32)),
        (18, False, "chain", (2, 2, 256, 8)),
    ],
)
def test_linear_attention_equals_its_definition(rows, takes, shape, sizes):
    parents = make_parents(rows, shape)
    one, other = (Delta(parents, sizes, takes=takes) for _ in range(2))
    expected, after = one.expected()
    y = one.run(launch)
    assert_close(y, expected, 3e-3)
    assert_close(other.run(by_reference), expected, 1e-5)
    assert_close(one.deltas[:rows], other.deltas[:rows], 3e-3)
    np.testing.assert_array_equal(one.keys[:rows], one.k.astype(np.float16))
    path, before = ancestors(parents, rows - 1), one.state.copy()
    for count in {*range(min(len(path), 4)), 17, len(path)} & {*range(len(path) + 1)}:
        state = after[path[count - 1]] if count else before
        for pass_, how in ((one, launch), (other, by_reference)):
            pass_.advance(how, path[:count])
            assert_close(pass_.state, state, 2e-3)
            pass_.state[:] = before


def test_the_delta_rule_equals_transformers():
    """In chunks, each with the state that the one before left."""
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    one, found = Delta(make_parents(20, "chain"), (1, 2, 32, 16), takes=True), []
    start = one.state.copy()
    for chunk in (slice(0, 17), slice(17, 18), slice(18, 20)):
        part = Delta(make_parents(chunk.stop - chunk.start, "chain"), one.sizes, takes=True)
        for name in "qkvgb":
            setattr(part, name, np.ascontiguousarray(getattr(one, name)[chunk]))
        part.state[:] = one.state
        found.append(part.run(launch))
        part.advance(launch, list(range(chunk.stop - chunk.start)))
        one.state[:] = part.state
    heads = lambda x: torch.from_numpy(np.repeat(x, 2 // x.shape[1], 1))[None]  # noqa: E731
    expected, state = modeling.torch_recurrent_gated_delta_rule(
        heads(one.q) * 32**0.5,
        heads(one.k),
        heads(one.v),
        heads(one.g),
        heads(one.b),
        torch.from_numpy(start)[None],
        output_final_state=True,
    )
    assert_close(np.concatenate(found), expected[0].numpy(), 3e-3)
    assert_close(one.state, state[0].numpy(), 3e-3)


@pytest.mark.parametrize("how", [launch, by_reference], ids=["kernel", "reference"])
def test_other_tables_change_nothing(how):
    """TensorRT times plugins on random inputs; a pass may have more rows than can be stored."""
    rows = CAPACITY + 1
    window, wrong = Convolution(make_parents(3, "chain"), 24, 3), cache.MAGIC.value + 1
    matrix = Delta(make_parents(2, "chain"), (1, 1, 16, 16), takes=True)
    window.table = make_table([window.window, window.stored], wrong)
    matrix.table = make_table([matrix.state, matrix.keys, matrix.deltas, matrix.decays], wrong)
    before = [each.copy() for each in (window.window, window.stored, matrix.state, matrix.keys)]
    assert not window.run(how).any()
    window.advance(how, [0])
    assert np.isnan(matrix.run(how)).all()
    matrix.advance(how, [0])
    after = window.window, window.stored, matrix.state, matrix.keys
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    large = Delta(make_parents(rows, "chain"), (1, 1, 16, 16), takes=True)
    assert np.isnan(large.run(how)).all()
