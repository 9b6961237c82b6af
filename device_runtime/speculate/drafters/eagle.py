"""EAGLE drafter (arXiv 2401.15077, 2406.16858, 2503.01840).

The draft has its own KV cache of exactly the committed tokens (`draft_cache.py`). A round's tree
nodes follow the committed positions, and the next round overwrites them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from edgellm.core.checksums import FileCheck
from edgellm.core.errors import LimitError
from edgellm.core.graph_roles import DRAFT, EXTEND, STEP
from edgellm.core.manifest import Engine
from edgellm.device_runtime.arrays import I64
from edgellm.device_runtime.networks.decoder import DecoderNetwork, PassResult
from edgellm.device_runtime.networks.draft import (
    DraftPart,
    DraftResult,
    RequestedResult,
    open_draft,
)
from edgellm.device_runtime.networks.sequence_kv import SequenceKV
from edgellm.device_runtime.runners.batch_costs import SharedCosts
from edgellm.device_runtime.runners.device_speculation import RoundOutcome
from edgellm.device_runtime.sampling.sampler import Sampler
from edgellm.device_runtime.speculate.acceptance import Accepted
from edgellm.device_runtime.speculate.device_rounds import DeviceRounds, RoundPart, open_rounds
from edgellm.device_runtime.speculate.draft_cache import DraftKVCaches
from edgellm.device_runtime.speculate.drafter import (
    SpecState,
    Verified,
)
from edgellm.device_runtime.speculate.drafter_loading import (
    DrafterContext,
    LoadedDrafter,
    check_candidates,
    open_own,
)
from edgellm.device_runtime.speculate.kv_drafter import KVDrafter
from edgellm.device_runtime.speculate.policy.costs import Costs, price, shared
from edgellm.device_runtime.speculate.policy.device_tree_size import growth_of
from edgellm.device_runtime.speculate.policy.tree_policy import TreeLimits
from edgellm.device_runtime.speculate.shared_passes import Passes, Wanted
from edgellm.device_runtime.speculate.tree import F64, CandidatePool

ROLE, METHODS = DRAFT, ("eagle", "eagle3")
DEFAULTS = TreeLimits()


def open(order: DrafterContext) -> LoadedDrafter:
    """The EAGLE network in the folder of its base."""
    return open_network(order, "eagle")


def open_network(
    order: DrafterContext, name: str, drafter: type[EagleDrafter] | None = None
) -> LoadedDrafter:
    """Load a network that runs as an EAGLE head, for the drafter `name` of this class."""
    folder, manifest = open_own(order, name)
    check_draft_rows(order.limits, manifest)
    with FileCheck(folder, manifest.files, order.verify):
        network = open_draft(folder, manifest)
    measured = network.costs_of(manifest, manifest.max_draft_tree_size)
    image_ids = order.image_ids(has_embeddings=manifest.draft.decoder.images is not None)
    growth = growth_of(order.options, order.limits)
    rounds = None if growth is None else open_rounds(order.network, network, growth)
    if rounds is not None:
        rounds.prepare(manifest.draft, manifest.max_draft_tree_size)
    host = order.host_ms if rounds is None else (0.0, 0.0)
    passes = order.pass_costs(), measured[STEP], measured[EXTEND]
    prices = Costs.of(*passes, *host, levels=SharedCosts.find(STEP, measured))
    round_rows = order.limits.round_rows
    max_rows = max(manifest.main_graphs[-1].max_rows, round_rows)
    caches = DraftKVCaches(
        network=network, round_rows=round_rows, image_ids=image_ids, max_rows=max_rows
    )

    def start(learned: SpecState) -> EagleDrafter:
        maximum = manifest.max_draft_tree_size
        return (drafter or EagleDrafter)(
            caches=caches,
            learned=learned,
            limits=order.limits,
            costs=prices,
            max_tree_rows=maximum,
            rounds=rounds,
        )

    return LoadedDrafter(
        costs=prices, start=start, caches=(caches,), growth=growth if rounds is not None else None
    )


def check_draft_rows(limits: TreeLimits, draft: Engine) -> None:
    """Reject trees that the draft engine was not built for; raises as `check_tree_size`."""
    if limits.draft_rows > draft.max_draft_tree_size:
        product = f"--eagleDraftTopK {limits.top_k} x --eagleDraftStep {limits.steps} = "
        raise LimitError(
            f"{product if limits.static_rows is None else ''}{limits.draft_rows} drafted tokens "
            f"exceed the draft engine's {draft.max_draft_tree_size}",
            hint="take less, or build with a larger --maxDraftTreeSize",
        )
    check_candidates(limits, draft.draft)


class EagleDrafter(KVDrafter):
    """Fills the pool with an EAGLE network."""

    def __init__(
        self,
        *,
        caches: DraftKVCaches,
        learned: SpecState,
        limits: TreeLimits,
        costs: Costs,
        max_tree_rows: int,
        rounds: DeviceRounds | None = None,
    ) -> None:
        """Compute nothing.

        Args:
            caches: the draft's.
            learned: see `TreeDrafter`.
            limits: the user's limits.
            costs: pass times of the engine.
            max_tree_rows: maximum tokens that the draft engine takes in one round.
            rounds: rounds on the device, if it can run them.
        """
        super().__init__(caches, learned, limits)
        self._costs, self._max_tree_rows = costs, max_tree_rows
        self._hidden_store = np.zeros((1 + max_tree_rows, 0), np.float32)
        self._unrelated = np.eye(1 + max_tree_rows, dtype=np.bool_)
        self._shares: dict[int, tuple[F64, F64]] = {}  # prices by batch size
        self._sharing = 1  # batch size of the latest pass
        self._root: Callable[[], DraftResult] | None = None  # fetches the root's candidates
        self._rounds, self._sizes = rounds, learned.sizes

    def _prefill(self) -> Passes[None]:
        """Compute the waiting positions; the last gives the root's children."""
        self._skip_what_was_missed()
        for part in self._parts():
            wanted = Wanted(network=self._network, part=part, is_async=self._rounds is not None)
            self._root = None  # the result of an earlier pass is obsolete
            if wanted.is_async:
                self._root = yield wanted
            else:
                result = yield wanted
                self._root = partial(_itself, result.copy())
            self._sharing = wanted.answers
            self._record_prefill(len(part.token_ids) - part.num_masks, self._prices()[1])

    def _parts(self) -> Iterator[DraftPart]:
        """The passes over the waiting positions."""
        return self._kv.parts(self._limits.top_k)

    def _prices(self) -> tuple[F64, F64]:
        """Milliseconds of a level of 1, 2, ... nodes, and of extending by tokens (index)."""
        answers = self._sharing
        if answers not in self._shares:
            rows = np.arange(1, self._max_tree_rows + 1)
            levels = price(self._costs.step_share(answers), rows)
            self._shares[answers] = levels, shared(self._costs.extend, answers)
        return self._shares[answers]

    def plan_round(
        self,
        network: DecoderNetwork,
        newest: tuple[int, SequenceKV, int],
        levels: int,
        sampler: Sampler,
        *,
        is_exact: bool,
    ) -> tuple[DeviceRounds, RoundPart] | None:
        """See `Drafter.plan_round`."""
        rounds, sizes, (root, kv, length) = self._rounds, self._sizes, newest
        if rounds is None or sizes is None or network is not rounds.base:
            return None
        if kv.adapter is not None:  # recorded passes have no adapters
            return None
        above = self._root
        if levels < 1 or not isinstance(above, RequestedResult) or not self._is_ready():
            return None
        self._controller.set_batch_load(self.batch_load)
        self._size = size = sizes.plan(min(levels, self._limits.steps), self._sharing)
        draft_rows = sum(rounds.growth.widths[: size.levels - 1])
        if above.row is None or length + size.nodes > network.capacity:
            return None
        if self._kv.length + draft_rows > self._network.capacity:
            return None
        return rounds, RoundPart(
            kvs=(kv, self._kv.kv),
            root=root,
            root_row=above.row,
            lengths=(length, self._kv.length),
            size=size,
            sampler=sampler,
            rates=self._policy.curve,
            is_exact=is_exact,
        )

    def take_round(self, found: RoundOutcome, result: PassResult) -> Verified:
        """See `Drafter.take_round`."""
        assert self._rounds is not None
        assert self._sizes is not None
        self._is_networked, self._root = True, None
        self._controller.set_batch_load(self.batch_load)
        log_probs = found.log_probs.astype(np.float64)
        pool = self._pool = CandidatePool.of_tree(
            found.token_ids, found.parents, self._policy.scores(log_probs), np.exp(log_probs)
        )
        nodes = np.arange(1, pool.count)
        tree, self._chosen = pool.tree(nodes)
        self._ends = [pool.count]
        widths = np.array(self._rounds.growth.widths[: self._size.levels - 1], np.int64)
        self._spent_ms += float(self._prices()[0][widths - 1].sum())
        self._sizes.learn(tree, self._size)
        accepted = None if found.accepted is None else Accepted(*found.accepted)
        return Verified(tree, result, accepted)

    def _is_ready(self) -> bool:
        """False while committed positions wait: the tree is then the root."""
        return not self._kv.has_waiting

    def _expand(self, pool: CandidatePool, levels: int) -> Passes[None]:
        assert self._root is not None
        policy, root, committed = self._policy, self._root(), self._kv.length
        if self._hidden_store.shape[1] != root.hidden.shape[1]:
            shape = 1 + self._max_tree_rows, root.hidden.shape[1]
            self._hidden_store = np.zeros_like(root.hidden, shape=shape)
        self._hidden_store[0] = root.hidden[0]
        mask = self._unrelated.copy()  # attention mask of tree nodes; 0 is the root
        slots = np.zeros(len(pool.token_ids), np.int64)
        newest = self._add(pool, np.zeros(1, np.int64), root)
        used, maximum = 0, min(self._max_tree_rows, self._network.capacity - committed)
        for level in range(1, levels):
            nodes = policy.frontier(pool, newest, self._prices()[0][: maximum - used])
            if not len(nodes):
                return
            above = slots[pool.parents[nodes]]
            slots[nodes] = own = np.arange(used + 1, used + 1 + len(nodes))
            mask[own] |= mask[above]
            part = DraftPart(
                kv=self._kv.kv,
                token_ids=pool.token_ids[nodes],
                write_index=committed + used,
                output_rows=own - own[0],
                top_k=self._limits.top_k,
                hidden=self._hidden_store[above],
                position_ids=np.full(len(nodes), committed + level - 1),
                tree_mask=mask[own, 1 : own[-1] + 1],
            )
            wanted = Wanted(network=self._network, part=self._placed(part))
            result = yield wanted
            self._sharing = wanted.answers
            self._controller.set_batch_load(self.batch_load)  # other drafters may have set theirs
            used += len(nodes)
            self._spent_ms += float(self._prices()[0][len(nodes) - 1])
            self._hidden_store[own] = result.hidden
            newest = self._add(pool, nodes, result)

    def _placed(self, part: DraftPart) -> DraftPart:
        """Hook for drafts whose tree nodes have other positions and masks."""
        return part

    def _add(self, pool: CandidatePool, parents: I64, found: DraftResult) -> I64:
        log_probs = found.log_probs.astype(np.float64)
        return pool.add(parents, found.token_ids, self._policy.scores(log_probs), np.exp(log_probs))


def _itself(result: DraftResult) -> DraftResult:
    return result
