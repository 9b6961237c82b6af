"""The gated delta rule (arXiv 2412.06464) as functions of plain ONNX, also for token trees.

The state of a head is a matrix M [dk, dv]. A token with key k, value v, log decay g and rate b
updates the previous matrix N to M = exp(g) N + k d^T, with d = b (v - (exp(g) N)^T k), and outputs
M^T q. A head has C decays: one, or one for each channel of its keys (Kimi Delta Attention, arXiv
2510.26692). Shapes: S tokens, H value heads, J key heads, each shared by H / J value heads.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from edgellm.core import onnx_functions
from edgellm.export.onnx.builder import Op
from edgellm.export.onnx.functions.attention import integers, local_function

_LEVELS = 16  # a pass has fewer than 2 ** 16 tokens
_NEVER = -1e30  # log decay between tokens that do not attend to each other


def gated_delta_rule(*, by_channel: bool = False) -> ir.Function:
    """Outputs y and deltas d [1, S, H * dv] of tokens, from the state and their ancestors.

    q and k [1, S, J * dk], v [1, S, H * dv], g [1, S, H * C], b [1, S, H], state [1, H, dk, dv],
    tree_mask bool [S, S], parents int64 [S]; all float32. C is dk if `by_channel`, else 1. The
    deltas of a token depend on those of its ancestors: a triangular system (the WY form), inverted
    in log2(S) steps.
    """

    def body(
        op: Op,
        q: ir.Value,
        k: ir.Value,
        v: ir.Value,
        g: ir.Value,
        b: ir.Value,
        state: ir.Value,
        tree_mask: ir.Value,
        parents: ir.Value,
    ) -> tuple[ir.Value, ir.Value]:
        del parents  # for kernels; the mask is equivalent
        q, k = (_key_heads(op, each, state) for each in (q, k))  # [1, H, S, dk]
        v = _value_heads(op, v, state)
        rates = op.Transpose(op.Unsqueeze(b, integers(op, 3)), perm=[0, 2, 1, 3])  # [1, H, S, 1]
        kind = _ChannelDecays if by_channel else _Decays
        decays = kind(op=op, g=g, state=state, tree_mask=tree_mask)
        alike, scores = decays.products(op, (k, q), k)
        known = decays.recall(op, k, state)
        inverse = _inverse(op, op.Mul(alike, rates))
        deltas = op.MatMul(inverse, op.Mul(op.Sub(v, known), rates))
        y = op.Add(decays.recall(op, q, state), op.MatMul(scores, deltas))
        return _rows(op, y), _rows(op, deltas)

    name = onnx_functions.CHANNEL_DELTA_RULE if by_channel else onnx_functions.DELTA_RULE
    return local_function(name, "q k v g b state tree_mask parents", body)


def decaying_rule() -> ir.Function:
    """The rule without the delta term, d = v (Mamba 2, arXiv 2405.21060); output y."""

    def body(
        op: Op,
        q: ir.Value,
        k: ir.Value,
        d: ir.Value,
        g: ir.Value,
        state: ir.Value,
        tree_mask: ir.Value,
        parents: ir.Value,
    ) -> ir.Value:
        del parents
        q, k = (_key_heads(op, each, state) for each in (q, k))
        decays = _Decays(op=op, g=g, state=state, tree_mask=tree_mask)
        (scores,) = decays.products(op, (q,), k)
        new = op.MatMul(scores, _value_heads(op, d, state))
        return _rows(op, op.Add(decays.recall(op, q, state), new))

    return local_function(onnx_functions.DECAYING_RULE, "q k d g state tree_mask parents", body)


def delta_update() -> ir.Function:
    """The state [1, H, dk, dv] after a chain of rows: k [1, M, J * dk], d, and g [1, M, H * C]."""

    def body(op: Op, state: ir.Value, k: ir.Value, d: ir.Value, g: ir.Value) -> ir.Value:
        k, d = _key_heads(op, k, state), _value_heads(op, d, state)
        decayed = op.CumSum(_by_head(op, g, state), op.Constant(value_int=2))  # [1, H, M, C]
        whole = op.Gather(decayed, integers(op, -1), axis=2)
        left = op.Exp(op.Sub(whole, decayed))
        new = op.MatMul(op.Transpose(op.Mul(k, left), perm=[0, 1, 3, 2]), d)
        return op.Add(op.Mul(state, _transposed(op, op.Exp(whole))), new)

    return local_function(onnx_functions.DELTA_UPDATE, "state k d g", body)


class _Decays:
    """Decays of tokens since the state and since their ancestors, one of each head."""

    def __init__(self, *, op: Op, g: ir.Value, state: ir.Value, tree_mask: ir.Value) -> None:
        """Decays from g [1, S, H * C]."""
        summed = op.MatMul(op.Cast(tree_mask, to=int(ir.DataType.FLOAT)), g)
        self.tree_mask, self.logarithms = tree_mask, _by_head(op, summed, state)  # [1, H, S, C]
        self.from_state = op.Exp(self.logarithms)

    def recall(self, op: Op, x: ir.Value, state: ir.Value) -> ir.Value:
        """X [1, H, S, dk] times the decayed state -> [1, H, S, dv]."""
        return op.Mul(op.MatMul(x, state), self.from_state)

    def products(self, op: Op, given: tuple[ir.Value, ...], k: ir.Value) -> tuple[ir.Value, ...]:
        """Each x [1, H, S, dk] times the decayed k of its ancestors and its own -> [1, H, S, S]."""
        between = _between(op, self.logarithms, self.tree_mask)
        return tuple(op.Mul(op.MatMul(x, _transposed(op, k)), between) for x in given)


class _ChannelDecays(_Decays):
    """The same for each channel of a head's keys."""

    def recall(self, op: Op, x: ir.Value, state: ir.Value) -> ir.Value:
        """See `_Decays`."""
        return op.MatMul(op.Mul(x, self.from_state), state)

    def products(self, op: Op, given: tuple[ir.Value, ...], k: ir.Value) -> tuple[ir.Value, ...]:
        """See `_Decays`; channels are added one by one, since all at once are [1, H, S, S, dk]."""
        rows = op.Shape(k, start=2, end=3)
        shape = op.Concat(op.Shape(k, start=0, end=3), rows, axis=0)
        zeros = op.Expand(op.Constant(value_float=0.0), shape)
        steps, count = op.Squeeze(op.Shape(k, start=3, end=4)), len(given)
        carried = (*[zeros] * count, *given, k, self.logarithms, self.tree_mask)
        return tuple(_loop(op, "channels", _add_channel, steps, carried)[:count])


