"""The gated delta rule (arXiv 2412.06464) as functions of plain ONNX, also for token trees.

The state of a head is a matrix M [dk, dv]. A token with key k, value v, log decay g and rate b
updates the previous matrix N to M = exp(g) N + k d^T, with d = b (v - exp(g) N^T k), and outputs
M^T q. Shapes: S tokens, H value heads, J key heads, each shared by H / J value heads.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm.core import onnx_functions
from edgellm.export.onnx.builder import Op
from edgellm.export.onnx.functions.attention import integers, local_function

_LEVELS = 16  # a pass has fewer than 2 ** 16 tokens
_LOOP = "doubling"
_NEVER = -1e30  # log decay between tokens that do not attend to each other


def gated_delta_rule() -> ir.Function:
    """Outputs y and deltas d [1, S, H * dv] of tokens, from the state and their ancestors.

    q and k [1, S, J * dk], v [1, S, H * dv], g and b [1, S, H], state [1, H, dk, dv], tree_mask
    bool [S, S], parents int64 [S]; all float32. The deltas of a token depend on those of its
    ancestors: a triangular system (the WY form), inverted in log2(S) steps.
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
        from_state, between = _decays(op, g, tree_mask)
        alike = op.Mul(op.MatMul(k, _transposed(op, k)), between)
        known = op.Mul(op.MatMul(k, state), from_state)
        inverse = _inverse(op, op.Mul(alike, rates))
        deltas = op.MatMul(inverse, op.Mul(op.Sub(v, known), rates))
        return _read(op, q, k, deltas, state, (from_state, between)), _rows(op, deltas)

    return local_function(onnx_functions.DELTA_RULE, "q k v g b state tree_mask parents", body)


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
        return _read(op, q, k, _value_heads(op, d, state), state, _decays(op, g, tree_mask))

    return local_function(onnx_functions.DECAYING_RULE, "q k d g state tree_mask parents", body)


def delta_update() -> ir.Function:
    """The state [1, H, dk, dv] after a chain of rows: k [1, M, J * dk], d, and g [1, M, H]."""

    def body(op: Op, state: ir.Value, k: ir.Value, d: ir.Value, g: ir.Value) -> ir.Value:
        k, d = _key_heads(op, k, state), _value_heads(op, d, state)
        decayed = op.Transpose(op.CumSum(g, op.Constant(value_int=1)), perm=[0, 2, 1])  # [1, H, M]
        whole = op.Gather(decayed, integers(op, -1), axis=2)
        left = op.Unsqueeze(op.Exp(op.Sub(whole, decayed)), integers(op, 3))
        new = op.MatMul(op.Transpose(op.Mul(k, left), perm=[0, 1, 3, 2]), d)
        return op.Add(op.Mul(state, op.Unsqueeze(op.Exp(whole), integers(op, 3))), new)

    return local_function(onnx_functions.DELTA_UPDATE, "state k d g", body)


def _decays(op: Op, g: ir.Value, tree_mask: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Decay of each token since the state [1, H, S, 1], and since its ancestors [1, H, S, S]."""
    summed = op.MatMul(op.Cast(tree_mask, to=int(ir.DataType.FLOAT)), g)
    log_decay = op.Transpose(op.Unsqueeze(summed, integers(op, 3)), perm=[0, 2, 1, 3])
    between = op.Sub(log_decay, _transposed(op, log_decay))
    return op.Exp(log_decay), op.Exp(op.Where(tree_mask, between, op.Constant(value_float=_NEVER)))


def _read(
    op: Op, q: ir.Value, k: ir.Value, d: ir.Value, state: ir.Value, decays: tuple[ir.Value, ...]
) -> ir.Value:
    """Outputs of tokens, from the state and the updates of their ancestors and themselves."""
    from_state, between = decays
    scores = op.Mul(op.MatMul(q, _transposed(op, k)), between)
    past = op.Mul(op.MatMul(q, state), from_state)
    return _rows(op, op.Add(past, op.MatMul(scores, d)))


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
    going = op.Constant(value=ir.tensor(np.array(True)))
    found = op.outputs(4, "Loop", steps, going, unit, below, rows, one, body=_doubling())
    return found[0]


def _doubling() -> ir.Graph:
    """Loop body that doubles the block size; all values are loop-carried, without outer reads."""
    carried = (
        ("step", ir.DataType.INT64, 0),
        ("going", ir.DataType.BOOL, 0),
        ("unit", ir.DataType.FLOAT, 4),
        ("below", ir.DataType.FLOAT, 4),
        ("rows", ir.DataType.INT64, 1),
        ("size", ir.DataType.INT64, 0),
    )
    inputs = [
        ir.Value(name=f"{_LOOP}.{name}", type=ir.TensorType(kind), shape=ir.Shape([None] * axes))
        for name, kind, axes in carried
    ]
    op = Op(ir.DataType.FLOAT)
    with op.scope(_LOOP):  # a function's body and its loop share one name space
        outputs = _doubled(op, *inputs[1:])
    for value, like in zip(outputs, inputs[1:], strict=True):
        value.type, value.shape = like.type, like.shape
    return ir.Graph(inputs, outputs, nodes=op.nodes, name=_LOOP)


def _doubled(
    op: Op, going: ir.Value, unit: ir.Value, below: ir.Value, rows: ir.Value, size: ir.Value
) -> list[ir.Value]:
    two = op.Constant(value_int=2)
    block = op.Div(rows, size)
    pair, place = op.Div(block, two), op.Mod(block, two)
    row, column = integers(op, 1), integers(op, 0)
    alike = op.Equal(op.Unsqueeze(pair, row), op.Unsqueeze(pair, column))
    lower = op.Greater(op.Unsqueeze(place, row), op.Unsqueeze(place, column))
    corner = op.Where(op.And(alike, lower), below, op.Constant(value_float=0.0))
    doubled = op.Sub(unit, op.MatMul(unit, op.MatMul(corner, unit)))
    same = [op.Identity(each) for each in (going, below, rows)]
    return [same[0], doubled, *same[1:], op.Mul(size, two)]
