"""Mixtures of experts: correct and batch-invariant."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from kernel_calls import float_case, fp8_case, product, quantized_case
from kernel_sessions import F32, I64, open_session
from onnx import helper

from edgellm.device_runtime.kernels.library import DOMAIN, instruction_sets

E, K, HIDDEN, INNER = 7, 3, 96, 48
LIMITED = {"alpha": 1.7, "limit": 0.3, "offset": 1.0}
_SLOPE = 2 * np.sqrt(2 / np.pi)
GELU = {"alpha": _SLOPE, "cubic": 0.044715 * _SLOPE}
GATINGS = {"swish": {}, "limited": LIMITED, "gelu": GELU}
# Kind, block of gates and ups, block of downs, largest error of rounded inputs.
KINDS = (
    ("int4", 32, 16, 0.02),
    ("int8", 32, 16, 0.02),
    ("fp4", 32, 16, 0.02),
    ("fp8", 96, 48, 1e-5),
    ("float16", 1, 1, 1e-5),
    ("float32", 1, 1, 1e-5),
)


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def cases(rng, kind, block, down_block):
    """Weights of each expert: gates and ups interleaved, and downs."""
    if kind == "fp8":
        gates = [fp8_case(rng, HIDDEN, 2 * INNER, block, gated=True) for _ in range(E)]
        return gates, [fp8_case(rng, INNER, HIDDEN, down_block) for _ in range(E)]
    if kind.startswith("float"):
        gates = [float_case(rng, kind, HIDDEN, 2 * INNER, gated=True) for _ in range(E)]
        return gates, [float_case(rng, kind, INNER, HIDDEN) for _ in range(E)]
    gates = [quantized_case(rng, kind, HIDDEN, 2 * INNER, block, gated=True) for _ in range(E)]
    return gates, [quantized_case(rng, kind, INNER, HIDDEN, down_block) for _ in range(E)]


def stacked(experts):
    """Records of all, then their headers."""
    packed = [case.packed for case in experts]
    return np.concatenate([each[64:] for each in packed] + [each[:64] for each in packed])


def session(gates, downs, biases=None, packed=None, path=None, **attributes):
    names = ["x", "ids", "shares", "gates", "downs", *(["inner", "outer"] if biases else [])]
    node = helper.make_node("Experts", names, ["y"], domain=DOMAIN, experts=E, **attributes)
    inputs = [("x", F32, None), ("ids", I64, None), ("shares", F32, None)]
    held = [("gates", stacked(gates) if packed is None else packed), ("downs", stacked(downs))]
    held += list(zip(("inner", "outer"), biases, strict=True)) if biases else []
    return open_session(node, inputs, [("y", F32, None)], held, path=path)


def chosen(rng, rows):
    ids = np.stack([rng.permutation(E)[:K] for _ in range(rows)])[None]
    shares = rng.dirichlet(np.ones(K), rows).astype(np.float32)[None]
    return rng.standard_normal((1, rows, HIDDEN), np.float32), ids.astype(np.int64), shares


def exact(gates, downs, x, ids, shares, biases=None, gating="swish"):
    y = np.zeros(x.shape[1:])
    inner, outer = biases if biases else (np.zeros((E, 2 * INNER)), np.zeros((E, HIDDEN)))
    for row, (taken, weights) in enumerate(zip(ids[0], shares[0], strict=True)):
        for expert, share in zip(taken, weights, strict=True):
            both = gates[expert].weight @ x[0, row] + inner[expert]
            gate, up = both.reshape(-1, 2, 16).transpose(1, 0, 2).reshape(2, -1)
            hidden = activated(gating, gate, up)
            y[row] += share * (downs[expert].weight @ hidden + outer[expert])
    return y


def activated(gating, gate, up):
    """By the definitions of SwiGLU, gpt-oss and GELU's tanh form."""
    if gating == "gelu":
        return gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    if gating == "swish":
        return gate / (1 + np.exp(-gate)) * up
    gate = np.minimum(gate, LIMITED["limit"])
    up = np.clip(up, -LIMITED["limit"], LIMITED["limit"]) + LIMITED["offset"]
    return gate / (1 + np.exp(-gate * LIMITED["alpha"])) * up


