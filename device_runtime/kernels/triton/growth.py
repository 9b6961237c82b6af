"""The dynamic tree of EAGLE-2 on the device: what `Pool` and `FixedTree` are on the host.

The pool is tokens and parents int64, scores fp64 (sums of logarithms), and `own` fp32, what the
draft gave each node under its parent; node 0 is the root. Of equal scores the earlier node is the
better one. `start` int64 [2] says where a round begins: rows of the cache before it, and the
position of the first row behind them.
"""

import triton
import triton.language as tl

WORST: tl.constexpr = tl.constexpr(-float("inf"))
POINTS: tl.constexpr = tl.constexpr(11)  # of a curve of rates


@triton.jit
def grow_level(
    candidates, log_probs, nodes, start, table, tokens, parents, scores, own, seen,
    STRIDE, BEGIN, R, K, USED, WIDTH, SLOTS, LEVEL, AXES,
    new_nodes, new_tokens, above, positions, slot, mask,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    """Add one level to the pool and choose the WIDTH best of it, which get children next; grid [1].

    candidates int64 and log_probs fp32 [R, STRIDE], of which the first K are children of `nodes`
    int32 [R], go to the pool from BEGIN on; R * K <= SIZE. A node's score is its parent's and, by
    SCORED, its log-probability ("draft"), or what a curve makes of its probability ("rates":
    `table` fp64 [2, POINTS], probabilities and values between which lines are drawn); or it is
    that of its place in the pool, whatever the draft gave ("places": `table` fp64). `seen` int8
    [SLOTS, SLOTS] says which slots of the draft's cache each slot sees: 0 stands for the root, USED
    slots follow it, and the chosen nodes take the next.

    Of the pass over the chosen nodes: new_nodes int32 [WIDTH], new_tokens int64 [WIDTH], `above`
    int32 [WIDTH] the slot whose hidden row each continues, positions int64 [AXES, WIDTH], `slot`
    int64 [1] where the rows go, and mask int8 [WIDTH, USED + WIDTH].
    """
    index = tl.arange(0, SIZE)
    inside = index < R * K
    parent = tl.load(nodes + index // K, mask=inside, other=0).to(tl.int64)
    at = (index // K) * STRIDE + index % K
    token = tl.load(candidates + at, mask=inside, other=0)
    score = _score(log_probs, nodes, table, scores, index, STRIDE, BEGIN, R, K, SCORED)
    tl.store(tokens + BEGIN + index, token, mask=inside)
    tl.store(parents + BEGIN + index, parent, mask=inside)
    tl.store(scores + BEGIN + index, score, mask=inside)
    tl.store(own + BEGIN + index, tl.load(log_probs + at, mask=inside, other=0.0), mask=inside)
    rank = tl.zeros([SIZE], tl.int32)
    for first in tl.range(0, R * K, BLOCK):
        other = first + tl.arange(0, BLOCK)
        others = _score(log_probs, nodes, table, scores, other, STRIDE, BEGIN, R, K, SCORED)
        ahead = _ahead(others[None, :], other[None, :], score[:, None], index[:, None])
        rank += tl.sum((ahead & (other < R * K)[None, :]).to(tl.int32), 1)
    chosen = inside & (rank < WIDTH)
    own_above = tl.where(LEVEL == 0, 0, USED - R + 1 + index // K)
    tl.store(new_nodes + rank, BEGIN + index, mask=chosen)
    tl.store(new_tokens + rank, token, mask=chosen)
    tl.store(above + rank, own_above, mask=chosen)
    rows, position = tl.load(start), tl.load(start + 1)
    tl.store(slot, rows + USED)
    for axis in tl.range(0, AXES):
        row = positions + axis * WIDTH + rank
        tl.store(row, tl.full([SIZE], 0, tl.int64) + position + LEVEL, mask=chosen)
    for first in tl.range(0, USED + WIDTH + 1, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        here = chosen[:, None] & (column <= USED + WIDTH)
        above_row = seen + own_above[:, None] * SLOTS + column
        is_seen = tl.load(above_row, mask=here & (column <= USED), other=0)
        is_seen = tl.where(column == USED + 1 + rank[:, None], 1, is_seen).to(tl.int8)
        tl.store(seen + (USED + 1 + rank)[:, None] * SLOTS + column, is_seen, mask=here)
        own_row = mask + rank[:, None] * (USED + WIDTH)
        tl.store(own_row + column - 1, is_seen, mask=here & (column > 0))


@triton.jit
def select_tree(
    tokens, parents, scores, own, COUNT, ROOM, tree_tokens, tree_parents, tree_own, chosen_nodes,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The root with the ROOM best of COUNT nodes of a pool, in the pool's order; grid [1].

    tree_tokens and tree_parents int64, tree_own fp32, chosen_nodes int32, [1 + ROOM]. A child's
    score is at most its parent's, and it stands behind it: so the parent is chosen, too. What
    scores minus infinity is not chosen; where too few nodes are, the parent behind them is -1.
    """
    index = tl.arange(0, SIZE)
    inside = index < COUNT
    score = tl.load(scores + index, mask=inside, other=WORST)
    rank = tl.zeros([SIZE], tl.int32)
    for first in tl.range(1, COUNT, BLOCK):
        other = first + tl.arange(0, BLOCK)
        others = tl.load(scores + other, mask=other < COUNT, other=WORST)
        ahead = _ahead(others[None, :], other[None, :], score[:, None], index[:, None])
        rank += tl.sum((ahead & (other < COUNT)[None, :]).to(tl.int32), 1)
    chosen = inside & ((index == 0) | ((rank < ROOM) & (score > WORST)))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    parent = tl.load(parents + index, mask=chosen, other=-1).to(tl.int32)
    parent_place = tl.gather(place, tl.maximum(parent, 0), 0)
    tl.store(tree_tokens + place, tl.load(tokens + index, mask=chosen, other=0), mask=chosen)
    tl.store(tree_own + place, tl.load(own + index, mask=chosen, other=0.0), mask=chosen)
    above = tl.where(parent < 0, -1, parent_place).to(tl.int64)
    tl.store(tree_parents + place, above, mask=chosen)
    tl.store(chosen_nodes + place, index, mask=chosen)
    missing = (index >= tl.sum(chosen.to(tl.int32), 0)) & (index <= ROOM)
    tl.store(tree_tokens + index, tl.zeros([SIZE], tl.int64), mask=missing)
    tl.store(tree_own + index, tl.zeros([SIZE], tl.float32), mask=missing)
    tl.store(tree_parents + index, tl.full([SIZE], -1, tl.int64), mask=missing)
    tl.store(chosen_nodes + index, tl.full([SIZE], -1, tl.int32), mask=missing)


@triton.jit
def lay_out(parents, start, N, AXES, positions, mask, NODES: tl.constexpr):
    """Positions int64 [AXES, N] of a tree's nodes, mask int8 [N, N]: what each may see; grid [1].

    A node with the parent -1 sees itself.
    """
    node = tl.arange(0, NODES)
    inside = node < N
    seen = node[:, None] == node[None, :]
    depth = tl.zeros([NODES], tl.int64)
    above = tl.load(parents + node, mask=inside, other=-1).to(tl.int32)
    while tl.max(above, 0) >= 0:
        seen = seen | (above[:, None] == node[None, :])
        depth += (above >= 0).to(tl.int64)
        above = tl.load(parents + above, mask=above >= 0, other=-1).to(tl.int32)
    position = tl.load(start + 1) + depth
    for axis in tl.range(0, AXES):
        tl.store(positions + axis * N + node, position, mask=inside)
    square = inside[:, None] & inside[None, :]
    tl.store(mask + node[:, None] * N + node[None, :], seen.to(tl.int8), mask=square)


@triton.jit
def _score(
    log_probs, nodes, table, scores, index, STRIDE, BEGIN, R, K, SCORED: tl.constexpr
):  # fmt: skip
    """Of candidates by their number; what lies behind the last is the worst."""
    inside = index < R * K
    if SCORED == "places":
        score = tl.load(table + BEGIN + index, mask=inside, other=WORST)
    else:
        at = (index // K) * STRIDE + index % K
        score = tl.load(log_probs + at, mask=inside, other=0.0).to(tl.float64)
        if SCORED == "rates":
            score = _rate(tl.exp(score), table)
        parent = tl.load(nodes + index // K, mask=inside, other=0).to(tl.int64)
        score += tl.load(scores + parent, mask=inside, other=0.0)
        score = tl.where(inside, score, WORST)
    return score


@triton.jit
def _rate(x, table):
    """What lines between the points of a curve give; level before the first and behind the last."""
    rate = tl.zeros_like(x) + tl.load(table + POINTS)
    for point in tl.static_range(POINTS - 1):
        low, high = tl.load(table + point), tl.load(table + point + 1)
        share = tl.minimum(tl.maximum((x - low) / (high - low), 0.0), 1.0)
        step = tl.load(table + POINTS + point + 1) - tl.load(table + POINTS + point)
        rate += share * step
    return rate


@triton.jit
def _ahead(score, index, other_score, other_index):
    """Whether a node is better than another one."""
    return (score > other_score) | ((score == other_score) & (index < other_index))
