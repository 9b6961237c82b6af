"""Which drafted tokens become part of the answer: exact acceptance, as `speculate.accept` has it.

A program walks TREES trees at once from the root down: on a device one, in a test many. Trees have
N nodes, N <= NODES; a node that is not there has the parent -1. The outcome of a tree is int32 [3]:
how many nodes the path has, the token after them, and a status:

* SETTLED,
* NOT_A_NUMBER: the base computed something else at the path's last node,
* UNSETTLED: more tokens than the picks may be drawn there; the host must look at all logits.
"""

import triton
import triton.language as tl

SETTLED: tl.constexpr = tl.constexpr(0)
NOT_A_NUMBER: tl.constexpr = tl.constexpr(1)
UNSETTLED: tl.constexpr = tl.constexpr(2)
RULES: tl.constexpr = tl.constexpr(4)  # temperature, top_k, top_p, min_p
NO_TOKEN: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def accept_greedy(
    tokens, parents, argmax, highest, COUNT, N, path, outcome,
    TREES: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """Walk down while the likeliest token of a node is one of its children.

    Grid [cdiv(COUNT, TREES)]. tokens, parents and argmax int64 [COUNT, N], highest fp32 [COUNT, N];
    path int32 [COUNT, N], behind its end -1; outcome int32 [COUNT, 3].
    """
    tree = tl.program_id(0) * TREES + tl.arange(0, TREES)
    own_tokens, own_parents = _children(tokens, parents, tree, COUNT, N, NODES)
    column = tl.arange(0, NODES)
    walked = tl.full([TREES, NODES], -1, tl.int32)
    node, length = tl.zeros([TREES], tl.int32), tl.zeros([TREES], tl.int32)
    last, status = tl.zeros([TREES], tl.int32), tl.zeros([TREES], tl.int32)
    alive = tree < COUNT
    while tl.max(alive.to(tl.int32), 0) > 0:
        at_end = alive[:, None] & (column[None, :] == length[:, None])
        walked = tl.where(at_end, node[:, None], walked)
        length += alive.to(tl.int32)
        at = tree * N + node
        drawn = tl.load(argmax + at, mask=alive, other=0).to(tl.int32)
        is_number = _is_finite(tl.load(highest + at, mask=alive, other=0.0))
        last = tl.where(alive, drawn, last)
        status = tl.where(alive & (is_number == 0), NOT_A_NUMBER, status)
        child = _child(own_tokens, own_parents, node, drawn, NODES)
        alive = alive & is_number & (child > 0)
        node = tl.where(alive, child, node)
    _write(path, outcome, tree, COUNT, N, walked, length, last, status, NODES)


@triton.jit
def accept_sampled(
    tokens, parents, values, ids, rules, uniforms, COUNT, N, V, path, outcome,
    TREES: tl.constexpr, NODES: tl.constexpr, PICKS: tl.constexpr,
):  # fmt: skip
    """Walk down while the token that is drawn at a node is one of its children.

    As `accept_greedy`, but with the picks of each node, values fp32 and ids int32
    [COUNT, N, PICKS]; V: size of the vocabulary. rules fp64 [COUNT, 4]: temperature, top_k, top_p,
    min_p of a request that is not greedy. uniforms fp64 [COUNT, N]: the random numbers of the next
    draws; as many are spent as the outcome's first number says.
    """
    tree = tl.program_id(0) * TREES + tl.arange(0, TREES)
    own_tokens, own_parents = _children(tokens, parents, tree, COUNT, N, NODES)
    column, pick = tl.arange(0, NODES), tl.arange(0, PICKS)
    walked = tl.full([TREES, NODES], -1, tl.int32)
    node, length = tl.zeros([TREES], tl.int32), tl.zeros([TREES], tl.int32)
    last, status = tl.zeros([TREES], tl.int32), tl.zeros([TREES], tl.int32)
    alive = tree < COUNT
    while tl.max(alive.to(tl.int32), 0) > 0:
        at_end = alive[:, None] & (column[None, :] == length[:, None])
        walked = tl.where(at_end, node[:, None], walked)
        uniform = tl.load(uniforms + tree * N + length, mask=alive, other=0.0)
        length += alive.to(tl.int32)
        at = (tree * N + node)[:, None] * PICKS + pick[None, :]
        x = tl.load(values + at, mask=alive[:, None], other=0.0)
        token = tl.load(ids + at, mask=alive[:, None], other=NO_TOKEN)
        drawn, found = _draw(x, token, rules, tree, alive, uniform, V, PICKS)
        last = tl.where(alive, drawn, last)
        status = tl.where(alive, found, status)
        child = _child(own_tokens, own_parents, node, drawn, NODES)
        alive = alive & (found == SETTLED) & (child > 0)
        node = tl.where(alive, child, node)
    _write(path, outcome, tree, COUNT, N, walked, length, last, status, NODES)


@triton.jit
def _children(tokens, parents, tree, COUNT, N, NODES: tl.constexpr):
    """Tokens and parents of all nodes, int32 [TREES, NODES]."""
    column = tl.arange(0, NODES)
    inside = (tree < COUNT)[:, None] & (column < N)[None, :]
    at = tree[:, None] * N + column[None, :]
    own_tokens = tl.load(tokens + at, mask=inside, other=-1).to(tl.int32)
    return own_tokens, tl.load(parents + at, mask=inside, other=-1).to(tl.int32)


@triton.jit
def _child(own_tokens, own_parents, node, drawn, NODES: tl.constexpr):
    """The last child of `node` with a token; 0 if there is none."""
    column = tl.arange(0, NODES)
    fits = (own_parents == node[:, None]) & (own_tokens == drawn[:, None])
    return tl.max(tl.where(fits, column[None, :], 0), 1)


@triton.jit
def _is_finite(x):
    return (x == x) & (tl.abs(x) < float("inf"))


@triton.jit
def _write(path, outcome, tree, COUNT, N, walked, length, last, status, NODES: tl.constexpr):
    column = tl.arange(0, NODES)
    inside = tree < COUNT
    at = tree[:, None] * N + column[None, :]
    tl.store(path + at, walked, mask=inside[:, None] & (column < N)[None, :])
    tl.store(outcome + tree * 3, length, mask=inside)
    tl.store(outcome + tree * 3 + 1, last, mask=inside)
    tl.store(outcome + tree * 3 + 2, status, mask=inside)


@triton.jit
def _draw(x, token, rules, tree, alive, uniform, V, PICKS: tl.constexpr):
    """A token of the distribution that a request asks for, as `sampling` draws it, and a status.

    x fp32 and token int32 [TREES, PICKS], best first.
    """
    pick = tl.arange(0, PICKS)[None, :]
    temperature = tl.load(rules + tree * RULES, mask=alive, other=1.0)
    top_k = tl.load(rules + tree * RULES + 1, mask=alive, other=0.0).to(tl.int32)
    top_p = tl.load(rules + tree * RULES + 2, mask=alive, other=1.0)
    min_p = tl.load(rules + tree * RULES + 3, mask=alive, other=0.0)
    cuts = (top_k > 0) & (top_k < V)
    kth = tl.max(tl.where(pick == tl.minimum(top_k, PICKS)[:, None] - 1, x, -float("inf")), 1)
    kept = (pick < V) & (x > -float("inf")) & ((x >= kth[:, None]) | (cuts == 0)[:, None])
    least = tl.min(x, 1)  # the last pick: if it is kept, a token behind it may be as well
    is_settled = (PICKS >= V) | (cuts & (top_k <= PICKS) & (least < kth))
    largest = tl.max(x, 1)
    share = tl.where(kept, x.to(tl.float64) / temperature[:, None], -float("inf"))
    share = tl.exp(share - (largest.to(tl.float64) / temperature)[:, None])
    share = share / tl.sum(share, 1)[:, None]
    before = tl.cumsum(share, 1) - share
    kept &= (before < top_p[:, None]) | (pick == 0) | (top_p >= 1)[:, None]
    share = tl.where(kept, share, 0.0)
    share = share / tl.sum(share, 1)[:, None]
    kept &= share >= (min_p * tl.max(share, 1))[:, None]
    share = tl.where(kept, share, 0.0)
    share = share / tl.sum(share, 1)[:, None]
    drawn = _by_token(share, token, kept, uniform, V)
    status = tl.where(is_settled, SETTLED, UNSETTLED)
    first = tl.sum(tl.where(pick == 0, x, 0.0), 1)  # max() would pass over what is no number
    return drawn, tl.where(_is_finite(first), status, NOT_A_NUMBER)


@triton.jit
def _by_token(share, token, kept, uniform, V):
    """The token under whose share of the line a number falls, the tokens standing by their ids.

    It is the first at which the sum of shares exceeds the number, found by halving the ids.
    """
    target = uniform * tl.sum(share, 1)
    first = tl.min(token, 1) * 0
    last = first + V - 1
    for _ in tl.range(0, 31):
        middle = first + (last - first) // 2
        edge = tl.sum(tl.where(token <= middle[:, None], share, 0.0), 1)
        last = tl.where(edge > target, middle, last)
        first = tl.where(edge > target, first, tl.minimum(middle + 1, last))
    final = tl.max(tl.where(kept, token, 0), 1)
    return tl.minimum(first, final)
