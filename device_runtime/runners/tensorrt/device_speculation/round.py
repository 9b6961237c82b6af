"""A round of EAGLE on one stream: draft, verify and accept on the device, with one host wait.

Passes over levels and trees have fixed shapes. Their CUDA graphs are recorded when the engine is
loaded. Small kernels convert the outputs of a pass to the inputs of the next.

The sequences of a round are one batch with equally many tokens each. Passes exist for some batch
sizes; smaller batches are padded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.kernels.triton import catalog
from edgellm.device_runtime.kernels.triton.catalog import JOIN_PICKS, PICK_SHARES, Variant
from edgellm.device_runtime.runners.device_speculation import (
    Draws,
    Growth,
    RoundOrder,
    RoundOutcome,
)
from edgellm.device_runtime.runners.tensorrt.bound_pass import (
    PlacedPass,
    bucket_of,
    bucket_sizes,
)
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import Device
from edgellm.device_runtime.runners.tensorrt.device_speculation.memory import RoundMemory, Shape
from edgellm.device_runtime.runners.tensorrt.device_speculation.protocols import Network
from edgellm.device_runtime.runners.tensorrt.device_tensors import WORD_BYTES
from edgellm.device_runtime.runners.tensorrt.ragged_batch import Share

_log = logging.getLogger(__name__)
_ACCEPTED = 0  # the status of an acceptance that needs no host


def open_rounds(
    base: Network, draft: Network, growth: Growth, device: Device
) -> TensorRtRounds | None:
    """See `Runner.open_rounds`; logs a warning if the GPU cannot run rounds."""
    try:
        return TensorRtRounds(base=base, draft=draft, growth=growth, device=device)
    except EdgeLLMError as error:
        _log.warning("%s; rounds of a tree wait for the host, which is slower", error)
        return None


class TensorRtRounds:
    """See `device_runtime.runners.device_speculation.Rounds`."""

    def __init__(self, *, base: Network, draft: Network, growth: Growth, device: Device) -> None:
        """Allocate, and run and record all passes; the caches must be empty.

        Raises:
            LimitError: the device has too little memory, or an engine is too small for the trees.
            EdgeLLMError: there are no kernels for these trees, or for this GPU.
        """
        self._base, self._draft, self._growth, self._device = base, draft, growth, device
        hidden = draft.tensor(graph_io.DRAFT_HIDDEN)
        self._row_bytes = hidden.shape[-1] * hidden.dtype.itemsize
        if self._row_bytes % WORD_BYTES:
            raise EdgeLLMError(f"hidden states of {self._row_bytes} bytes are not supported")
        self._vocab_size = base.tensor(graph_io.LOGITS).shape[-1]
        self._axes = [each.tensor(graph_io.POSITION_IDS).shape[0] for each in (base, draft)]
        self._variants = _Variants(growth)
        self._stride = candidates = draft.tensor(graph_io.CANDIDATE_IDS).shape[-1]
        of_levels = draft.tree_rows // max(growth.widths, default=1)
        of_trees = base.tree_rows // growth.nodes[0]
        self._maximum = min(base.num_sequences, draft.num_sequences, of_levels, of_trees)
        self._many = catalog.SEQUENCES if base.num_sequences > 1 else 0  # of a pass's table
        self._counts = bucket_sizes(self._maximum)
        trees = [(nodes, count) for nodes in growth.nodes for count in self._tree_counts(nodes)]
        self._memory = RoundMemory(
            device=device,
            growth=growth,
            axes=(self._axes[0], self._axes[1]),
            candidates=candidates,
            hidden=(hidden.shape[-1], hidden.dtype),
            vocab_size=self._vocab_size,
            sequences=max(base.num_sequences, 1),
            trees=trees,
        )
        self._at, self._host = self._memory.tensors, self._memory.arguments.addresses
        levels = range(len(growth.widths))
        self._level_steps = {
            count: [
                _Step(partial(self._expand, at, count), self._place(at, count)) for at in levels
            ]
            for count in self._counts
        }
        self._verifications = {each: _Step(_nothing, self._verify(each)) for each in trees}
        self._asked: tuple[Sequence[RoundOrder], Shape] | None = None
        self._prepare()

    def _prepare(self) -> None:
        levels = self._growth.levels
        draws, found = Draws(np.ones(4), np.zeros(1 + levels)), list[RoundOutcome]()
        for nodes in self._growth.nodes:
            for count in self._tree_counts(nodes):
                for kind in ("greedy", "sampled"):
                    order = RoundOrder(
                        root=0,
                        base_start=(0, 0),
                        draft_start=(0, 0),
                        levels=levels,
                        nodes=nodes,
                        rates=None,
                        accepts=kind,
                        draws=draws,
                    )
                    self.ask([order] * count)
                    found = self.finish()
        taps = found[0].outputs[graph_io.HIDDEN_TAPS][0]
        # Fill the pool with buffers for the hidden states of two rounds.
        copies = 2 * self._maximum
        _ = [taps[:count].copy() for count in range(1, 2 + levels) for _ in range(copies)]
        for steps in (*self._level_steps.values(), self._verifications.values()):
            for step in steps:
                step.record(self._device)

    @property
    def _draws_here(self) -> bool:
        """Whether sampled requests can be accepted on the device."""
        return self._vocab_size <= catalog.SHARES * catalog.SHARE

    def _accepts(self, order: RoundOrder) -> bool:
        return order.accepts == "greedy" or (order.accepts == "sampled" and self._draws_here)

    def maximum(self, nodes: int) -> int:
        """See `device_runtime.runners.device_speculation.Rounds`."""
        return max(min(self._maximum, self._base.tree_rows // nodes), 1)

    def _tree_counts(self, nodes: int) -> list[int]:
        """Batch sizes of the passes over trees of `nodes`."""
        return bucket_sizes(self.maximum(nodes))

    def ask(self, orders: Sequence[RoundOrder]) -> None:
        """See `device_runtime.runners.device_speculation.Rounds`."""
        levels, nodes = (max(getattr(one, of) for one in orders) for of in ("levels", "nodes"))
        count, trees = bucket_of(len(orders), self._counts), self._tree_counts(nodes)
        shape = nodes, bucket_of(len(orders), trees)
        self._base.expire()
        self._write(orders, nodes)
        with self._device.current():
            self._memory.upload()
            self._bring_roots([order.root_row for order in orders])
            for step in self._level_steps[count][: levels - 1]:
                step()
            self._add(levels - 1, count)
            self._select(levels, shape)
            self._verifications[shape]()
            self._accept({order.accepts for order in orders}, shape)
            self._memory.download(shape)
        self._asked = orders, shape

    def finish(self) -> list[RoundOutcome]:
        """See `device_runtime.runners.device_speculation.Rounds`."""
        assert self._asked is not None
        orders, shape = self._asked
        self._device.synchronize()
        self._base.on_synchronized()
        self._draft.on_synchronized()
        report = {name: a.copy() for name, a in self._memory.reports[shape].arrays.items()}
        nodes, rows = shape[0], shape[0] * shape[1]
        picked = {graph_io.TOKEN_IDS: self._at["argmax"], graph_io.TOP_LOGITS: self._at["highest"]}
        outputs = self._base.placed_outputs((rows, rows, rows), picked)
        found = []
        for at, order in enumerate(orders):
            own = slice(at * nodes, (at + 1) * nodes)
            report_of_it = {name: array[at] for name, array in report.items()}
            found.append(self._outcome(order, report_of_it, Share(outputs, own, own)))
        return found

    def _outcome(
        self, order: RoundOrder, report: Mapping[str, NDArray], outputs: Share
    ) -> RoundOutcome:
        accepted = None
        if self._accepts(order):
            length, token, status = report[f"{order.accepts}_outcome"].tolist()
            if status == _ACCEPTED:
                accepted = report[f"{order.accepts}_path"][:length].tolist(), token
        there = 1 + int(np.count_nonzero(report["parents"] >= 0))
        ids, parents, own = (report[each][:there] for each in ("token_ids", "parents", "log_probs"))
        return RoundOutcome(
            token_ids=ids, parents=parents, log_probs=own, accepted=accepted, outputs=outputs
        )

    def _write(self, orders: Sequence[RoundOrder], nodes: int) -> None:
        host = self._memory.arguments.arrays
        host["base_start"][:], host["draft_start"][:] = 0, 0  # padding
        host["rules"][:], host["uniforms"][:] = (1, 0, 1, 0), 0
        for at, order in enumerate(orders):
            bases = (
                network.first_row(cache)
                for network, cache in zip((self._base, self._draft), order.caches, strict=True)
            )
            host["base_start"][at] = *order.base_start, next(bases), order.nodes, order.root
            host["draft_start"][at] = *order.draft_start, next(bases), order.levels, order.root
            if order.rates is not None:
                host["rates"][at] = order.rates
            if order.draws is not None:
                host["rules"][at] = order.draws.rules
                drawn = order.draws.uniforms[:nodes]
                host["uniforms"][at * nodes : at * nodes + len(drawn)] = drawn

    def _bring_roots(self, rows: Sequence[int]) -> None:
        """Copy the draft's candidates of the roots to the inputs of the round."""
        at, picks = self._at, self._draft.pick_addresses()
        moved = (
            (at["root_ids"], picks[graph_io.CANDIDATE_IDS], 8 * self._stride),
            (at["root_log_probs"], picks[graph_io.CANDIDATE_LOG_PROBS], 4 * self._stride),
            (at["hidden"], self._draft.kept_address(graph_io.RECYCLED_HIDDEN), self._row_bytes),
        )
        first = 0
        for end in range(1, len(rows) + 1):
            if end < len(rows) and rows[end] == rows[end - 1] + 1:
                continue
            for target, source, size in moved:
                count = (end - first) * size
                self._device.copy(target + first * size, source + rows[first] * size, count)
            first = end

    def _launch(self, kernel: Variant, *arguments: int, grid: tuple[int, int, int]) -> None:
        self._device.launch(kernel, grid, arguments)

    def _add(self, level: int, count: int) -> None:
        """Add the candidates of a level to the pools, and select the nodes to expand."""
        at, growth = self._at, self._growth
        widths, is_last = growth.widths, level == len(growth.widths)
        rows = (1, *widths)[level]
        above = f"nodes{level - 1}" if level else "root_nodes"
        source = "candidate" if level else "root"
        table = self._host["rates"] if growth.scored == "rates" else at["places"]
        self._launch(
            self._variants.grow, at[f"{source}_ids"], at[f"{source}_log_probs"], at[above],
            self._host["draft_start"], table, at["tokens"], at["parents"], at["scores"], at["own"],
            at["seen"], self._stride, growth.pool_size(level), rows, growth.top_k,
            sum(widths[:level]), 0 if is_last else widths[level], 1 + sum(widths), level,
            self._axes[1], growth.pool_size(growth.levels), 0 if is_last else self._many,
            *(at[f"{name}{'' if is_last else level}"]
              for name in ("nodes", "level_tokens", "above", "positions", "slot", "mask")),
            grid=(count, 1, 1),
        )  # fmt: skip

    def _expand(self, level: int, count: int) -> None:
        """Prepare the draft's pass over the selected nodes of a level."""
        self._add(level, count)
        self._device.gather_rows_at(
            self._at["level_hidden"],
            self._at["hidden"],
            self._at[f"above{level}"],
            count * self._growth.widths[level],
            self._row_bytes,
        )

    def _place(self, level: int, count: int) -> PlacedPass:
        """The draft's pass over a level; its hidden states go to the store."""
        at, widths = self._at, self._growth.widths
        used, rows = sum(widths[:level]), count * widths[level]
        found = self._draft.place(
            (rows, used + widths[level], rows),
            {
                graph_io.INPUT_IDS: at[f"level_tokens{level}"],
                graph_io.POSITION_IDS: at[f"positions{level}"],
                graph_io.TREE_MASK: at[f"mask{level}"],
                self._slot_input: at[f"slot{level}"],
                graph_io.LOGITS_INDEX: at["index"],
                graph_io.DRAFT_HIDDEN: at["level_hidden"],
            },
            {
                graph_io.CANDIDATE_IDS: at["candidate_ids"],
                graph_io.CANDIDATE_LOG_PROBS: at["candidate_log_probs"],
                graph_io.RECYCLED_HIDDEN: at["level_recycled"],  # keeps the roots' hidden states
            },
        )

        def enqueue() -> None:
            found.enqueue()
            store = at["hidden"] + count * (1 + used) * self._row_bytes
            self._device.copy(store, at["level_recycled"], rows * self._row_bytes)

        return PlacedPass(enqueue, may_capture=found.may_capture)

    @property
    def _slot_input(self) -> str:
        return graph_io.SEQUENCES if self._many else graph_io.WRITE_INDEX

    def _select(self, levels: int, trees: Shape) -> None:
        """Select the trees from the pools, and write the inputs of the base's pass."""
        at, report, (nodes, count) = self._at, self._memory.reports[trees].addresses, trees
        start = self._host["base_start"]
        self._launch(
            self._variants.select, at["tokens"], at["parents"], at["scores"], at["own"], start,
            self._growth.pool_size(levels), nodes - 1, self._growth.pool_size(self._growth.levels),
            report["token_ids"], report["parents"], report["log_probs"], at["chosen"],
            grid=(count, 1, 1),
        )  # fmt: skip
        self._launch(
            self._variants.lay_out, report["parents"], start, nodes, self._axes[0], self._many,
            at["tree_positions"], at["tree_slot"], at["tree_mask"], grid=(count, 1, 1),
        )  # fmt: skip

    def _verify(self, trees: Shape) -> PlacedPass:
        at, report, (nodes, count) = self._at, self._memory.reports[trees].addresses, trees
        return self._base.place(
            (nodes * count, nodes, nodes * count),
            {
                graph_io.INPUT_IDS: report["token_ids"],
                graph_io.POSITION_IDS: at["tree_positions"],
                graph_io.TREE_MASK: at["tree_mask"],
                self._slot_input: at["tree_slot"],
                graph_io.LOGITS_INDEX: at["index"],
            },
            {graph_io.TOKEN_IDS: at["argmax"], graph_io.TOP_LOGITS: at["highest"]},
        )

    def _accept(self, kinds: Collection[str], trees: Shape) -> None:
        """Accept all trees by each of the requested rules."""
        at, (nodes, count) = self._at, trees
        report = self._memory.reports[trees].addresses
        tree = report["token_ids"], report["parents"]
        if "greedy" in kinds:
            self._launch(
                self._variants.greedy, *tree, at["argmax"], at["highest"], count, nodes,
                report["greedy_path"], report["greedy_outcome"], grid=(count, 1, 1),
            )  # fmt: skip
        if "sampled" not in kinds or not self._draws_here:
            return
        shares, rows = -(-self._vocab_size // catalog.SHARE), nodes * count
        logits = self._base.kept_address(graph_io.LOGITS)
        self._launch(
            PICK_SHARES, logits, self._vocab_size, at["keys"], at["sums"], grid=(rows, shares, 1)
        )
        self._launch(
            JOIN_PICKS, at["keys"], at["sums"], self._vocab_size, shares, at["values"], at["ids"],
            at["picked"], at["log_sums"], grid=(rows, 1, 1),
        )  # fmt: skip
        self._launch(
            self._variants.sampled, *tree, at["values"], at["ids"], self._host["rules"],
            self._host["uniforms"], count, nodes, self._vocab_size, report["sampled_path"],
            report["sampled_outcome"], grid=(count, 1, 1),
        )  # fmt: skip


class _Step:
    """A recurring step with constant sizes and addresses."""

    def __init__(self, before: Callable[[], None], found: PlacedPass) -> None:
        self._before, self._pass = before, found
        self._replay: Callable[[], None] | None = None

    def __call__(self) -> None:
        """Enqueue the step."""
        (self._replay or self._enqueue)()

    def record(self, device: Device) -> None:
        """Record the step as a CUDA graph, after its first run."""
        if self._pass.may_capture:
            self._replay = device.capture(self._enqueue)

    def _enqueue(self) -> None:
        self._before()
        self._pass.enqueue()


class _Variants:
    """The kernels for the sizes of the trees."""

    def __init__(self, growth: Growth) -> None:
        """Raise `EdgeLLMError` if trees are too large for all kernels."""
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
    """The step before a verification is outside of its graph, since it depends on the levels."""
