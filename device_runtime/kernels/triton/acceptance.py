"""Exact acceptance of draft trees, as `speculate.acceptance` computes it on the host.

A program walks TREES trees at once from the root down: on a device one, in a test many. A tree has
num_nodes <= NODES nodes; unused ones have the parent -1. The outcome of a tree is int32 [3]: the
number of nodes on the path, the token after them, and a status:

* DECIDED,
* NOT_A_NUMBER: a logit of the path's last node is NaN or infinite,
* UNDECIDED: tokens outside the picks may be drawn there; the host must read all logits.
"""

import triton
import triton.language as tl

DECIDED: tl.constexpr = tl.constexpr(0)
NOT_A_NUMBER: tl.constexpr = tl.constexpr(1)
UNDECIDED: tl.constexpr = tl.constexpr(2)
RULES: tl.constexpr = tl.constexpr(4)  # temperature, top_k, top_p, min_p
NO_TOKEN: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def accept_greedy(
    # inputs
    tokens: "*i64", parents: "*i64", argmax: "*i64", highest: "*fp32",
    # shape
    num_trees, num_nodes,
    # outputs
    path: "*i32", outcome: "*i32",
    TREES: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """Walk down while the likeliest token of a node is one of its children.

    Grid [cdiv(num_trees, TREES)]. tokens, parents, argmax, highest (the largest logit) and path are
    [num_trees, num_nodes]; the path is padded with -1. outcome is [num_trees, 3].
    """
    tree = tl.program_id(0) * TREES + tl.arange(0, TREES)
    own_tokens, own_parents = _children(tokens, parents, tree, num_trees, num_nodes, NODES)
    column = tl.arange(0, NODES)
    walked = tl.full([TREES, NODES], -1, tl.int32)
    node, length = tl.zeros([TREES], tl.int32), tl.zeros([TREES], tl.int32)
    last, status = tl.zeros([TREES], tl.int32), tl.zeros([TREES], tl.int32)
    alive = tree < num_trees
    while tl.max(alive.to(tl.int32), 0) > 0:
        at_end = alive[:, None] & (column[None, :] == length[:, None])
        walked = tl.where(at_end, node[:, None], walked)
        length += alive.to(tl.int32)
        at = tree * num_nodes + node
        drawn = tl.load(argmax + at, mask=alive, other=0).to(tl.int32)
        is_number = _is_finite(tl.load(highest + at, mask=alive, other=0.0))
        last = tl.where(alive, drawn, last)
        status = tl.where(alive & (is_number == 0), NOT_A_NUMBER, status)
        child = _child(own_tokens, own_parents, node, drawn, NODES)
        alive = alive & is_number & (child > 0)
        node = tl.where(alive, child, node)
    _write(path, outcome, tree, num_trees, num_nodes, walked, length, last, status, NODES)


@triton.jit
def accept_sampled(
    # inputs
    tokens: "*i64", parents: "*i64", values: "*fp32", ids: "*i32", rules: "*fp64",
    uniforms: "*fp64",
    # shape
    num_trees, num_nodes, vocab_size,
    # outputs
    path: "*i32", outcome: "*i32",
    TREES: tl.constexpr, NODES: tl.constexpr, PICKS: tl.constexpr,
):  # fmt: skip
    """Walk down while the token that is drawn at a node is one of its children.

    As `accept_greedy`, but from the picks of each node: values and ids are
    [num_trees, num_nodes, PICKS]. rules [num_trees, 4] are temperature (not 0), top_k, top_p and
    min_p. uniforms [num_trees, num_nodes] are the random numbers of the next draws; a walk uses as
    many as the path has nodes.
    """
    tree = tl.program_id(0) * TREES + tl.arange(0, TREES)
    own_tokens, own_parents = _children(tokens, parents, tree, num_trees, num_nodes, NODES)
    column, pick = tl.arange(0, NODES), tl.arange(0, PICKS)
    walked = tl.full([TREES, NODES], -1, tl.int32)
    node, length = tl.zeros([TREES], tl.int32), tl.zeros([TREES], tl.int32)
    last, status = tl.zeros([TREES], tl.int32), tl.zeros([TREES], tl.int32)
    alive = tree < num_trees
    while tl.max(alive.to(tl.int32), 0) > 0:
        at_end = alive[:, None] & (column[None, :] == length[:, None])
        walked = tl.where(at_end, node[:, None], walked)
        uniform = tl.load(uniforms + tree * num_nodes + length, mask=alive, other=0.0)
        length += alive.to(tl.int32)
        at = (tree * num_nodes + node)[:, None] * PICKS + pick[None, :]
        x = tl.load(values + at, mask=alive[:, None], other=0.0)
        token = tl.load(ids + at, mask=alive[:, None], other=NO_TOKEN)
        drawn, found = _draw(x, token, rules, tree, alive, uniform, vocab_size, PICKS)
        last = tl.where(alive, drawn, last)
        status = tl.where(alive, found, status)
        child = _child(own_tokens, own_parents, node, drawn, NODES)
        alive = alive & (found == DECIDED) & (child > 0)
        node = tl.where(alive, child, node)
    _write(path, outcome, tree, num_trees, num_nodes, walked, length, last, status, NODES)


@triton.jit
def _children(tokens, parents, tree, num_trees, num_nodes, NODES: tl.constexpr):
    """Tokens and parents of all nodes, int32 [TREES, NODES] each."""
    column = tl.arange(0, NODES)
    inside = (tree < num_trees)[:, None] & (column < num_nodes)[None, :]
    at = tree[:, None] * num_nodes + column[None, :]
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
def _write(
    path, outcome, tree, num_trees, num_nodes, walked, length, last, status, NODES: tl.constexpr
):
    column = tl.arange(0, NODES)
    inside = tree < num_trees
    at = tree[:, None] * num_nodes + column[None, :]
    tl.store(path + at, walked, mask=inside[:, None] & (column < num_nodes)[None, :])
    tl.store(outcome + tree * 3, length, mask=inside)
    tl.store(outcome + tree * 3 + 1, last, mask=inside)
    tl.store(outcome + tree * 3 + 2, status, mask=inside)


@triton.jit
def _draw(x, token, rules, tree, alive, uniform, vocab_size, PICKS: tl.constexpr):
    """A token of the request's distribution, drawn as `sampling` draws it, and a status.

    x fp32 and token int32 are [TREES, PICKS], descending.
    """
    pick = tl.arange(0, PICKS)[None, :]
    temperature = tl.load(rules + tree * RULES, mask=alive, other=1.0)
    top_k = tl.load(rules + tree * RULES + 1, mask=alive, other=0.0).to(tl.int32)
    top_p = tl.load(rules + tree * RULES + 2, mask=alive, other=1.0)
    min_p = tl.load(rules + tree * RULES + 3, mask=alive, other=0.0)
    cuts = (top_k > 0) & (top_k < vocab_size)
    kth = tl.max(tl.where(pick == tl.minimum(top_k, PICKS)[:, None] - 1, x, -float("inf")), 1)
    kept = (pick < vocab_size) & (x > -float("inf")) & ((x >= kth[:, None]) | (cuts == 0)[:, None])
    least = tl.min(x, 1)  # the last pick: if it is kept, later tokens may be kept as well
    is_decided = (vocab_size <= PICKS) | (cuts & (top_k <= PICKS) & (least < kth))
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
    drawn = _by_token(share, token, kept, uniform, vocab_size)
    status = tl.where(is_decided, DECIDED, UNDECIDED)
    first = tl.sum(tl.where(pick == 0, x, 0.0), 1)  # max() would ignore NaN
    return drawn, tl.where(_is_finite(first), status, NOT_A_NUMBER)


@triton.jit
def _by_token(share, token, kept, uniform, vocab_size):
    """Inverse of the cumulative distribution over token ids.

    Bisects the ids for the first token at which the sum of shares exceeds the random number.
    """
    target = uniform * tl.sum(share, 1)
    first = tl.min(token, 1) * 0
    last = first + vocab_size - 1
    for _ in tl.range(0, 31):
        middle = first + (last - first) // 2
        edge = tl.sum(tl.where(token <= middle[:, None], share, 0.0), 1)
        last = tl.where(edge > target, middle, last)
        first = tl.where(edge > target, first, tl.minimum(middle + 1, last))
    final = tl.max(tl.where(kept, token, 0), 1)
    return tl.minimum(first, final)
