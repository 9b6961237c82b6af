"""A round of EAGLE on one stream: grown, verified and accepted without the host, which waits once.

Passes over levels and over trees have fixed shapes and lie in CUDA graphs, which are recorded when
the engine is loaded. Small kernels between them make a pass's inputs of the outputs before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from edgellm import contract
from edgellm.contract import EdgeLLMError
from edgellm.device_runtime.kernels.triton import catalog
from edgellm.device_runtime.kernels.triton.catalog import JOIN_PICKS, PICK_SHARES, Variant
from edgellm.device_runtime.runners.rounds import Draws, Growth, RoundOrder, RoundOutcome
from edgellm.device_runtime.runners.tensorrt.bound_pass import PlacedPass
from edgellm.device_runtime.runners.tensorrt.device import Device
from edgellm.device_runtime.runners.tensorrt.device_rows import WORD_BYTES
from edgellm.device_runtime.runners.tensorrt.network import Network
from edgellm.device_runtime.runners.tensorrt.round_memory import RoundMemory

_log = logging.getLogger(__name__)
_SETTLED = 0  # the status of an acceptance that needs no host
_ONE = (1, 1, 1)


def open_rounds(
    base: Network, draft: Network, growth: Growth, device: Device
) -> TensorRtRounds | None:
    """See `runners.rounds.GrowsTrees`; a warning says what a GPU lacks."""
    try:
        return TensorRtRounds(base, draft, growth, device)
    except EdgeLLMError as error:
        _log.warning("%s; rounds of a tree wait for the host, which is slower", error)
        return None


class TensorRtRounds:
    """See `runners.rounds.Rounds`."""

    def __init__(self, base: Network, draft: Network, growth: Growth, device: Device) -> None:
        """Allocate, run everything once and record it; caches hold nothing yet.

        Raises:
            LimitError: the device is too small, or an engine for such trees.
            EdgeLLMError: there are no kernels for such trees, or for this GPU.
        """
        self._base, self._draft, self._growth, self._device = base, draft, growth, device
        hidden = draft.tensor(contract.DRAFT_HIDDEN)
        self._row_bytes = hidden.shape[-1] * hidden.dtype.itemsize
        if self._row_bytes % WORD_BYTES:
            raise EdgeLLMError(f"rows of {self._row_bytes} bytes are not gathered on a GPU")
        self._vocab_size = base.tensor(contract.LOGITS).shape[-1]
        self._axes = [each.tensor(contract.POSITION_IDS).shape[0] for each in (base, draft)]
        self._variants = _Variants(growth)
        candidates = draft.tensor(contract.CANDIDATE_IDS).shape[-1]
        self._memory = RoundMemory(
            device,
            growth,
            axes=(self._axes[0], self._axes[1]),
            candidates=candidates,
            hidden=(hidden.shape[-1], hidden.dtype),
            vocab_size=self._vocab_size,
        )
        self._at, self._host = self._memory.tensors, self._memory.arguments.addresses
        self._stride = candidates
        levels = range(len(growth.widths))
        self._level_pieces = [_Piece(partial(self._grow, at), self._place(at)) for at in levels]
        self._verifications = {
            nodes: _Piece(_nothing, self._verify(nodes)) for nodes in growth.nodes
        }
        self._asked: RoundOrder | None = None
        self._prepare()

    def _prepare(self) -> None:
        levels = self._growth.levels
        draws, found = Draws(np.ones(4), np.zeros(1 + levels)), None
        for nodes in self._growth.nodes:
            for kind in ("greedy", "sampled"):
                self.ask(RoundOrder(0, (0, 0), (0, 0), levels, nodes, None, kind, draws))
                found = self.finish()
        assert found is not None
        taps = found.outputs[contract.HIDDEN_TAPS][0]
        # What outlives a round, and the round before's: their memory is kept to be used again.
        _ = [taps[:count].copy() for count in range(1, 2 + levels) for _ in range(2)]
        for piece in (*self._level_pieces, *self._verifications.values()):
            piece.record(self._device)

    @property
    def _draws_here(self) -> bool:
        """Whether requests that are not greedy can be accepted on the device."""
        return self._vocab_size <= catalog.SHARES * catalog.SHARE

    def _accepts(self, order: RoundOrder) -> bool:
        return order.accepts == "greedy" or (order.accepts == "sampled" and self._draws_here)

    def ask(self, order: RoundOrder) -> None:
        """See `runners.rounds.Rounds`."""
        self._base.expire()
        self._draft.expire()
        self._write(order)
        with self._device.current():
            self._memory.upload()
            self._device.copy(self._at["tokens"], self._host["root"], 8)
            recycled = self._draft.kept_address(contract.RECYCLED_HIDDEN)
            self._device.copy(self._at["hidden"], recycled, self._row_bytes)
            for piece in self._level_pieces[: order.levels - 1]:
                piece()
            self._add(order.levels - 1)
            self._select(order)
            self._verifications[order.nodes]()
            self._accept(order)
            self._memory.download(order.nodes)
        self._asked = order

    def finish(self) -> RoundOutcome:
        """See `runners.rounds.Rounds`."""
        order = self._asked
        assert order is not None
        self._device.synchronize()
        self._base.settled()
        self._draft.settled()
        report = {name: a.copy() for name, a in self._memory.reports[order.nodes].arrays.items()}
        length, token, status = report["outcome"].tolist()
        accepted = None
        if status == _SETTLED and self._accepts(order):
            accepted = report["path"][:length].tolist(), token
        there = 1 + int(np.count_nonzero(report["parents"] >= 0))
        ids, parents, own = (report[each][:there] for each in ("token_ids", "parents", "log_probs"))
        sizes = order.nodes, order.nodes, order.nodes
        picked = {contract.TOKEN_IDS: self._at["argmax"], contract.TOP_LOGITS: self._at["highest"]}
        return RoundOutcome(ids, parents, own, accepted, self._base.placed_outputs(sizes, picked))

    def _write(self, order: RoundOrder) -> None:
        host = self._memory.arguments.arrays
        host["base_start"][:], host["draft_start"][:] = order.base_start, order.draft_start
        host["root"][:] = order.root
        if order.rates is not None:
            host["rates"][:] = order.rates
        if order.draws is not None:
            host["rules"][:], host["uniforms"][:] = order.draws.rules, order.draws.uniforms

    def _launch(self, kernel: Variant, *arguments: int, grid: tuple[int, int, int] = _ONE) -> None:
        self._device.launch(kernel, grid, arguments)

    def _add(self, level: int) -> None:
        """The candidates of a level join the pool; those that get children are a pass's rows."""
        at, growth = self._at, self._growth
        widths, is_last = growth.widths, level == len(growth.widths)
        rows = (1, *widths)[level]
        above = f"nodes{level - 1}" if level else "root_nodes"
        ids, log_probs = at["candidate_ids"], at["candidate_log_probs"]
        if not level:
            picks = self._draft.pick_addresses()
            ids, log_probs = (picks[contract.CANDIDATE_IDS], picks[contract.CANDIDATE_LOG_PROBS])
        table = self._host["rates"] if growth.scored == "rates" else at["places"]
        self._launch(
            self._variants.grow, ids, log_probs, at[above], self._host["draft_start"], table,
            at["tokens"], at["parents"], at["scores"], at["own"], at["seen"], self._stride,
            growth.pool_size(level), rows, growth.top_k, sum(widths[:level]),
            0 if is_last else widths[level], 1 + sum(widths), level, self._axes[1],
            *(at[f"{name}{'' if is_last else level}"]
              for name in ("nodes", "level_tokens", "above", "positions", "slot", "mask")),
        )  # fmt: skip

    def _grow(self, level: int) -> None:
        """What comes before the draft's pass over the chosen nodes of a level."""
        self._add(level)
        self._device.gather_rows_at(
            self._at["level_hidden"],
            self._at["hidden"],
            self._at[f"above{level}"],
            self._growth.widths[level],
            self._row_bytes,
        )

    def _place(self, level: int) -> PlacedPass:
        """The draft's pass; its rows' hidden numbers go to the store."""
        at, widths = self._at, self._growth.widths
        used, count = sum(widths[:level]), widths[level]
        found = self._draft.place(
            (count, used + count, count),
            {
                contract.INPUT_IDS: at[f"level_tokens{level}"],
                contract.POSITION_IDS: at[f"positions{level}"],
                contract.TREE_MASK: at[f"mask{level}"],
                contract.WRITE_INDEX: at[f"slot{level}"],
                contract.LOGITS_INDEX: at["index"],
                contract.DRAFT_HIDDEN: at["level_hidden"],
            },
            {
                contract.CANDIDATE_IDS: at["candidate_ids"],
                contract.CANDIDATE_LOG_PROBS: at["candidate_log_probs"],
            },
        )

        def enqueue() -> None:
            found.enqueue()
            recycled = self._draft.kept_address(contract.RECYCLED_HIDDEN)
            store = at["hidden"] + (1 + used) * self._row_bytes
            self._device.copy(store, recycled, count * self._row_bytes)

        return PlacedPass(enqueue, may_capture=found.may_capture)

    def _select(self, order: RoundOrder) -> None:
        """The tree of a pool and what the base's pass over it is told."""
        at, report = self._at, self._memory.reports[order.nodes].addresses
        self._launch(
            self._variants.select, at["tokens"], at["parents"], at["scores"], at["own"],
            self._growth.pool_size(order.levels), order.nodes - 1,
            report["token_ids"], report["parents"], report["log_probs"], at["chosen"],
        )  # fmt: skip
        self._launch(
            self._variants.lay_out, report["parents"], self._host["base_start"], order.nodes,
            self._axes[0], at["tree_positions"], at["tree_mask"],
        )  # fmt: skip

    def _verify(self, nodes: int) -> PlacedPass:
        at, report = self._at, self._memory.reports[nodes].addresses
        return self._base.place(
            (nodes, nodes, nodes),
            {
                contract.INPUT_IDS: report["token_ids"],
                contract.POSITION_IDS: at["tree_positions"],
                contract.TREE_MASK: at["tree_mask"],
                contract.WRITE_INDEX: self._host["base_start"],
                contract.LOGITS_INDEX: at["index"],
            },
            {contract.TOKEN_IDS: at["argmax"], contract.TOP_LOGITS: at["highest"]},
        )

    def _accept(self, order: RoundOrder) -> None:
        at, nodes = self._at, order.nodes
        report = self._memory.reports[nodes].addresses
        tree = report["token_ids"], report["parents"]
        if order.accepts == "greedy":
            self._launch(
                self._variants.greedy, *tree, at["argmax"], at["highest"], 1, nodes,
                report["path"], report["outcome"],
            )  # fmt: skip
        if order.accepts != "sampled" or not self._draws_here:
            return
        shares = -(-self._vocab_size // catalog.SHARE)
        logits = self._base.kept_address(contract.LOGITS)
        self._launch(
            PICK_SHARES, logits, self._vocab_size, at["keys"], at["sums"], grid=(nodes, shares, 1)
        )
        self._launch(
            JOIN_PICKS, at["keys"], at["sums"], self._vocab_size, shares, at["values"], at["ids"],
            at["picked"], at["log_sums"], grid=(nodes, 1, 1),
        )  # fmt: skip
        self._launch(
            self._variants.sampled, *tree, at["values"], at["ids"], self._host["rules"],
            self._host["uniforms"], 1, nodes, self._vocab_size, report["path"], report["outcome"],
        )  # fmt: skip


class _Piece:
    """Work that recurs with the same sizes and addresses."""

    def __init__(self, before: Callable[[], None], found: PlacedPass) -> None:
        self._before, self._pass = before, found
        self._replay: Callable[[], None] | None = None

    def __call__(self) -> None:
        """Ask for it."""
        (self._replay or self._enqueue)()

    def record(self, device: Device) -> None:
        """As a CUDA graph, behind its first run."""
        if self._pass.may_capture:
            self._replay = device.capture(self._enqueue)

    def _enqueue(self) -> None:
        self._before()
        self._pass.enqueue()


class _Variants:
    """The kernels for trees of some sizes."""

    def __init__(self, growth: Growth) -> None:
        """Raises `EdgeLLMError` where trees are too large for all of them."""
        nodes = _least(catalog.NODES, growth.nodes[-1], "nodes")
        candidates = growth.top_k * max(growth.widths, default=1)
        self.grow = catalog.grow_level(
            _least(catalog.LEVELS, candidates, "candidates of a level"), growth.scored
        )
        pool = growth.pool_size(growth.levels)
        self.select = catalog.select_tree(_least(catalog.POOLS, pool, "candidates"))
        self.lay_out = catalog.lay_out(nodes)
        self.greedy, self.sampled = catalog.accept_greedy(nodes), catalog.accept_sampled(nodes)


def _least(sizes: Sequence[int], needed: int, what: str) -> int:
    for size in sizes:
        if size >= needed:
            return size
    raise EdgeLLMError(f"trees of {needed} {what} exceed the {sizes[-1]} of edgellm's kernels")


def _nothing() -> None:
    """What comes before a verification lies outside of its graph: it depends on the levels."""
