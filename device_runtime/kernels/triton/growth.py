"""EAGLE-2's dynamic draft tree on the device, as `CandidatePool` and `FixedTree` on the host.

A program works on one of B sequences. A sequence has a pool of pool_size nodes: tokens and parents
int64, scores fp64 (sums of logarithms), and `own` fp32, the draft's log-probability of a node given
its parent; node 0 is the root. Of equal scores the earlier node is the better one. `start` int64
[B, START] is the state of a network at the start of a round: cached rows, the position of the next
row, the cache's row that is its row 0, the size of its tree (levels of a draft, nodes of a base; 0:
the entry is unused), and the root's token.

SCORED is how a candidate gets its score: its parent's score plus its log-probability ("draft"), or
plus the value of its probability on a curve ("rates"; `table` fp64 [B, 2, POINTS] has probabilities
and values, between which it is linear), or by its place in the pool alone ("places"; `table` fp64
[pool_size]). Candidates below the last level of their tree score minus infinity.

A forward pass over chosen nodes finds its rows by `slot`: int64 [1] in a pass of one sequence
(max_sequences is 0), else the table of the pass's sequences, int64 [max_sequences, FIELDS]; see
`cache.py`.
"""

import triton
import triton.language as tl

from edgellm.device_runtime.kernels.triton.cache import FIELDS

WORST: tl.constexpr = tl.constexpr(-float("inf"))
POINTS: tl.constexpr = tl.constexpr(11)  # of a curve
START: tl.constexpr = tl.constexpr(5)  # fields of a sequence's start
ENTRIES: tl.constexpr = tl.constexpr(256)  # of the table of sequences, at most


