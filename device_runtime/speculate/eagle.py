"""Drafting with an EAGLE network (arXiv 2401.15077, 2406.16858, 2503.01840).

The draft keeps a KV cache of its own, so that it has seen exactly the committed tokens
(`committed.py`). A round's tree rows stand behind the committed rows, and the next round
overwrites them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from edgellm.device_runtime.session import F32, I64, ImageRows
from edgellm.device_runtime.speculate.calibration import Calibration
from edgellm.device_runtime.speculate.committed import CommittedRows
from edgellm.device_runtime.speculate.ngram import NgramLookup
from edgellm.device_runtime.speculate.policy import Costs, Policy, TreeLimits
from edgellm.device_runtime.speculate.tree import Pool, Tree

_LOOKUP_CONFIDENCE = {2: 0.2, 3: 0.35, 4: 0.6}  # before anything was learned, by match length


class EagleDrafter:
    """Proposes a tree for every round of one answer after another."""

    def __init__(
        self,
        rows: CommittedRows,
        policy: Policy,
        limits: TreeLimits,
        costs: Costs,
        *,
        max_tree_rows: int,
        lookup_calibration: Calibration | None = None,
    ) -> None:
        """Wire up.

        Args:
            rows: of the draft.
            policy: sizes the tree.
            limits: the user's bounds.
            costs: of the engine, for the books.
            max_tree_rows: rows that the draft engine takes in one round.
            lookup_calibration: given to merge prompt-lookup candidates into the tree.
        """
        self._rows, self._policy, self._limits = rows, policy, limits
        self._costs, self._max_tree_rows = costs, max_tree_rows
        self._lookup_calibration = lookup_calibration
        self._hidden_store = np.zeros((1 + max_tree_rows, 0), np.float32)

    def begin(self, token_ids: Sequence[int]) -> None:
        """Forget the answer before, but for the rows of these tokens (`CommittedRows.begin`)."""
        self._rows.begin(token_ids)
        self._lookup = NgramLookup() if self._lookup_calibration is not None else None
        self._spent_ms = 0.0

    def show(self, images: ImageRows) -> None:
        """The images of the answer that begins."""
        self._rows.show(images)

    def observe(self, next_token_ids: I64, taps: F32) -> None:
        """Committed rows: features [M, T*H] and the token that follows each, int64 [M]."""
        self._rows.observe(next_token_ids, taps)

    def remember(self, token_ids: list[int]) -> None:
        """Committed text for the prompt lookup."""
        if self._lookup is None:
            return
        if (image_ids := self._rows.image_ids) is not None:  # nobody says an image
            token_ids = [token for token in token_ids if token < image_ids.first]
        self._lookup.extend(token_ids)

    def catch_up(self) -> None:
        """Write the committed rows that wait into the draft's cache, unless drafting pauses.

        The last row gives the candidates for the root's children.
        """
        if not self._policy.is_worthwhile():
            return
        for rows, result in self._rows.write(self._limits.top_k):
            if rows <= self._limits.steps + 1:  # not a prompt or a pause, which no tree can change
                self._spent_ms += _cost(self._costs.extend, rows)
            self._root_ids = result.token_ids.copy()
            self._root_log_probs = result.log_probs.astype(np.float64)
            self._root_hidden = result.hidden.copy()

    def propose(self, root: int, room: int, levels: int) -> Tree:
        """Grow a tree of at most `room` drafted nodes and `levels` levels under `root`.

        The committed rows must have been caught up with; while some wait, the tree is the root.
        """
        levels = min(levels, self._limits.steps)
        room = min(room, self._limits.verify_size - 1)
        if room < 1 or levels < 1 or self._rows.is_behind:
            self._pool = None
            return Tree.of_root(root)
        pool = self._pool = Pool(root, self._limits.pool_size + _most_lookup(self._lookup))
        self._grow(pool, levels)
        self._looked_up = pool.count
        if self._lookup is not None and self._lookup_calibration is not None:
            self._merge(pool, *self._lookup.propose(), levels)
        tree, self._chosen = pool.tree(self._policy.select(pool, room))
        return tree

    def _grow(self, pool: Pool, levels: int) -> None:
        policy = self._policy
        size = self._root_hidden.shape[1]
        if self._hidden_store.shape[1] != size:
            self._hidden_store = np.zeros((1 + self._max_tree_rows, size), np.float32)
        self._hidden_store[0] = self._root_hidden[0]
        seen = np.eye(1 + self._max_tree_rows, dtype=np.bool_)  # of a slot, by slots; 0 is the root
        slots = np.zeros(len(pool.token_ids), np.int64)
        log_probs = self._root_log_probs
        newest = pool.add(
            np.zeros(1, np.int64), self._root_ids, policy.scores(log_probs), np.exp(log_probs)
        )
        used = 0
        for level in range(1, levels):
            free = min(self._max_tree_rows, self._rows.session.capacity - self._rows.length) - used
            nodes = policy.frontier(pool, newest, free)
            if not len(nodes):
                return
            above = slots[pool.parents[nodes]]
            slots[nodes] = own = np.arange(used + 1, used + 1 + len(nodes))
            seen[own] |= seen[above]
            used += len(nodes)
            result = self._rows.session.run(
                pool.token_ids[nodes],
                self._hidden_store[above],
                self._rows.length + used - len(nodes),
                np.arange(len(nodes)),
                top_k=self._limits.top_k,
                position_ids=np.full(len(nodes), self._rows.length + level - 1),
                tree_mask=seen[own, 1 : used + 1],
            )
            self._spent_ms += _cost(self._costs.step, len(nodes))
            self._hidden_store[own] = result.hidden
            log_probs = result.log_probs.astype(np.float64)
            newest = pool.add(nodes, result.token_ids, policy.scores(log_probs), np.exp(log_probs))

    def _merge(self, pool: Pool, token_ids: list[int], matched: int, levels: int) -> None:
        """Hang a looked-up continuation into the pool; tokens that are there already stay."""
        parent = 0
        for token_id in token_ids[:levels]:
            known = pool.find(parent, token_id)
            if known is None:
                confidence = np.array([[_LOOKUP_CONFIDENCE[matched]]])
                assert self._lookup_calibration is not None
                score = self._lookup_calibration.log_rates(confidence)
                known = int(
                    pool.add(np.array([parent]), np.array([[token_id]]), score, confidence)[0]
                )
            parent = known

    def learn(self, tree: Tree, path: list[int], emitted: int) -> None:
        """Tell the policy what became of the tree: the accepted `path` from the root down."""
        if self._pool is not None and len(tree) > 1:
            on_path = np.zeros(len(tree), np.int64)
            on_path[path] = 1
            judged = np.flatnonzero(on_path[tree.parents[1:]]) + 1
            drafted = self._chosen[judged] < self._looked_up
            confidences = self._pool.confidences[self._chosen[judged]]
            self._policy.learn(confidences[drafted], on_path[judged[drafted]])
            if self._lookup_calibration is not None and not drafted.all():
                self._lookup_calibration.learn(confidences[~drafted], on_path[judged[~drafted]])
        self._policy.end_round(emitted, self._spent_ms, len(tree))
        self._spent_ms = 0.0

    def confidences(self, tree: Tree) -> list[float]:
        """The draft's own probability of every node given its parent."""
        if self._pool is None:
            return [1.0] * len(tree)
        return self._pool.confidences[self._chosen].tolist()


def _cost(table: np.ndarray, rows: int) -> float:
    last = len(table) - 1
    return float(table[rows]) if rows <= last else float(table[last]) * math.ceil(rows / last)


def _most_lookup(lookup: NgramLookup | None) -> int:
    return 8 if lookup is not None else 0
