"""The dynamic tree of EAGLE-2 on the device: what `Pool` and `FixedTree` are on the host.

The pool is tokens and parents int64, scores fp64 (sums of log-probabilities); node 0 is the root.
Of equal scores the earlier node is the better one.
"""

import triton
import triton.language as tl

WORST: tl.constexpr = tl.constexpr(-float("inf"))


@triton.jit
def grow_level(
    candidates, log_probs, nodes, tokens, parents, scores, seen,
    BEGIN, R, K, USED, WIDTH, SLOTS, LEVEL, new_nodes, new_tokens, above, positions, mask,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add one level to the pool and choose the WIDTH best of it, which get children next; grid [1].

    candidates int64 and log_probs fp32 [R, K], children of `nodes` int32 [R], go to the pool from
    BEGIN on; R * K <= SIZE. `seen` int8 [SLOTS, SLOTS] says which slots of the draft's cache each
    slot sees: 0 stands for the root, USED slots follow it, and the chosen nodes take the next.

    Of the pass over the chosen nodes: new_nodes int32 [WIDTH], new_tokens int64 [WIDTH], `above`
    int32 [WIDTH] the slot whose hidden row each continues, positions int64 [WIDTH] counted from
    the root, and mask int8 [WIDTH, USED + WIDTH].
    """
    index = tl.arange(0, SIZE)
    inside = index < R * K
    parent = tl.load(nodes + index // K, mask=inside, other=0).to(tl.int64)
    token = tl.load(candidates + index, mask=inside, other=0)
    log_prob = tl.load(log_probs + index, mask=inside, other=0.0).to(tl.float64)
    score = log_prob + tl.load(scores + parent, mask=inside, other=0.0)
    tl.store(tokens + BEGIN + index, token, mask=inside)
    tl.store(parents + BEGIN + index, parent, mask=inside)
    tl.store(scores + BEGIN + index, score, mask=inside)
    score = tl.where(inside, score, WORST)
    ahead = _ahead(score[None, :], index[None, :], score[:, None], index[:, None])
    rank = tl.sum((ahead & inside[None, :]).to(tl.int32), 1)
    chosen = inside & (rank < WIDTH)
    own_above = tl.where(LEVEL == 0, 0, USED - R + 1 + index // K)
    tl.store(new_nodes + rank, BEGIN + index, mask=chosen)
    tl.store(new_tokens + rank, token, mask=chosen)
    tl.store(above + rank, own_above, mask=chosen)
    tl.store(positions + rank, tl.full([SIZE], LEVEL, tl.int64), mask=chosen)
    for first in tl.range(0, USED + WIDTH + 1, COLUMNS):
        slot = first + tl.arange(0, COLUMNS)[None, :]
        here = chosen[:, None] & (slot <= USED + WIDTH)
        above_row = seen + own_above[:, None] * SLOTS + slot
        is_seen = tl.load(above_row, mask=here & (slot <= USED), other=0)
        is_seen = tl.where(slot == USED + 1 + rank[:, None], 1, is_seen).to(tl.int8)
        tl.store(seen + (USED + 1 + rank)[:, None] * SLOTS + slot, is_seen, mask=here)
        own_row = mask + rank[:, None] * (USED + WIDTH)
        tl.store(own_row + slot - 1, is_seen, mask=here & (slot > 0))


@triton.jit
def select_tree(
    tokens, parents, scores, COUNT, ROOM, tree_tokens, tree_parents, chosen_nodes,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The root with the ROOM best of COUNT nodes of a pool, in the pool's order; grid [1].

    tree_tokens and tree_parents int64, chosen_nodes int32, [1 + min(ROOM, COUNT - 1)]. A child's
    score is at most its parent's, and it stands behind it: so the parent is chosen, too.
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
    chosen = inside & ((index == 0) | (rank < ROOM))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    parent = tl.load(parents + index, mask=chosen, other=-1).to(tl.int32)
    parent_place = tl.gather(place, tl.maximum(parent, 0), 0)
    tl.store(tree_tokens + place, tl.load(tokens + index, mask=chosen, other=0), mask=chosen)
    above = tl.where(parent < 0, -1, parent_place).to(tl.int64)
    tl.store(tree_parents + place, above, mask=chosen)
    tl.store(chosen_nodes + place, index, mask=chosen)


@triton.jit
def lay_out(parents, N, depths, mask, NODES: tl.constexpr):
    """Depths int64 [N] of a tree's nodes, and mask int8 [N, N]: what each may see; grid [1]."""
    node = tl.arange(0, NODES)
    inside = node < N
    seen = node[:, None] == node[None, :]
    depth = tl.zeros([NODES], tl.int64)
    above = tl.load(parents + node, mask=inside, other=-1).to(tl.int32)
    while tl.max(above, 0) >= 0:
        seen = seen | (above[:, None] == node[None, :])
        depth += (above >= 0).to(tl.int64)
        above = tl.load(parents + above, mask=above >= 0, other=-1).to(tl.int32)
    tl.store(depths + node, depth, mask=inside)
    square = inside[:, None] & inside[None, :]
    tl.store(mask + node[:, None] * N + node[None, :], seen.to(tl.int8), mask=square)


@triton.jit
def _ahead(score, index, other_score, other_index):
    """Whether a node is better than another one."""
    return (score > other_score) | ((score == other_score) & (index < other_index))
