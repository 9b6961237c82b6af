"""The operators of linear attention against the recurrence in torch."""

from __future__ import annotations

import numpy as np
import pytest
from delta_cases import SHAPES, DeltaCase
from kernel_sessions import F32, I64, open_session
from onnx import helper

from edgellm.device_runtime.kernels.library import DOMAIN

ROWS = 9


def rule(case: DeltaCase, threads: int = 2, *, with_delta: bool = True) -> list[np.ndarray]:
    names = ["q", "k", "v", "g", "b" if with_delta else "", "state", "parents"]
    outputs = ["y", "d"] if with_delta else ["y"]
    node = helper.make_node("GatedDelta", names, outputs, domain=DOMAIN)
    given = [(name, I64 if name == "parents" else F32, None) for name in names if name]
    session = open_session(node, given, [(name, F32, None) for name in outputs], threads=threads)
    return session.run(None, case.feeds(*(name for name in names if name)))


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("with_delta", [True, False])
def test_outputs_of_trees_of_two_sequences(kind, with_delta):
    case = DeltaCase(kind, [-1, 0, 0, -2, 1, 3, 3, 4, 2], states=2)
    found = rule(case, with_delta=with_delta)
    for mine, expected in zip(found, case.expected(with_delta=with_delta), strict=False):
        np.testing.assert_allclose(mine, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", SHAPES)
def test_states_after_a_chain(kind):
    case = DeltaCase(kind, [row - 1 for row in range(ROWS)])
    _, deltas, state = case.expected()
    names = ["state", "k", "d", "g"]
    node = helper.make_node("GatedDeltaUpdate", names, ["next"], domain=DOMAIN)
    session = open_session(node, [(name, F32, None) for name in names], [("next", F32, None)])
    given = {**case.feeds("state", "k", "g"), "d": deltas.astype(np.float32)}
    found = session.run(None, given)[0]
    np.testing.assert_allclose(found[0], state.numpy(), rtol=2e-6, atol=2e-6)
    none = {name: x if name == "state" else x[:, :0] for name, x in given.items()}
    np.testing.assert_array_equal(session.run(None, none)[0], given["state"])


def test_one_decay_is_that_of_equal_channels():
    case = DeltaCase("one", [-1, 0, 1, 1, 0])
    expected = rule(case)
    case.g = case.g.expand(-1, -1, case.keys)
    for mine, other in zip(rule(case), expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-6, atol=2e-6)


def test_rows_do_not_depend_on_others_or_threads():
    case = DeltaCase("channels", [-1, 0, 0, 1, 3])
    found = rule(case)
    for mine, other in zip(found, rule(case, threads=1), strict=True):
        assert mine.tobytes() == other.tobytes()
    chain = DeltaCase("channels", [-1, 0, 1, 2])  # the first, second, fourth and fifth rows
    for name in "qkvgb":
        setattr(chain, name, getattr(case, name)[[0, 1, 3, 4]])
    chain.state = case.state
    for mine, other in zip(rule(chain), found, strict=True):
        assert mine.tobytes() == other[:, [0, 1, 3, 4]].tobytes()


def test_wrong_shapes_fail():
    case = DeltaCase("channels", [-1, 0])
    case.g = case.g[..., :7]
    with pytest.raises(Exception, match=r"g is not \[1, S, H\] or \[1, S, H \* dk\]"):
        rule(case)
    case = DeltaCase("channels", [-1, 0])
    case.b = case.g
    with pytest.raises(Exception, match=r"b not \[1, S, H\]"):
        rule(case)
