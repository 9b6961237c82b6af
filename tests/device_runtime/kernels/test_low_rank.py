"""What adapters add to linear layers: the kernels, and their operator."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_calls import low_rank, product, quantized_case
from kernel_sessions import F32, I64, open_session
from onnx import helper

from edgellm.device_runtime.kernels.library import DOMAIN, instruction_sets

BEST = instruction_sets()[0]
K, WIDTHS = 70, (40, 24)  # what two layers read and give


@pytest.fixture
def rng():
    return np.random.default_rng(5)


@pytest.mark.parametrize(("rank", "count", "outputs"), [(1, 3, 16), (7, 70, 40), (16, 96, 33)])
def test_all_instruction_sets_give_the_same_bits(rank, count, outputs, rng):
    shapes = (count,), (rank, count), (rank, outputs), (outputs,)
    x, a, b, base = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    expected = low_rank("scalar", x, a, b, base)
    exact = base + (a.astype(np.float64) @ x) @ b
    np.testing.assert_allclose(expected, exact, atol=1e-4)
    for name in instruction_sets():
        assert low_rank(name, x, a, b, base).tobytes() == expected.tobytes()


def _adapters(rng):
    """Two, of which the second leaves the second layer alone: their A, B, weights and table."""
    pairs = {}
    values, table = [np.zeros(3, np.float32)], np.zeros((3, 4, 3), np.int64)
    for slot, layer, rank in ((1, 0, 3), (1, 1, 5), (2, 0, 9)):
        a, b = (rng.standard_normal((rank, n)).astype(np.float32) for n in (K, WIDTHS[layer]))
        begin = sum(map(len, values))
        table[slot, layer + 2] = rank, begin, begin + a.size
        values += [a.ravel(), b.ravel()]
        pairs[slot, layer] = a, b
    return pairs, np.concatenate(values), table


def _session(names=("x", "places", "", "weights", "table", "rows", "base"), threads=2, **more):
    node = helper.make_node("LowRank", names, ("y",), domain=DOMAIN, N=sum(WIDTHS), **more)
    kinds = {"places": I64, "table": I64, "rows": I64}
    given = [(name, kinds.get(name, F32), None) for name in names if name]
    return open_session(node, given, [("y", F32, None)], threads=threads)


def _given(rng, rows, **more):
    pairs, weights, table = _adapters(rng)
    x = rng.standard_normal((1, len(rows), K)).astype(np.float32)
    places = np.array([(2, WIDTHS[0], 0), (3, WIDTHS[1], WIDTHS[0])])
    return pairs, {
        "x": x,
        "places": places,
        "weights": weights,
        "table": table,
        "rows": np.array(rows),
        **more,
    }


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_have_adapters_of_their_own(threads, rng):
    rows = [0, 1, 2, 1, 0] * 60
    base = rng.standard_normal((1, len(rows), sum(WIDTHS))).astype(np.float32)
    pairs, given = _given(rng, rows, base=base)
    session = _session(threads=threads)
    y = session.run(None, given)[0][0]
    for row, slot in enumerate(rows):
        expected = base[0, row].copy()
        for layer, part in enumerate((slice(0, 40), slice(40, 64))):
            if (slot, layer) in pairs:
                a, b = pairs[slot, layer]
                expected[part] = low_rank(BEST, given["x"][0, row], a, b, expected[part])
        assert y[row].tobytes() == expected.tobytes()
        if row < 3:  # alone
            one = {n: given[n][:, row : row + 1] for n in ("x", "base")}
            alone = session.run(None, {**given, **one, "rows": np.array([slot])})[0]
            assert alone[0, 0].tobytes() == expected.tobytes()


def test_without_a_base_nothing_is_added_where_no_adapter_does(rng):
    pairs, given = _given(rng, [0, 2])
    session = _session(("x", "places", "", "weights", "table", "rows"))
    y = session.run(None, given)[0]
    assert (np.signbit(y[0, 0]) & (y[0, 0] == 0)).all()  # -0 + x is x, also where x is -0
    assert (np.signbit(y[0, 1, 40:]) & (y[0, 1, 40:] == 0)).all()
    a, b = pairs[2, 0]
    np.testing.assert_allclose(y[0, 1, :40], (a @ given["x"][0, 1]) @ b, atol=1e-4)
    assert session.run(None, {**given, "rows": np.zeros(2, np.int64)})[0].shape == (0,)


def test_normalized_rows_are_those_of_the_product(rng):
    gamma = rng.uniform(0.5, 1.5, K).astype(np.float32)
    _, given = _given(rng, [1, 2] * 20, gamma=gamma)
    names = ("x", "places", "gamma", "weights", "table", "rows")
    y = _session(names, epsilon=1e-6).run(None, given)[0]
    x = given["x"]
    normal = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gamma
    plain = _session((*names[:2], "", *names[3:]))
    expected = plain.run(None, {**{n: v for n, v in given.items() if n != "gamma"}, "x": normal})[0]
    np.testing.assert_allclose(y, expected, atol=2e-4)


def test_a_product_takes_what_adapters_add(rng):
    case = quantized_case(rng, "int8", 64, 32, 32)
    names = ("x", "w", "", "", "", "", "delta")
    node = helper.make_node("QuantLinear", names, ("y",), domain=DOMAIN)
    given = [("x", F32, None), ("delta", F32, None)]
    session = open_session(node, given, [("y", F32, None)], [("w", case.packed)])
    x, delta = (rng.standard_normal((3, n)).astype(np.float32) for n in (64, 32))
    plain = product(BEST, case, x)
    assert (
        session.run(None, {"x": x, "delta": np.zeros(0, np.float32)})[0].tobytes()
        == plain.tobytes()
    )
    assert session.run(None, {"x": x, "delta": delta})[0].tobytes() == (plain + delta).tobytes()
    with pytest.raises(Exception, match="what is added is not as wide"):
        session.run(None, {"x": x, "delta": delta[:2]})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": np.array([3])}, "no such adapter"),
        ({"rows": np.array([1, 1])}, "not a slot for each row"),
        ({"weights": np.zeros(100, np.float32)}, "cut off"),
        ({"places": np.array([(4, 40, 0)])}, "lacks a layer"),
        ({"table": np.zeros((3, 3), np.int64)}, "the table is not"),
        ({"base": np.zeros((1, 1, 63), np.float32)}, "the base is not as wide"),
    ],
)
def test_what_does_not_fit_stops_the_pass(change, words, rng):
    _, given = _given(rng, [1], base=np.zeros((1, 1, 64), np.float32))
    with pytest.raises(Exception, match=words):
        _session().run(None, {**given, **change})