def _between(op: Op, logarithms: ir.Value, tree_mask: ir.Value) -> ir.Value:
    """Decays since ancestors [1, H, S, S] from those since the state [1, H, S, 1]."""
    between = op.Sub(logarithms, _transposed(op, logarithms))
    return op.Exp(op.Where(tree_mask, between, op.Constant(value_float=_NEVER)))


def _add_channel(op: Op, channel: ir.Value, *carried: ir.Value) -> list[ir.Value]:
    """Add a channel to sums; the values are those of `_ChannelDecays.products`."""
    *both, k, logarithms, tree_mask = carried
    sums, given = both[: len(both) // 2], both[len(both) // 2 :]
    place = op.Unsqueeze(channel, integers(op, 0))
    key, decays = (op.Gather(each, place, axis=3) for each in (k, logarithms))
    decayed = op.Mul(_transposed(op, key), _between(op, decays, tree_mask))
    new = [op.Mul(op.Gather(x, place, axis=3), decayed) for x in given]
    added = [op.Add(total, each) for total, each in zip(sums, new, strict=True)]
    return [*added, *(op.Identity(each) for each in carried[len(sums) :])]


def _by_head(op: Op, g: ir.Value, state: ir.Value) -> ir.Value:
    """[1, S, H * C] -> [1, H, S, C]."""
    heads = op.Shape(state, start=1, end=2)
    apart = op.Reshape(g, op.Concat(integers(op, 0, 0), heads, integers(op, -1), axis=0))
    return op.Transpose(apart, perm=[0, 2, 1, 3])


def _transposed(op: Op, x: ir.Value) -> ir.Value:
    return op.Transpose(x, perm=[0, 1, 3, 2])


def _key_heads(op: Op, x: ir.Value, state: ir.Value) -> ir.Value:
    """[1, S, J * dk] -> [1, H, S, dk], each key for its value heads."""
    width = op.Shape(state, start=2, end=3)
    apart = op.Reshape(x, op.Concat(integers(op, 0, 0, -1), width, axis=0))
    by_head = op.Unsqueeze(op.Transpose(apart, perm=[0, 2, 1, 3]), integers(op, 2))
    heads = op.Shape(apart, start=2, end=3)
    sharing = op.Div(op.Shape(state, start=1, end=2), heads)
    one = integers(op, 1)
    shared = op.Expand(by_head, op.Concat(one, one, sharing, one, one, axis=0))
    merged = op.Concat(integers(op, 0, -1), op.Shape(x, start=1, end=2), width, axis=0)
    return op.Reshape(shared, merged)


def _value_heads(op: Op, x: ir.Value, state: ir.Value) -> ir.Value:
    """[1, S, H * dv] -> [1, H, S, dv]."""
    width = op.Shape(state, start=3, end=4)
    apart = op.Reshape(x, op.Concat(integers(op, 0, 0, -1), width, axis=0))
    return op.Transpose(apart, perm=[0, 2, 1, 3])


def _rows(op: Op, x: ir.Value) -> ir.Value:
    """[1, H, S, dv] -> [1, S, H * dv]."""
    return op.Reshape(op.Transpose(x, perm=[0, 2, 1, 3]), integers(op, 0, 0, -1))


def _inverse(op: Op, below: ir.Value) -> ir.Value:
    """(I + L)^-1, with L the strictly lower triangle of `below` [1, H, S, S].

    Two inverted diagonal blocks give the block of twice the size. The inverse is also a sum of
    powers of L, but these may be larger by many orders.
    """
    count = op.Shape(below, start=2, end=3)
    zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
    rows = op.Range(zero, op.Squeeze(count), one)
    column = op.Unsqueeze(rows, integers(op, 0))
    is_own = op.Equal(op.Unsqueeze(rows, integers(op, 1)), column)
    unit = op.Expand(op.Cast(is_own, to=int(ir.DataType.FLOAT)), op.Shape(below))
    halves = integers(op, *(1 << level for level in range(_LEVELS)))
    needed = op.Cast(op.Less(halves, count), to=int(ir.DataType.INT64))
    steps = op.ReduceSum(needed, keepdims=0)
    return _loop(op, "doubling", _doubled, steps, (unit, below, rows, one))[0]


def _doubled(op: Op, step: ir.Value, *carried: ir.Value) -> list[ir.Value]:
    """Double the block size; the values are those of `_inverse`."""
    del step
    unit, below, rows, size = carried
    two = op.Constant(value_int=2)
    block = op.Div(rows, size)
    pair, place = op.Div(block, two), op.Mod(block, two)
    row, column = integers(op, 1), integers(op, 0)
    alike = op.Equal(op.Unsqueeze(pair, row), op.Unsqueeze(pair, column))
    lower = op.Greater(op.Unsqueeze(place, row), op.Unsqueeze(place, column))
    corner = op.Where(op.And(alike, lower), below, op.Constant(value_float=0.0))
    doubled = op.Sub(unit, op.MatMul(unit, op.MatMul(corner, unit)))
    return [doubled, *(op.Identity(each) for each in (below, rows)), op.Mul(size, two)]


def _loop(
    op: Op,
    name: str,
    body: Callable[..., list[ir.Value]],
    steps: ir.Value,
    carried: tuple[ir.Value, ...],
) -> tuple[ir.Value, ...]:
    """The carried values after a loop; `body` maps a step's index and values to the next values.

    All values are carried, without outer reads. Their types are those of `_LOOPS`.
    """
    inner = Op(ir.DataType.FLOAT)
    inputs = [
        ir.Value(name=f"{name}.{index}", type=ir.TensorType(kind), shape=ir.Shape([None] * axes))
        for index, (kind, axes) in enumerate((*_COUNTERS, *_LOOPS[name]))
    ]
    step, going, *values = inputs
    with inner.scope(name):  # a function's body and its loop share one name space
        outputs = [inner.Identity(going), *body(inner, step, *values)]
    for value, like in zip(outputs, inputs[1:], strict=True):
        value.type, value.shape = like.type, like.shape
    graph = ir.Graph(inputs, outputs, nodes=inner.nodes, name=name)
    always = op.Constant(value=ir.tensor(np.array(True)))
    return op.outputs(len(carried), "Loop", steps, always, *carried, body=graph)


_COUNTERS = (ir.DataType.INT64, 0), (ir.DataType.BOOL, 0)  # index of a step; whether to go on
_MATRICES = ir.DataType.FLOAT, 4
_LOOPS = {
    "doubling": (_MATRICES, _MATRICES, (ir.DataType.INT64, 1), (ir.DataType.INT64, 0)),
    "channels": (*[_MATRICES] * 6, (ir.DataType.BOOL, 2)),
}
