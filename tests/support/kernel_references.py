"""NumPy references of edgellm's kernels; the fake GPU runs them in place of the kernels.

Arguments are the kernels' own, in their order; pointers are flat arrays that begin where they point
to. `tests/device_runtime/kernels/test_references.py` holds them against the kernels.
"""

from __future__ import annotations

import numpy as np
from attention_references import attend, finish, keep_rows, store_rows
from expert_references import expert_downs, expert_gates, group_rows, route_rows, sum_experts
from recurrent_references import advance_state, advance_window, convolve_rows, delta_rows
from vocabulary_references import head_rows, look_up_rows

from edgellm.device_runtime.kernels.triton.catalog import PICKS
from edgellm.device_runtime.sampling.sampler import SamplingParams, processed_distribution

DECIDED, NOT_A_NUMBER, UNDECIDED = 0, 1, 2
START, FIELDS = 5, 5  # entries of a sequence: where its round begins; its rows in a pass


def grow_level(
    candidates, log_probs, nodes, start, table, tokens, parents, scores, own, seen,
    stride, begin, rows, top_k, used, width, slots, level, axes, pool, many,
    new_nodes, new_tokens, above, positions, slot, mask, *, constants
):  # fmt: skip
    sequences = constants["grid"][0]
    sizes = stride, begin, rows, top_k, used, width, slots, level
    for one in range(sequences):
        first, at = one * rows, one * pool
        given = candidates[first * stride :], log_probs[first * stride :], nodes[first:]
        own_table = table[22 * one :] if constants["SCORED"] == "rates" else table
        own_pool = tokens[at:], parents[at:], scores[at:], own[at:], seen[one * slots**2 :]
        own_mask, own_start = mask[one * width * (used + width) :], start[one * START :]
        chosen, over = _grow_one(given, own_start, own_table, own_pool, sizes, own_mask, constants)
        here, goes_on = slice(one * width, (one + 1) * width), level + 1 < start[one * START + 3]
        new_nodes[here] = chosen
        new_tokens[here] = tokens[one * pool + chosen] if goes_on else 0
        before = sequences * (used - rows + 1) + one * rows  # hidden rows
        above[here] = before + over - (used - rows + 1)
        for axis in range(axes):
            first = (axis * sequences + one) * width
            positions[first : first + width] = start[one * START + 1] + level
        _seat(slot, start, one, (width if goes_on else 0, width), used, many)
    slot[sequences * FIELDS : many * FIELDS] = 0


def _grow_one(given, start, table, pool, sizes, mask, constants):
    """Pool, `seen` and mask of one sequence; the nodes to expand, and slots above them."""
    (candidates, log_probs, nodes), (tokens, parents, scores, own, seen) = given, pool
    stride, begin, rows, top_k, used, width, slots, level = sizes
    count = rows * top_k
    assert width <= count <= constants["SIZE"]
    at = np.arange(count) // top_k * stride + np.arange(count) % top_k
    parent = nodes[:rows].repeat(top_k)
    added = slice(begin, begin + count)
    tokens[added], parents[added], own[added] = candidates[at], parent, log_probs[at]
    if constants["SCORED"] == "places":
        found = table[added].copy()
    else:
        found = log_probs[at].astype(np.float64)
        if constants["SCORED"] == "rates":
            points = len(table[:22]) // 2
            found = np.interp(np.exp(found), table[:points], table[points : 2 * points])
        found = found + scores[parent]
    scores[added] = found if level < start[3] else -np.inf
    best = np.argsort(-found, kind="stable")[:width]
    over = used - rows + 1 + best // top_k
    square = seen[: slots * slots].reshape(slots, slots)
    places = np.arange(used + 1, used + 1 + width)
    square[places, : used + 1] = square[over, : used + 1]
    square[places, used + 1 : used + 1 + width] = np.eye(width)
    mask[: width * (used + width)] = square[places, 1 : used + 1 + width].ravel()
    return begin + best, over


