"""Drafting with an EAGLE network (arXiv 2401.15077, 2406.16858, 2503.01840).

The draft keeps a KV cache of its own, so that it has seen exactly the committed tokens
(`draft_cache.py`). A round's tree rows stand behind the committed rows, and the next round
overwrites them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm.contract import LimitError
from edgellm.device_runtime.sessions import F32, I64, ImageRows
from edgellm.device_runtime.sessions.draft import costs, open_draft
from edgellm.device_runtime.speculate.costs import Costs, price
from edgellm.device_runtime.speculate.draft_cache import CommittedRows, SavedRows
from edgellm.device_runtime.speculate.drafter import Learned, TreeDrafter
from edgellm.device_runtime.speculate.opening import Opened, Order, check_candidates, open_own
from edgellm.device_runtime.speculate.policy import TreeLimits
from edgellm.device_runtime.speculate.tree import Pool
from edgellm.integrity import FileCheck
from edgellm.manifest import Engine
from edgellm.roles import DRAFT, EXTEND, STEP

ROLE = DRAFT
DEFAULTS = TreeLimits()


def open(order: Order) -> Opened:
    """The EAGLE network in the folder of its base."""
    folder, manifest = open_own(order, "eagle")
    check_draft_rows(order.limits, manifest)
    with FileCheck(folder, manifest.files, order.verify):
        session = open_draft(folder, manifest)
    measured = manifest.cost_ms or costs(session, manifest.draft, manifest.max_draft_tree_size)
    prices = Costs.of(order.pass_costs(), measured[STEP], measured[EXTEND])
    image_ids = order.image_ids(reads_rows=manifest.draft.decoder.images is not None)
    round_rows = order.limits.round_rows
    most_rows = max(manifest.main_graphs[-1].max_rows, round_rows)
    rows = CommittedRows(session, round_rows, image_ids, most_rows=most_rows)

    def start(learned: Learned) -> EagleDrafter:
        most = manifest.max_draft_tree_size
        return EagleDrafter(rows, learned, order.limits, prices, max_tree_rows=most)

    return Opened(prices, start, (rows,))


def check_draft_rows(limits: TreeLimits, draft: Engine) -> None:
    """Refuse trees that the draft engine was not built for; raises as `check_tree_size`."""
    if limits.draft_rows > draft.max_draft_tree_size:
        product = f"--eagleDraftTopK {limits.top_k} x --eagleDraftStep {limits.steps} = "
        raise LimitError(
            f"{product if limits.static_rows is None else ''}{limits.draft_rows} drafted rows "
            f"exceed the draft engine's {draft.max_draft_tree_size}",
            hint="take less, or build with a larger --maxDraftTreeSize",
        )
    check_candidates(limits, draft.draft)


class EagleDrafter(TreeDrafter):
    """Grows the pool with an EAGLE network."""

    def __init__(
        self,
        rows: CommittedRows,
        learned: Learned,
        limits: TreeLimits,
        costs: Costs,
        *,
        max_tree_rows: int,
    ) -> None:
        """Nothing is computed yet.

        Args:
            rows: of the draft.
            learned: see `TreeDrafter`.
            limits: the user's bounds.
            costs: of the engine, for the books.
            max_tree_rows: rows that the draft engine takes in one round.
        """
        super().__init__(learned, limits, image_ids=rows.image_ids)
        self._rows, self._costs, self._max_tree_rows = rows, costs, max_tree_rows
        self._hidden_store = np.zeros((1 + max_tree_rows, 0), np.float32)
        self._images: ImageRows | None = None
        self._saved: SavedRows | None = None  # while another answer has the cache

    def begin(self, token_ids: Sequence[int]) -> None:
        """See `CommittedRows.begin`."""
        super().begin(token_ids)
        self._rows.begin(token_ids)

    def set_images(self, images: ImageRows) -> None:
        """The images of the answer that begins."""
        self._images = images
        self._rows.set_images(images)

    def swap_out(self) -> None:
        """See `Drafter.swap_out`."""
        self._saved = self._rows.take_out()

    def swap_in(self) -> None:
        """See `Drafter.swap_in`."""
        if self._images is not None:
            self._rows.set_images(self._images)
        assert self._saved is not None
        self._rows.put_back(self._saved)
        self._saved = None

    def observe(self, next_token_ids: I64, taps: F32) -> None:
        """Committed rows: features [M, T*H] and the token that follows each, int64 [M]."""
        self._rows.observe(next_token_ids, taps)

    def _read(self) -> None:
        """Write the committed rows that wait; the last gives the root's children."""
        for rows, result in self._rows.write(self._limits.top_k):
            if rows <= self._limits.round_rows:  # not a prompt or a pause, which no tree can change
                self._spent_ms += price(self._costs.extend, rows)
            else:
                self._controller.look_away()  # nor does it tell what rounds take
            self._root_ids = result.token_ids.copy()
            self._root_log_probs = result.log_probs.astype(np.float64)
            self._root_hidden = result.hidden.copy()

    def _is_ready(self) -> bool:
        """While committed rows wait, the tree is the root."""
        return not self._rows.is_behind

    def _grow(self, pool: Pool, levels: int) -> None:
        policy = self._policy
        size = self._root_hidden.shape[1]
        if self._hidden_store.shape[1] != size:
            shape = 1 + self._max_tree_rows, size
            self._hidden_store = np.zeros_like(self._root_hidden, shape=shape)
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
            nodes = policy.frontier(pool, newest, price(self._costs.step, np.arange(1, free + 1)))
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
            self._spent_ms += price(self._costs.step, len(nodes))
            self._hidden_store[own] = result.hidden
            log_probs = result.log_probs.astype(np.float64)
            newest = pool.add(nodes, result.token_ids, policy.scores(log_probs), np.exp(log_probs))
