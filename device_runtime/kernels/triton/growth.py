"""The dynamic tree of EAGLE-2 on the device: what `Pool` and `FixedTree` are on the host.

A program works on one of B sequences. The pool of each is POOL tokens and parents int64, scores
fp64 (sums of logarithms), and `own` fp32, what the draft gave each node under its parent; node 0 is
the root. Of equal scores the earlier node is the better one. `start` int64 [B, START] says of a
network where its round begins: rows of the cache before it, the position of the first row behind
them, the cache's row that is its row 0, how large its tree is (levels of a draft, nodes of a base;
0: nobody's), and the root's token.

The pass over what a kernel laid out finds its rows by `slot`: int64 [1] where a pass serves one
sequence (MANY is 0), else the table of the sequences of a pass, int64 [MANY, FIELDS], see `cache`.
"""

import triton
import triton.language as tl

from edgellm.device_runtime.kernels.triton.cache import FIELDS

WORST: tl.constexpr = tl.constexpr(-float("inf"))
POINTS: tl.constexpr = tl.constexpr(11)  # of a curve of rates
START: tl.constexpr = tl.constexpr(5)  # entries of a sequence
ENTRIES: tl.constexpr = tl.constexpr(256)  # of a table of sequences at most


@triton.jit
def grow_level(
    candidates, log_probs, nodes, start, table, tokens, parents, scores, own, seen,
    STRIDE, BEGIN, R, K, USED, WIDTH, SLOTS, LEVEL, AXES, POOL, MANY,
    new_nodes, new_tokens, above, positions, slot, mask,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    """Add one level to the pool and choose the WIDTH best of it, which get children next; grid [B].

    candidates int64 and log_probs fp32 [B, R, STRIDE], of which the first K are children of `nodes`
    int32 [B, R], go to the pool from BEGIN on; R * K <= SIZE. A node's score is its parent's and,
    by SCORED, its log-probability ("draft"), or what a curve makes of its probability ("rates":
    `table` fp64 [B, 2, POINTS], probabilities and values between which lines are drawn); or it is
    that of its place in the pool, whatever the draft gave ("places": `table` fp64, of all). Below
    the levels of its tree it is the worst. `seen` int8 [B, SLOTS, SLOTS] says which slots of the
    draft's cache each slot sees: 0 stands for the root, USED slots follow it, and the chosen nodes
    take the next.

    Of the pass over the chosen nodes: new_nodes int32 [B, WIDTH], new_tokens int64 [B, WIDTH],
    `above` int32 [B, WIDTH] the hidden row that each continues, where those of a level stand behind
    those of the level before, positions int64 [AXES, B, WIDTH], `slot`, and mask int8
    [B, WIDTH, USED + WIDTH].
    """
    one, count = tl.program_id(0), tl.num_programs(0)
    candidates, log_probs = candidates + one * R * STRIDE, log_probs + one * R * STRIDE
    nodes, start, seen = nodes + one * R, start + one * START, seen + one * SLOTS * SLOTS
    tokens, parents = tokens + one * POOL, parents + one * POOL
    scores, own = scores + one * POOL, own + one * POOL
    if SCORED == "rates":
        table += one * 2 * POINTS
    index = tl.arange(0, SIZE)
    inside = index < R * K
    parent = tl.load(nodes + index // K, mask=inside, other=0).to(tl.int64)
    at = (index // K) * STRIDE + index % K
    token = tl.load(candidates + at, mask=inside, other=0)
    score = _score(log_probs, nodes, table, scores, index, STRIDE, BEGIN, R, K, SCORED)
    levels = tl.load(start + 3)
    tl.store(tokens + BEGIN + index, token, mask=inside)
    tl.store(parents + BEGIN + index, parent, mask=inside)
    tl.store(scores + BEGIN + index, tl.where(levels > LEVEL, score, WORST), mask=inside)
    tl.store(own + BEGIN + index, tl.load(log_probs + at, mask=inside, other=0.0), mask=inside)
    rank = tl.zeros([SIZE], tl.int32)
    for first in tl.range(0, R * K, BLOCK):
        other = first + tl.arange(0, BLOCK)
        others = _score(log_probs, nodes, table, scores, other, STRIDE, BEGIN, R, K, SCORED)
        ahead = _ahead(others[None, :], other[None, :], score[:, None], index[:, None])
        rank += tl.sum((ahead & (other < R * K)[None, :]).to(tl.int32), 1)
    chosen = inside & (rank < WIDTH)
    goes_on = levels > LEVEL + 1
    own_above, row = USED - R + 1 + index // K, one * WIDTH + rank
    tl.store(new_nodes + row, BEGIN + index, mask=chosen)
    tl.store(new_tokens + row, tl.where(goes_on, token, 0), mask=chosen)
    tl.store(above + row, count * (USED - R + 1) + one * R + index // K, mask=chosen)
    position = tl.full([SIZE], 0, tl.int64) + tl.load(start + 1) + LEVEL
    for axis in tl.range(0, AXES):
        tl.store(positions + axis * count * WIDTH + row, position, mask=chosen)
    _seat(slot, start, tl.where(goes_on, WIDTH, 0), WIDTH, USED, MANY)
    mask += row[:, None] * (USED + WIDTH)
    _see(seen, mask, chosen, rank, own_above, USED, WIDTH, SLOTS, COLUMNS)


@triton.jit
def _see(seen, mask, chosen, rank, own_above, USED, WIDTH, SLOTS, COLUMNS: tl.constexpr):
    """Chosen nodes see what the slot above each does, and themselves; `mask` points to own rows."""
    for first in tl.range(0, USED + WIDTH + 1, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        here = chosen[:, None] & (column <= USED + WIDTH)
        above_row = seen + own_above[:, None] * SLOTS + column
        is_seen = tl.load(above_row, mask=here & (column <= USED), other=0)
        is_seen = tl.where(column == USED + 1 + rank[:, None], 1, is_seen).to(tl.int8)
        tl.store(seen + (USED + 1 + rank)[:, None] * SLOTS + column, is_seen, mask=here)
        tl.store(mask + column - 1, is_seen, mask=here & (column > 0))


@triton.jit
def select_tree(
    tokens, parents, scores, own, start, COUNT, ROOM, POOL,
    tree_tokens, tree_parents, tree_own, chosen_nodes, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The root with the best of COUNT nodes of a pool, in the pool's order; grid [B].

    ROOM of them, or as many as the sequence's tree may have. tree_tokens and tree_parents int64,
    tree_own fp32, chosen_nodes int32, [B, 1 + ROOM]. A child's score is at most its parent's, and
    it stands behind it: so the parent is chosen, too. What scores minus infinity is not chosen;
    where too few nodes are, the parent behind them is -1.
    """
    one = tl.program_id(0)
    tokens, parents = tokens + one * POOL, parents + one * POOL
    scores, own, start = scores + one * POOL, own + one * POOL, start + one * START
    tree_tokens, tree_parents = tree_tokens + one * (1 + ROOM), tree_parents + one * (1 + ROOM)
    tree_own, chosen_nodes = tree_own + one * (1 + ROOM), chosen_nodes + one * (1 + ROOM)
    room = tl.minimum(ROOM, tl.load(start + 3).to(tl.int32) - 1)
    index = tl.arange(0, SIZE)
    inside = index < COUNT
    score = tl.load(scores + index, mask=inside, other=WORST)
    rank = tl.zeros([SIZE], tl.int32)
    for first in tl.range(1, COUNT, BLOCK):
        other = first + tl.arange(0, BLOCK)
        others = tl.load(scores + other, mask=other < COUNT, other=WORST)
        ahead = _ahead(others[None, :], other[None, :], score[:, None], index[:, None])
        rank += tl.sum((ahead & (other < COUNT)[None, :]).to(tl.int32), 1)
    chosen = inside & ((index == 0) | ((rank < room) & (score > WORST)))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    parent = tl.load(parents + index, mask=chosen, other=-1).to(tl.int32)
    parent_place = tl.gather(place, tl.maximum(parent, 0), 0)
    token = tl.load(tokens + index, mask=chosen & (index > 0), other=0)
    token = tl.where(index == 0, tl.load(start + 4), token)
    tl.store(tree_tokens + place, token, mask=chosen)
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
def lay_out(parents, start, N, AXES, MANY, positions, slot, mask, NODES: tl.constexpr):
    """Positions int64 [AXES, B, N] of trees' nodes, mask int8 [B, N, N]: what each may see, `slot`.

    Grid [B]; parents int64 [B, N]. A node with the parent -1 sees itself.
    """
    one, count = tl.program_id(0), tl.num_programs(0)
    parents, start, mask = parents + one * N, start + one * START, mask + one * N * N
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
        tl.store(positions + (axis * count + one) * N + node, position, mask=inside)
    _seat(slot, start, tl.load(start + 3), N, 0, MANY)
    square = inside[:, None] & inside[None, :]
    tl.store(mask + node[:, None] * N + node[None, :], seen.to(tl.int8), mask=square)


@triton.jit
def _seat(slot, start, rows, WIDTH, USED, MANY):
    """Say where the `rows` rows of a program's sequence are, of WIDTH each, behind USED others.

    A mask has columns for both. Behind the last sequence of a table there is nobody.
    """
    one, count = tl.program_id(0), tl.num_programs(0)
    there = tl.load(start) + USED
    if MANY == 0:
        tl.store(slot, there)
    else:
        field = tl.arange(0, 8)
        entry = tl.where(field == 0, one * WIDTH, 0).to(tl.int64)
        entry = tl.where(field == 1, rows, entry)
        entry = tl.where(field == 2, tl.load(start + 2), entry)
        entry = tl.where(field == 3, there, entry)
        entry = tl.where(field == 4, tl.where(rows > 0, USED + rows, 0), entry)
        tl.store(slot + one * FIELDS + field, entry, mask=field < FIELDS)
        rest = tl.arange(0, ENTRIES)
        nobody = (rest >= count * FIELDS) & (rest < MANY * FIELDS)
        tl.store(slot + rest, tl.zeros([ENTRIES], tl.int64), mask=nobody)


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
