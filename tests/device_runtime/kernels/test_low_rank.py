"""LoRA in linear layers: the kernels, and their operator."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_calls import low_rank, product, quantized_case
from kernel_sessions import F32, I64, open_session
from onnx import helper

from edgellm.device_runtime.kernels.library import DOMAIN, instruction_sets

BEST = instruction_sets()[0]
K, WIDTHS = 70, (40, 24)  # input and output sizes of two layers
ADAPTED = ("rows", "places", "weights", "table")


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
    """A, B, weights and table of two adapters; the second one does not change the second layer."""
    pairs = {}
    values, table = [np.zeros(3, np.float32)], np.zeros((3, 4, 3), np.int64)
    for slot, layer, rank in ((1, 0, 3), (1, 1, 5), (2, 0, 9)):
        a, b = (rng.standard_normal((rank, n)).astype(np.float32) for n in (K, WIDTHS[layer]))
        begin = sum(map(len, values))
        table[slot, layer + 2] = rank, begin, begin + a.size
        values += [a.ravel(), b.ravel()]
        pairs[slot, layer] = a, b
    return pairs, np.concatenate(values), table


def _session(threads=2):
    names = ("x", "base", *ADAPTED)
    node = helper.make_node("LowRank", names, ("y",), domain=DOMAIN)
    return open_session(node, _inputs(names), [("y", F32, None)], threads=threads)


def _inputs(names):
    kinds = {"rows": I64, "places": I64, "table": I64}
    return [(name, kinds.get(name, F32), None) for name in names if name]


def _linear(rng, own=(), threads=2, **how):
    """A packed product of both layers, concatenated, and its session."""
    case = quantized_case(rng, "int8", K, sum(WIDTHS), 32, **how)
    names = ("x", "w", "gamma", "", "", "", *ADAPTED, *own)
    node = helper.make_node("QuantLinear", names, ("y",), domain=DOMAIN, epsilon=1e-6)
    given = [one for one in _inputs(names) if one[0] != "w"]
    weight = [("w", case.packed)]
    return case, open_session(node, given, [("y", F32, None)], weight, threads=threads)


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
def test_tokens_have_individual_adapters(threads, rng):
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


@pytest.mark.parametrize("threads", [1, 2])
def test_a_packed_product_adds_what_adapters_do_first(threads, rng):
    case, session = _linear(rng, threads=threads)
    gamma = rng.uniform(0.5, 1.5, K).astype(np.float32)
    pairs, given = _given(rng, [0, 2, 1] * 20, gamma=gamma)
    y, x = session.run(None, given)[0][0], given["x"][0]
    plain = product(BEST, case, x, gamma=gamma, epsilon=1e-6)
    normal = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gamma
    none = session.run(None, {**given, "rows": np.zeros(60, np.int64)})[0][0]
    assert none.tobytes() == plain.tobytes()
    assert y[::3].tobytes() == plain[::3].tobytes()  # rows without an adapter
    assert y[1::3, 40:].tobytes() == plain[1::3, 40:].tobytes()  # a layer without an adapter
    for row, slot in enumerate(given["rows"]):
        for layer, part in enumerate((slice(0, 40), slice(40, 64))):
            if (slot, layer) in pairs:
                a, b = pairs[slot, layer]
                more = plain[row, part] + (a @ normal[row]) @ b
                np.testing.assert_allclose(y[row, part], more, atol=3e-4)
    one = {**given, "x": given["x"][:, 2:3], "rows": given["rows"][2:3]}
    assert session.run(None, one)[0][0, 0].tobytes() == y[2].tobytes()  # alone


def test_adapters_apply_to_their_own_tokens(rng):
    """With smoothed inputs, and with gates, which apply after the adapter."""
    case, session = _linear(rng, own=("own",), gated=True, terms=2)
    gamma = np.ones(K, np.float32)
    _, given = _given(rng, [1, 0], gamma=gamma)
    given["places"] = np.array([(2, 32, 0)])
    a, b = rng.standard_normal((3, K)), rng.standard_normal((3, 32))
    begin = given["table"][1, 2, 1]
    values = np.concatenate([a.ravel(), b.ravel()]).astype(np.float32)
    given["weights"] = np.concatenate([given["weights"][:begin], values])
    given["table"][1, 2] = 3, begin, begin + a.size
    own = rng.standard_normal((1, 2, K)).astype(np.float32)
    y = session.run(None, {**given, "own": own})[0][0]
    x = given["x"][0].astype(np.float64)
    x /= np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    gate, up = (x @ case.weight.reshape(2, 2, 16, K)[:, i].reshape(32, K).T for i in (0, 1))
    gate[0] += (a @ own[0, 0]) @ b
    np.testing.assert_allclose(y, gate / (1 + np.exp(-gate)) * up, atol=0.05)
    with pytest.raises(Exception, match="what adapters read is not shaped like x"):
        session.run(None, {**given, "own": own[:, :1]})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": np.array([3])}, "no such adapter"),
        ({"rows": np.array([1, 1])}, "not a slot for each row"),
        ({"weights": np.zeros(100, np.float32)}, "cut off"),
        ({"places": np.array([(4, 40, 0)])}, "lacks a layer"),
        ({"table": np.zeros((3, 3), np.int64)}, "the table is not"),
        ({"base": np.zeros((1, 2, 64), np.float32)}, "the base has other rows"),
        ({"places": np.zeros((1, 2), np.int64)}, "the places are not"),
    ],
)
def test_mismatched_shapes_fail_the_pass(change, words, rng):
    _, given = _given(rng, [1], base=np.zeros((1, 1, 64), np.float32))
    with pytest.raises(Exception, match=words):
        _session().run(None, {**given, **change})