def _seat(slot, start, one, rows, used, many):
    """Positions of a sequence, and its place in the forward pass."""
    there, (own, width) = start[one * START] + used, rows
    if many:
        entries = one * width, own, start[one * START + 2], there, used + own if own else 0
        slot[one * FIELDS : (one + 1) * FIELDS] = entries
    else:
        slot[0] = there


def select_tree(
    tokens, parents, scores, own, start, count, room, pool,
    tree_tokens, tree_parents, tree_own, chosen_nodes, *, constants
):  # fmt: skip
    assert count <= constants["SIZE"]
    assert room < constants["SIZE"]
    for one in range(constants["grid"][0]):
        at, maximum = one * pool, max(min(room, int(start[one * START + 3]) - 1), 0)
        own_scores, above = scores[at : at + count], parents[at : at + count]
        best = np.argsort(-own_scores[1:], kind="stable")[:maximum] + 1
        nodes = np.concatenate([[0], np.sort(best[own_scores[best] > -np.inf])])
        place = np.full(count, -1)
        place[nodes] = np.arange(len(nodes))
        first = one * (1 + room)
        there = slice(first, first + len(nodes))
        missing = slice(first + len(nodes), first + 1 + room)
        tree_tokens[there], tree_own[there] = tokens[at + nodes], own[at + nodes]
        tree_tokens[first], chosen_nodes[there] = start[one * START + 4], nodes
        tree_parents[there] = np.where(above[nodes] < 0, -1, place[above[nodes]])
        tree_tokens[missing], tree_own[missing], chosen_nodes[missing] = 0, 0, -1
        tree_parents[missing] = -1


def lay_out(parents, start, count, axes, many, positions, slot, mask, *, constants):
    assert count <= constants["NODES"]
    sequences = constants["grid"][0]
    for one in range(sequences):
        square, depths = np.eye(count, dtype=np.int8), np.zeros(count, np.int64)
        own = parents[one * count : (one + 1) * count]
        for node in range(count):
            if own[node] >= 0:
                square[node] |= square[own[node]]
                depths[node] = depths[own[node]] + 1
        for axis in range(axes):
            first = (axis * sequences + one) * count
            positions[first : first + count] = start[one * START + 1] + depths
        mask[one * count**2 : (one + 1) * count**2] = square.ravel()
        _seat(slot, start, one, (int(start[one * START + 3]), count), 0, many)
    slot[sequences * FIELDS : many * FIELDS] = 0


def accept_greedy(tokens, parents, argmax, highest, trees, count, path, outcome, *, constants):
    assert trees == constants["grid"][0]
    assert count <= constants["NODES"]
    for one in range(trees):
        here, at = slice(one * count, (one + 1) * count), one * count

        def draw(node: int, _: int, at: int = at) -> tuple[int, int]:
            status = DECIDED if np.isfinite(highest[at + node]) else NOT_A_NUMBER
            return int(argmax[at + node]), status

        _walk(tokens[here], parents[here], draw, path[here], outcome[3 * one :])


def accept_sampled(
    tokens, parents, values, ids, rules, uniforms, trees, count, vocab, path, outcome, *, constants
):
    assert trees == constants["grid"][0]
    assert count <= constants["NODES"]
    for one in range(trees):
        here, at = slice(one * count, (one + 1) * count), one * count
        picks = values[at * PICKS :], ids[at * PICKS :]
        draw = _drawing(*picks, rules[4 * one :][:4].tolist(), uniforms[at:], vocab)
        _walk(tokens[here], parents[here], draw, path[here], outcome[3 * one :])