@pytest.mark.parametrize("gating", GATINGS)
@pytest.mark.parametrize(("kind", "block", "down_block", "error"), KINDS, ids=[k[0] for k in KINDS])
def test_a_row_is_the_sum_of_its_experts(kind, block, down_block, error, gating, rng, tmp_path):
    gates, downs = cases(rng, kind, block, down_block)
    biases = [rng.standard_normal((E, width), np.float32) for width in (2 * INNER, HIDDEN)]
    run = session(gates, downs, biases, path=tmp_path / "m.onnx", **GATINGS[gating])
    x, ids, shares = chosen(rng, 12)
    y = run.run(None, {"x": x, "ids": ids, "shares": shares})[0][0]
    expected = exact(gates, downs, x, ids, shares, biases, gating)
    assert np.linalg.norm(y - expected) < error * np.linalg.norm(expected)


@pytest.mark.parametrize("kind", ["int4", "float32"])
def test_results_are_batch_invariant(kind, rng):
    """Nor on the pieces of 4,096 rows times experts in which long prompts are read."""
    gates, downs = cases(rng, kind, 32, 16)
    run = session(gates, downs)
    x, ids, shares = chosen(rng, 1500)

    def of(rows):
        given = {"x": x[:, rows], "ids": ids[:, rows], "shares": shares[:, rows]}
        return run.run(None, given)[0][0]

    together = of(slice(None))
    for row in (0, 700, 1364, 1365, 1499):
        assert of(slice(row, row + 1)).tobytes() == together[row].tobytes()
    order = rng.permutation(len(together))
    assert of(order).tobytes() == together[order].tobytes()
    assert of(slice(0, 0)).shape == (0, HIDDEN)


@pytest.mark.parametrize("gating", ["limited", "gelu"])
@pytest.mark.parametrize("kind", ["int8", "float32"])
def test_gatings_have_the_same_bits_on_every_instruction_set(kind, gating, rng):
    case = cases(rng, kind, 32, 16)[0][0]
    x = rng.standard_normal((5, HIDDEN), np.float32)
    reference = product("scalar", case, x, **GATINGS[gating])
    for name in instruction_sets()[:-1]:
        assert product(name, case, x, **GATINGS[gating]).tobytes() == reference.tobytes()


def test_gelu_of_large_gates_is_the_gate_or_zero(rng):
    """The cube of a gate overflows before its activation does."""
    case = cases(rng, "float32", 1, 1)[0][0]
    x = np.float32([[1e15], [1e20]]) * rng.standard_normal(HIDDEN, np.float32)
    gate, up = (case.weight @ x.astype(np.float64).T).reshape(-1, 2, 16, 2).transpose(1, 3, 0, 2)
    expected = (np.maximum(gate, 0) * up).reshape(2, -1)[:1]
    for name in instruction_sets():
        y = product(name, case, x, **GELU)
        np.testing.assert_allclose(y[:1], expected, rtol=1e-4, atol=1e-3 * np.abs(expected).max())
        assert not np.isnan(y).any()


@pytest.mark.parametrize("gating", ["limited", "gelu"])
def test_gatings_keep_nan(gating, rng):
    case = cases(rng, "float32", 1, 1)[0][0]
    x = rng.standard_normal((2, HIDDEN), np.float32)
    x[1, 7] = np.nan
    for name in instruction_sets():
        y = product(name, case, x, **GATINGS[gating])
        assert np.isnan(y[1]).all()
        assert np.isfinite(y[0]).all()


def test_wrong_weights_and_ids_are_rejected(rng):
    gates, downs = cases(rng, "int4", 32, 16)
    packed = stacked(gates)
    damaged = packed.copy()
    damaged[-64 * 3] ^= 0xFF
    other = dataclasses.replace(gates[3], packed=quantized_case(rng, "int4", 96, 96, 32).packed)
    swapped = stacked([*gates[:3], other, *gates[4:]])
    for wrong, words in ((packed[:-8], "all experts"), (damaged, "no packed"), (swapped, "differ")):
        with pytest.raises(Exception, match=words):
            session(gates, downs, packed=wrong)
    x, ids, shares = chosen(rng, 2)
    ids[0, 1, 0] = E
    with pytest.raises(Exception, match="no expert"):
        session(gates, downs).run(None, {"x": x, "ids": ids, "shares": shares})
