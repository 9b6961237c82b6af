"""Drafting with an ordinary, smaller language model (arXiv 2211.17192, 2302.01318).

Its cache holds all committed tokens, the newest among them, whose row gives the candidates for
the root's children. A round's tree rows stand behind, and the accepted ones become committed. A
text that begins as the one before goes on behind the rows that they share.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm.device_runtime.engine.prefix_cache import RecordedSession
from edgellm.device_runtime.session import F32, I64
from edgellm.device_runtime.speculate.draft_cache import ImageIds
from edgellm.device_runtime.speculate.drafter import TreeDrafter
from edgellm.device_runtime.speculate.gate import NetworkGate
from edgellm.device_runtime.speculate.lookup import LookupSource
from edgellm.device_runtime.speculate.policy import Costs, Policy, TreeLimits, price
from edgellm.device_runtime.speculate.tree import F64, Pool, Tree

_NONE = np.zeros(0, np.int64)


class ModelDrafter(TreeDrafter):
    """Grows the pool with a language model of the base's vocabulary."""

    def __init__(
        self,
        session: RecordedSession,
        policy: Policy,
        limits: TreeLimits,
        costs: Costs,
        *,
        num_candidates: int,
        num_readable: int,
        prefill_rows: int,
        lookups: Sequence[LookupSource] = (),
        gate: NetworkGate | None = None,
        image_ids: ImageIds | None = None,
    ) -> None:
        """Wire up.

        Args:
            session: the drafting model.
            policy: sizes the tree.
            limits: the user's bounds.
            costs: of the base, and of the model's passes.
            num_candidates: token ids that the base knows as well; the model's others are padding.
            num_readable: token ids that the model knows; behind one that it does not, an answer
                goes on without it.
            prefill_rows: rows per pass while a prompt is read.
            lookups: see `TreeDrafter`.
            gate: the same.
            image_ids: of a base that takes images.
        """
        super().__init__(policy, limits, lookups=lookups, gate=gate, image_ids=image_ids)
        self._session, self._costs, self._prefill_rows = session, costs, prefill_rows
        self._num_candidates, self._num_readable = num_candidates, num_readable

    def begin(self, token_ids: Sequence[int]) -> None:
        """Forget the answer before; the rows that the texts share are found when it is read."""
        super().begin(token_ids)
        self._text: list[int] = []
        self._length = 0  # rows of the cache that hold the text
        self._grown = _NONE  # pool nodes of the rows behind

    def remember(self, token_ids: list[int]) -> None:
        """Committed text, which the model reads as well."""
        super().remember(token_ids)
        ids = np.asarray(token_ids, np.int64)
        self._text += (ids if self._image_ids is None else self._image_ids.for_draft(ids)).tolist()

    def _read(self) -> None:
        """Read the committed text; its last row gives the root's children."""
        if len(self._text) > self._session.capacity:
            return
        if not self._length:
            self._length = min(self._session.held(self._text), len(self._text) - 1)
        waiting = np.array(self._text[self._length :])
        if (waiting >= self._num_readable).any():
            return
        for begin in range(0, len(waiting), self._prefill_rows):
            piece = waiting[begin : begin + self._prefill_rows]
            result = self._session.run(piece, self._length, np.array([len(piece) - 1]))
            self._length += len(piece)
            self._root = self._candidates(result.logits)
        if len(waiting) <= self._limits.round_rows:  # not a prompt or a pause
            self._spent_ms += price(self._costs.extend, len(waiting))
        else:
            self._opened_at = None  # it does not tell what rounds take

    def _candidates(self, logits: F32) -> tuple[I64, F64]:
        """The likeliest tokens of rows [R, V] and their log-probabilities, both [R, K]."""
        scores = logits[:, : self._num_candidates]
        scores = scores - scores.max(axis=1, keepdims=True)
        count = min(self._limits.top_k, scores.shape[1])
        best = np.argpartition(scores, -count)[:, -count:]
        order = np.argsort(-np.take_along_axis(scores, best, 1), axis=1, kind="stable")
        best = np.take_along_axis(best, order, 1)
        log_sums = np.log(np.exp(scores).sum(axis=1, keepdims=True))
        return best, np.take_along_axis(scores, best, 1).astype(np.float64) - log_sums

    def _is_ready(self) -> bool:
        """While committed text waits, the tree is the root."""
        return self._length == len(self._text)

    def _grow(self, pool: Pool, levels: int) -> None:
        self._grown, self._is_chain = _NONE, True
        newest = self._add(pool, np.zeros(1, np.int64), self._root)
        for _ in range(1, levels):
            nodes = np.sort(self._policy.frontier(pool, newest, self._prices()))
            if not len(nodes):
                return
            self._grown = np.concatenate([self._grown, nodes])
            newest = self._add(pool, nodes, self._level(pool, len(nodes)))

    def _add(self, pool: Pool, parents: I64, candidates: tuple[I64, F64]) -> I64:
        token_ids, log_probs = candidates
        return pool.add(parents, token_ids, self._policy.scores(log_probs), np.exp(log_probs))

    def _prices(self) -> F64:
        """Milliseconds of growing by one node, by two, ..., by as many as the cache has room."""
        used, room = len(self._grown), self._session.capacity - self._length
        rows = np.arange(used + 1, min(room, used + self._limits.verify_size) + 1)
        prices = price(self._costs.step, rows)
        if self._is_chain:
            prices[:1] = price(self._costs.step, 1)
        return prices

    def _level(self, pool: Pool, count: int) -> tuple[I64, F64]:
        """Candidates of the `count` nodes grown last.

        The graph's mask rules the rows of one pass alone, so that a tree is computed anew with
        every level; a chain goes on from the rows before.
        """
        tree, _ = pool.tree(self._grown)
        depths, mask = tree.layout()
        rows = len(self._grown)
        self._is_chain = int(depths[-1]) == rows
        if self._is_chain:
            last = tree.token_ids[-1:]
            result = self._session.run(last, self._length + rows - 1, np.zeros(1, np.int64))
        else:
            result = self._session.run(
                tree.token_ids[1:],
                self._length,
                np.arange(rows - count, rows),
                position_ids=self._length + depths[1:] - 1,
                tree_mask=mask[1:, 1:],
            )
        self._spent_ms += price(self._costs.step, 1 if self._is_chain else rows)
        return self._candidates(result.logits)

    def learn(self, tree: Tree, path: list[int], emitted: int) -> None:
        """Keep the rows of accepted nodes; see `TreeDrafter.learn`."""
        if self._pool is not None:
            accepted = np.flatnonzero(np.isin(self._grown, self._chosen[path]))
            if len(accepted) and not self._is_chain:
                self._session.compact(self._length, accepted)
            self._length += len(accepted)
        super().learn(tree, path, emitted)