def _drawing(values, ids, rules, uniforms, vocab):
    temperature, top_k, top_p, min_p = rules
    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=int(top_k), min_p=min_p, seed=42
    )

    def draw(node: int, place: int) -> tuple[int, int]:
        x, token = (each[node * PICKS :][:PICKS] for each in (values, ids))
        if not np.isfinite(x[0]):
            return int(token[0]), NOT_A_NUMBER
        cuts = 0 < top_k < vocab
        is_decided = vocab <= PICKS or (cuts and top_k <= PICKS and x[-1] < x[int(top_k) - 1])
        order = np.argsort(token[: min(vocab, PICKS)])
        kept, chances = processed_distribution(x[order], params)
        edges = np.cumsum(chances)
        drawn = np.searchsorted(edges, uniforms[place] * edges[-1], side="right")
        found = token[order][kept][min(drawn, len(kept) - 1)]
        return int(found), DECIDED if is_decided else UNDECIDED

    return draw


def _walk(tokens, parents, draw, path, outcome) -> None:
    walked = [0]
    while True:
        token, status = draw(walked[-1], len(walked) - 1)
        fits = (parents == walked[-1]) & (tokens == token)
        child = int(np.flatnonzero(fits).max(initial=0))
        if status != DECIDED or not child:
            break
        walked.append(child)
    path[:] = -1
    path[: len(walked)] = walked
    outcome[:3] = len(walked), token, status


def pick_shares(logits, vocab, keys, sums, *, constants):
    rows, shares, _ = constants["grid"]
    maximum = constants["PICKS"]
    assert shares * constants["BLOCK"] >= vocab
    numbers = logits[: rows * vocab].reshape(rows, vocab)
    for row in range(rows):
        for share in range(shares):
            x = numbers[row, share * constants["BLOCK"] : (share + 1) * constants["BLOCK"]]
            found = np.sort(_keys(x, share * constants["BLOCK"]))[::-1][:maximum]
            at = row * shares + share
            keys[at * maximum : (at + 1) * maximum] = np.iinfo(np.int64).min
            keys[at * maximum : at * maximum + len(found)] = found
            top = x.max()
            sums[2 * at : 2 * at + 2] = top, np.exp(x[x > -np.inf] - top).sum()


def _keys(x, first):
    bits = np.where(np.isnan(x), np.float32(np.nan), x + np.float32(0)).view(np.int32)
    bits = np.where(np.isnan(x), 0x7FC00000, bits).astype(np.int64)
    ordered = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << 32) | ((first + np.arange(len(x))) ^ 0x7FFFFFFF)


def join_picks(keys, sums, vocab, shares, values, ids, argmax, log_sums, *, constants):
    assert shares <= constants["MOST"]
    maximum = constants["PICKS"]
    for row in range(constants["grid"][0]):
        own = keys[row * shares * maximum : (row + 1) * shares * maximum]
        best = np.sort(own)[::-1][:maximum]
        ordered = (best >> 32).astype(np.int32)
        bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
        is_one = np.arange(maximum) < vocab
        token = (best & 0x7FFFFFFF) ^ 0x7FFFFFFF
        place = slice(row * maximum, (row + 1) * maximum)
        values[place] = np.where(is_one, bits.view(np.float32), -np.inf)
        ids[place] = np.where(is_one, token, 0x7FFFFFFF)
        argmax[row] = token[0]
        top, total = sums[2 * row * shares : 2 * (row + 1) * shares].reshape(-1, 2).T
        highest = top.max()
        is_any = top > -np.inf
        shares_sum = (total[is_any] * np.exp(top[is_any] - highest)).sum()
        log_sums[row] = highest + np.log(shares_sum) if is_any.any() else -np.inf


REFERENCES = {
    each.__name__: each
    for each in (grow_level, select_tree, lay_out, accept_greedy, accept_sampled, pick_shares,
                 join_picks, store_rows, attend, finish, keep_rows, convolve_rows, advance_window,
                 delta_rows, advance_state, route_rows, group_rows, expert_gates, expert_downs,
                 sum_experts, look_up_rows, head_rows)
}  # fmt: skip
TYPES = {"*i64": np.int64, "*i32": np.int32, "*fp32": np.float32, "*fp64": np.float64,
         "*i8": np.int8, "*fp16": np.float16}  # fmt: skip
