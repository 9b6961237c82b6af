"""Block drafter: a network that predicts a block of tokens in one pass.

A round runs it once, with the hidden states of the last round's committed tokens. It returns
candidates for every position of the block. They do not depend on the tokens between, as with
Medusa heads, unless the draft has links: then a candidate's score depends on its parent. A tree
of any size needs no further pass.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edgellm.core.checksums import FileCheck
from edgellm.core.errors import LimitError
from edgellm.core.graph_roles import BLOCK, PREDICT
from edgellm.core.model_spec import BlockSpec, DraftSpec
from edgellm.device_runtime.arrays import I64
from edgellm.device_runtime.networks.block import costs, open_block
from edgellm.device_runtime.networks.draft import DraftResult
from edgellm.device_runtime.speculate.draft_cache import DraftKVCaches
from edgellm.device_runtime.speculate.drafter import (
    RETRIAL_ROWS,
    SpecState,
)
from edgellm.device_runtime.speculate.drafter_loading import (
    DrafterContext,
    LoadedDrafter,
    check_candidates,
    open_own,
)
from edgellm.device_runtime.speculate.kv_drafter import KVDrafter
from edgellm.device_runtime.speculate.policy.costs import Costs, shared
from edgellm.device_runtime.speculate.policy.tree_policy import TreeLimits
from edgellm.device_runtime.speculate.shared_passes import Passes, Wanted
from edgellm.device_runtime.speculate.tree import F64, CandidatePool

ROLE = BLOCK
DEFAULTS = TreeLimits()  # `open` sets the steps to the block's size


def open(order: DrafterContext) -> LoadedDrafter:
    """The network in the folder of its base."""
    folder, manifest = open_own(order, "block")
    limits = block_limits(order, manifest.draft)
    with FileCheck(folder, manifest.files, order.verify):
        network = open_block(folder, manifest)
    measured = manifest.cost_ms or costs(network, manifest.draft, manifest.max_draft_tree_size)
    prices = Costs.of(order.pass_costs(), None, measured[PREDICT], *order.host_ms)
    image_ids = order.image_ids(has_embeddings=False)
    max_rows = max(manifest.main_graphs[-1].max_rows, limits.round_rows)
    caches = DraftKVCaches(
        network=network, round_rows=limits.round_rows, image_ids=image_ids, max_rows=max_rows
    )

    draft, top_k = manifest.draft, limits.top_k
    if links := network.block.links:  # links rank candidates better than the first scores do
        top_k = min(links, draft.max_candidates)

    def start(learned: SpecState) -> BlockDrafter:
        return BlockDrafter(
            caches=caches,
            block=network.block,
            learned=learned,
            limits=limits,
            costs=prices,
            num_candidates=top_k,
        )

    return LoadedDrafter(costs=prices, start=start, caches=(caches,))


def block_limits(order: DrafterContext, draft: DraftSpec) -> TreeLimits:
    """The limits with the block's number of levels, unless the user requests fewer.

    Raises:
        LimitError: the user requests more.
    """
    assert draft.block is not None
    levels, options = draft.block.levels, order.options
    limits = order.limits
    links = draft.block.links
    if links and limits.top_k > links:
        if options.choices:
            raise LimitError(
                f"the choices take {limits.top_k} candidates of a node, the draft knows {links}"
            )
        limits = replace(limits, top_k=links)
    check_candidates(limits, draft)
    if options.steps is None and not options.choices:
        return replace(limits, steps=levels)
    if limits.steps > levels:
        what = "the choices are" if options.choices else "--eagleDraftStep is"
        raise LimitError(
            f"{what} {limits.steps} levels deep, the draft's blocks predict {levels} tokens",
            hint="take fewer",
        )
    return limits


class BlockDrafter(KVDrafter):
    """Fills the pool with the candidates of a block."""

    def __init__(
        self,
        *,
        caches: DraftKVCaches,
        block: BlockSpec,
        learned: SpecState,
        limits: TreeLimits,
        costs: Costs,
        num_candidates: int,
    ) -> None:
        """Compute nothing.

        Args:
            caches: the draft's.
            block: the draft's.
            learned: see `TreeDrafter`.
            limits: the user's limits, at most the block's levels.
            costs: pass times; `extend` includes the block after the committed tokens.
            num_candidates: candidates of a position, at least a node's maximum children.
        """
        super().__init__(caches, learned, limits)
        self._spec, self._costs = block, costs
        self._num_candidates, self._size = num_candidates, rows_of(block, limits.steps)
        self._block: DraftResult | None = None  # after the newest token
        self._shares: dict[int, F64] = {}  # prices by batch size

    def _prefill(self) -> Passes[None]:
        """Compute the waiting positions, with a block after them."""
        self._skip_what_was_missed()
        self._kv.restart(RETRIAL_ROWS)
        for part in self._kv.parts(self._num_candidates):
            rows = len(part.token_ids)
            block = np.arange(rows, rows + self._size)
            wanted = Wanted(network=self._network, part=replace(part, output_rows=block))
            result = yield wanted
            self._block = result.copy()
            self._record_prefill(rows, self._prices(wanted.answers))

    def _prices(self, answers: int) -> F64:
        """Milliseconds by number of committed tokens."""
        if answers not in self._shares:
            self._shares[answers] = shared(self._costs.extend, answers)
        return self._shares[answers]

    def _is_ready(self) -> bool:
        """False while committed positions wait: the tree is then the root."""
        return self._block is not None and not self._kv.has_waiting

    def _expand(self, pool: CandidatePool, levels: int) -> None:
        assert self._block is not None
        found, policy = self._block, self._policy
        first = 0 if self._spec.from_newest else 1
        nodes, ranks = np.zeros(1, np.int64), np.zeros(1, np.int64)  # of nodes in their row
        for row in range(first, min(first + levels, len(found.token_ids))):
            ids, log_probs, places = _children(found, row, ranks, self._limits.top_k)
            newest = pool.add(nodes, ids, policy.scores(log_probs), np.exp(log_probs))
            nodes = policy.frontier(pool, newest, np.zeros(len(newest)))
            if not len(nodes):
                return
            ranks = places[nodes - newest[0]]


def _children(found: DraftResult, row: int, ranks: I64, top_k: int) -> tuple[I64, F64, I64]:
    """The candidates of a block position after each of N parents, best first.

    Args:
        found: the block's result.
        row: the position in the block.
        ranks: ranks of the N parents among the candidates of the position before, int64 [N].
        top_k: K.

    Returns:
        Token ids and log-probabilities [N, K], and their ranks at the position [N * K].
    """
    if found.links is None:
        shape = len(ranks), found.token_ids.shape[1]
        ids = np.broadcast_to(found.token_ids[row], shape)
        log_probs = np.broadcast_to(found.log_probs[row].astype(np.float64), shape)
        return ids, log_probs, np.tile(np.arange(shape[1]), shape[0])
    log_probs = found.links[row][ranks].astype(np.float64)
    order = np.argsort(-log_probs, axis=1, kind="stable")[:, :top_k]
    return found.token_ids[row][order], np.take_along_axis(log_probs, order, 1), order.ravel()


def rows_of(block: BlockSpec, levels: int) -> int:
    """Positions of a pass that predicts `levels`; a bidirectional block is never shortened."""
    if not block.is_causal:
        return block.size
    return min(block.size, levels if block.from_newest else levels + 1)