@triton.jit
def grow_level(
    # inputs
    candidates: "*i64", log_probs: "*fp32", nodes: "*i32", start: "*i64", table: "*fp64",
    # the pool, and the attention mask of the draft's cache; both are updated
    tokens: "*i64", parents: "*i64", scores: "*fp64", own: "*fp32", seen: "*i8",
    # shape
    stride, begin, num_parents, top_k, used, width, slots, level, num_axes, pool_size,
    max_sequences,
    # outputs
    new_nodes: "*i32", new_tokens: "*i64", above: "*i32", positions: "*i64", slot: "*i64",
    mask: "*i8",
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    """Add one level to the pool, and choose its `width` best nodes for the next level; grid [B].

    candidates and log_probs are [B, num_parents, stride]; the first top_k of a row are children of
    its node in `nodes` [B, num_parents] and go to the pool from `begin` on. `seen` is [B, slots,
    slots]: the root, `used` slots, then the chosen nodes. Outputs are [B, width], positions
    [num_axes, B, width], mask [B, width, used + width]. `above` is the parent's hidden row.
    """
    one, count = tl.program_id(0), tl.num_programs(0)
    candidates += one * num_parents * stride
    log_probs += one * num_parents * stride
    nodes, start, seen = nodes + one * num_parents, start + one * START, seen + one * slots * slots
    tokens, parents = tokens + one * pool_size, parents + one * pool_size
    scores, own = scores + one * pool_size, own + one * pool_size
    if SCORED == "rates":
        table += one * 2 * POINTS
    index = tl.arange(0, SIZE)
    inside = index < num_parents * top_k
    parent = tl.load(nodes + index // top_k, mask=inside, other=0).to(tl.int64)
    at = (index // top_k) * stride + index % top_k
    token = tl.load(candidates + at, mask=inside, other=0)
    of_pool = log_probs, nodes, table, scores
    score = _score(of_pool, index, stride, begin, num_parents, top_k, SCORED)
    levels = tl.load(start + 3)
    tl.store(tokens + begin + index, token, mask=inside)
    tl.store(parents + begin + index, parent, mask=inside)
    tl.store(scores + begin + index, tl.where(levels > level, score, WORST), mask=inside)
    tl.store(own + begin + index, tl.load(log_probs + at, mask=inside, other=0.0), mask=inside)
    rank = tl.zeros([SIZE], tl.int32)
    for first in tl.range(0, num_parents * top_k, BLOCK):
        other = first + tl.arange(0, BLOCK)
        others = _score(of_pool, other, stride, begin, num_parents, top_k, SCORED)
        ahead = _ahead(others[None, :], other[None, :], score[:, None], index[:, None])
        rank += tl.sum((ahead & (other < num_parents * top_k)[None, :]).to(tl.int32), 1)
    chosen = inside & (rank < width)
    goes_on = levels > level + 1
    own_above, row = used - num_parents + 1 + index // top_k, one * width + rank
    tl.store(new_nodes + row, begin + index, mask=chosen)
    tl.store(new_tokens + row, tl.where(goes_on, token, 0), mask=chosen)
    above += row
    hidden_row = count * (used - num_parents + 1) + one * num_parents + index // top_k
    tl.store(above, hidden_row, mask=chosen)
    position = tl.full([SIZE], 0, tl.int64) + tl.load(start + 1) + level
    for axis in tl.range(0, num_axes):
        tl.store(positions + axis * count * width + row, position, mask=chosen)
    _write_slot(slot, start, tl.where(goes_on, width, 0), width, used, max_sequences)
    mask += row[:, None] * (used + width)
    _see(seen, mask, chosen, rank, own_above, used, width, slots, COLUMNS)


@triton.jit
def _see(seen, mask, chosen, rank, own_above, used, width, slots, COLUMNS: tl.constexpr):
    """Chosen nodes attend to the slots of their parent and to themselves.

    `mask` points to the nodes' own rows.
    """
    for first in tl.range(0, used + width + 1, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        here = chosen[:, None] & (column <= used + width)
        above_row = seen + own_above[:, None] * slots + column
        is_seen = tl.load(above_row, mask=here & (column <= used), other=0)
        is_seen = tl.where(column == used + 1 + rank[:, None], 1, is_seen).to(tl.int8)
        tl.store(seen + (used + 1 + rank)[:, None] * slots + column, is_seen, mask=here)
        tl.store(mask + column - 1, is_seen, mask=here & (column > 0))


@triton.jit
def select_tree(
    # inputs
    tokens: "*i64", parents: "*i64", scores: "*fp64", own: "*fp32", start: "*i64",
    # shape
    num_nodes, max_drafted, pool_size,
    # outputs
    tree_tokens: "*i64", tree_parents: "*i64", tree_own: "*fp32", chosen_nodes: "*i32",
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose the root and the best of the first num_nodes nodes of a pool, in its order; grid [B].

    At most max_drafted of them, and as many as the sequence's tree may have. Outputs are
    [B, 1 + max_drafted], padded with the parent -1. A child's score is at most its parent's, and
    its index is larger, so the parent is chosen, too. Nodes of score minus infinity are not chosen.
    """
    one = tl.program_id(0)
    tokens, parents = tokens + one * pool_size, parents + one * pool_size
    scores, own, start = scores + one * pool_size, own + one * pool_size, start + one * START
    first_node = one * (1 + max_drafted)
    tree_tokens, tree_parents = tree_tokens + first_node, tree_parents + first_node
    tree_own, chosen_nodes = tree_own + first_node, chosen_nodes + first_node
    room = tl.minimum(max_drafted, tl.load(start + 3).to(tl.int32) - 1)
    index = tl.arange(0, SIZE)
    inside = index < num_nodes
    score = tl.load(scores + index, mask=inside, other=WORST)
    rank = tl.zeros([SIZE], tl.int32)
    for first in tl.range(1, num_nodes, BLOCK):
        other = first + tl.arange(0, BLOCK)
        others = tl.load(scores + other, mask=other < num_nodes, other=WORST)
        ahead = _ahead(others[None, :], other[None, :], score[:, None], index[:, None])
        rank += tl.sum((ahead & (other < num_nodes)[None, :]).to(tl.int32), 1)
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
    missing = (index >= tl.sum(chosen.to(tl.int32), 0)) & (index <= max_drafted)
    tl.store(tree_tokens + index, tl.zeros([SIZE], tl.int64), mask=missing)
    tl.store(tree_own + index, tl.zeros([SIZE], tl.float32), mask=missing)
    tl.store(tree_parents + index, tl.full([SIZE], -1, tl.int64), mask=missing)
    tl.store(chosen_nodes + index, tl.full([SIZE], -1, tl.int32), mask=missing)


@triton.jit
def lay_out(
    # inputs
    parents: "*i64", start: "*i64",
    # shape
    num_nodes, num_axes, max_sequences,
    # outputs
    positions: "*i64", slot: "*i64", mask: "*i8",
    NODES: tl.constexpr,
):  # fmt: skip
    """Inputs of the pass over trees: positions, attention mask and `slot`; grid [B].

    parents are [B, num_nodes], positions [num_axes, B, num_nodes], mask [B, num_nodes, num_nodes].
    A node with the parent -1 attends to itself.
    """
    one, count = tl.program_id(0), tl.num_programs(0)
    parents, start = parents + one * num_nodes, start + one * START
    mask += one * num_nodes * num_nodes
    node = tl.arange(0, NODES)
    inside = node < num_nodes
    seen = node[:, None] == node[None, :]
    depth = tl.zeros([NODES], tl.int64)
    above = tl.load(parents + node, mask=inside, other=-1).to(tl.int32)
    while tl.max(above, 0) >= 0:
        seen = seen | (above[:, None] == node[None, :])
        depth += (above >= 0).to(tl.int64)
        above = tl.load(parents + above, mask=above >= 0, other=-1).to(tl.int32)
    position = tl.load(start + 1) + depth
    for axis in tl.range(0, num_axes):
        tl.store(positions + (axis * count + one) * num_nodes + node, position, mask=inside)
    _write_slot(slot, start, tl.load(start + 3), num_nodes, 0, max_sequences)
    square = inside[:, None] & inside[None, :]
    tl.store(mask + node[:, None] * num_nodes + node[None, :], seen.to(tl.int8), mask=square)


@triton.jit
def _write_slot(slot, start, rows, width, used, max_sequences):
    """Write `slot` of a program's sequence: `rows` new rows of `width`, after `used` of the round.

    The mask has columns for both. Entries after the last sequence of a table are zeros.
    """
    one, count = tl.program_id(0), tl.num_programs(0)
    there = tl.load(start) + used
    if max_sequences == 0:
        tl.store(slot, there)
    else:
        field = tl.arange(0, 8)
        entry = tl.where(field == 0, one * width, 0).to(tl.int64)
        entry = tl.where(field == 1, rows, entry)
        entry = tl.where(field == 2, tl.load(start + 2), entry)
        entry = tl.where(field == 3, there, entry)
        entry = tl.where(field == 4, tl.where(rows > 0, used + rows, 0), entry)
        tl.store(slot + one * FIELDS + field, entry, mask=field < FIELDS)
        rest = tl.arange(0, ENTRIES)
        is_unused = (rest >= count * FIELDS) & (rest < max_sequences * FIELDS)
        tl.store(slot + rest, tl.zeros([ENTRIES], tl.int64), mask=is_unused)


@triton.jit
def _score(of_pool, index, stride, begin, num_parents, top_k, SCORED: tl.constexpr):
    """Scores of candidates by index; minus infinity after the last one."""
    log_probs, nodes, table, scores = of_pool
    inside = index < num_parents * top_k
    if SCORED == "places":
        score = tl.load(table + begin + index, mask=inside, other=WORST)
    else:
        at = (index // top_k) * stride + index % top_k
        score = tl.load(log_probs + at, mask=inside, other=0.0).to(tl.float64)
        if SCORED == "rates":
            score = _rate(tl.exp(score), table)
        parent = tl.load(nodes + index // top_k, mask=inside, other=0).to(tl.int64)
        score += tl.load(scores + parent, mask=inside, other=0.0)
        score = tl.where(inside, score, WORST)
    return score


@triton.jit
def _rate(x, table):
    """Piecewise linear interpolation of a curve, constant outside of its points."""
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
