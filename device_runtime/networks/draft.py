"""Passes of a draft network with its own KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.graph_roles import DRAFT, EXTEND, FUSE, STEP
from edgellm.core.manifest import Engine
from edgellm.core.model_spec import DecoderSpec, DraftSpec
from edgellm.device_runtime import runners
from edgellm.device_runtime.arrays import (
    F32,
    I64,
    Bool,
)
from edgellm.device_runtime.networks.decoder import DecoderNetwork, RoundStart
from edgellm.device_runtime.networks.decoder_io import PassInputs
from edgellm.device_runtime.networks.known_costs import Measured, known_costs
from edgellm.device_runtime.networks.sequence_kv import KVSwapper, SequenceKV
from edgellm.device_runtime.runners.batch_costs import measure_shared
from edgellm.device_runtime.runners.device_speculation import Growth, Rounds
from edgellm.device_runtime.runners.kv_cache import KVCache
from edgellm.device_runtime.runners.outputs import Outputs
from edgellm.device_runtime.runners.pass_timing import (
    CANDIDATES,
    Budget,
    EstimatedMs,
    measured_rows,
    timed_by_rows,
)
from edgellm.device_runtime.runners.runner import Inputs, Runner

T = TypeVar("T")
# Bytes read between two passes of a draft, to simulate the base: many times the draft's head,
# but no more than CPU caches hold.
_BASE_HEADS, _CACHES_BYTES = 64, 64 << 20


class DraftResult(NamedTuple):
    """Outputs of one draft pass; arrays are valid until the network runs again."""

    token_ids: I64  # [R, K], of the base's vocabulary, best first
    log_probs: F32  # [R, K]
    hidden: F32  # [R, D], the `hidden` input of the children; of blocks D = 0
    links: F32 | None = None  # [R, L, L], see CANDIDATE_LINKS; only of blocks

    def copy(self) -> DraftResult:
        """A copy that stays valid."""
        links = None if self.links is None else self.links.copy()
        return DraftResult(self.token_ids.copy(), self.log_probs.copy(), self.hidden.copy(), links)


class RequestedResult:
    """The result of an asynchronous pass, fetched on access.

    Args:
        row: index of its candidates on the device; None: they have been copied to the host.
    """

    def __init__(self, outputs: Outputs, row: int | None) -> None:
        self._outputs, self.row = outputs, row
        self._kept: DraftResult | None = None

    def __call__(self) -> DraftResult:
        """Wait for the result, and return it; valid as `DraftResult` says."""
        return self._kept or _result(self._outputs)

    def keep(self) -> None:
        """Fetch a result that is still needed, before the network runs again."""
        self._kept, self.row = self().copy(), None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPart:
    """Input of one sequence's draft in a pass; see `DraftNetwork.run`."""

    kv: SequenceKV
    token_ids: I64
    write_index: int
    output_rows: I64
    top_k: int
    taps: F32 | None = None  # [S, T*H], to be fused
    hidden: F32 | None = None  # [S, D], without taps
    position_ids: I64 | None = None
    tree_mask: Bool | None = None
    num_masks: int = 0  # mask tokens at the end, whose KV is not kept

    def with_masks(self, token_id: int, count: int) -> DraftPart:
        """The same with `count` mask tokens at the end, all with outputs."""
        assert self.taps is not None
        rows = len(self.token_ids)
        zeros = np.zeros((count, self.taps.shape[1]), self.taps.dtype)
        return replace(
            self,
            token_ids=np.append(self.token_ids, np.full(count, token_id)),
            taps=np.concatenate([self.taps, zeros]),
            output_rows=np.arange(rows - 1, rows + count),
            num_masks=count,
        )


class DraftNetwork:
    """A loaded draft."""

    def __init__(
        self,
        *,
        runner: Runner,
        fuse: Runner | None,
        spec: DecoderSpec,
        capacity: int,
        num_trailing: int = 0,
    ) -> None:
        """Without `fuse` the auxiliary hidden states are used as they are.

        Args:
            runner: of the draft's graph.
            fuse: of its `fuse` graph.
            spec: of its layers.
            capacity: positions of the cache.
            num_trailing: see `DraftSpec`.
        """
        self.capacity = capacity
        self._runner, self._fuse, self._swapper = runner, fuse, KVSwapper(runner)
        self.max_pass_tokens = self._swapper.pool.max_pass_tokens  # see `KVPool`
        # Maximum tokens of the text in a pass; 0: unlimited
        self.max_text_tokens = self.max_pass_tokens and self.max_pass_tokens - num_trailing
        self._inputs = PassInputs(runner, spec, capacity)
        self.kv = self.new_kv()  # of passes that are given no other
        self._asked: WeakSet[RequestedResult] = WeakSet()  # of the latest pass, still wanted

    @property
    def max_batch_size(self) -> int:
        """Maximum sequences of a pass."""
        return self._runner.max_batch_size

    @property
    def batch_limits(self) -> tuple[int, int]:
        """See `Runner`."""
        return self._runner.batch_limits

    def costs_of(self, engine: Engine, max_rows: int) -> Measured:
        """See `DecoderNetwork.costs_of`; `max_rows` as for `costs`."""
        measure = partial(costs, self, engine.draft, max_rows)
        return known_costs(self._runner, _shared_kind(engine.draft), engine.cost_ms, measure)

    def new_kv(self) -> SequenceKV:
        """See `DecoderNetwork.new_kv`."""
        return SequenceKV(self._swapper)

    def on_shortage(self, evict: Callable[[], bool]) -> None:
        """See `prefix_cache.CachedNetwork`."""
        self._swapper.evict = evict

    def fuse(self, taps: F32) -> F32:
        """Auxiliary hidden states of the base [S, T*H] as the draft's hidden states [S, D]."""
        if self._fuse is None:
            return taps
        return self._fuse.run({graph_io.HIDDEN_TAPS: taps[None]})[graph_io.DRAFT_HIDDEN][0]

    def run(
        self,
        token_ids: I64,
        hidden: F32,
        write_index: int,
        output_rows: I64,
        *,
        top_k: int,
        kv: SequenceKV | None = None,
        position_ids: I64 | None = None,
        tree_mask: Bool | None = None,
    ) -> DraftResult:
        """Compute S new tokens, each with the hidden state of the one before it.

        Args:
            token_ids: int64 [S].
            hidden: float32 [S, D], fused or of an earlier draft pass.
            write_index: where the KV goes; tokens attend to all positions before, but by the mask.
            output_rows: int64 [R], the tokens that get candidates.
            top_k: candidates of a token.
            kv: of the sequence; None: `self.kv`.
            position_ids: int64 [S]; None counts on from `write_index`.
            tree_mask: bool [S, M], M >= S, for the last M positions with the new ones; None is
                causal.

        Raises:
            LimitError: the cache is too small, or the engine returns fewer candidates.
        """
        part = DraftPart(
            kv=kv or self.kv,
            token_ids=token_ids,
            write_index=write_index,
            output_rows=output_rows,
            top_k=top_k,
            hidden=hidden,
            position_ids=position_ids,
            tree_mask=tree_mask,
        )
        return self.run_batch([part])[0]

    def run_batch(self, parts: Sequence[DraftPart]) -> list[DraftResult]:
        """As `run`, for several sequences in one pass; raises as `run`.

        Args:
            parts: at most `max_batch_size`.
        """
        return [_result(outputs) for outputs in self._pass(parts, self._runner.run_batch)]

    def run_async(self, parts: Sequence[DraftPart]) -> list[RequestedResult]:
        """As `run_batch` with one output each, without waiting for the device."""
        given = [RequestedResult(*each) for each in self._pass(parts, self._runner.run_async)]
        self._asked.update(given)
        return given

    def _pass(
        self,
        parts: Sequence[DraftPart],
        compute: Callable[[list[tuple[KVCache, Inputs]]], list[T]],
    ) -> list[T]:
        for one in self._asked:
            one.keep()
        self._asked.clear()
        fused = self._fused(parts)
        shifts = self._inputs.hold([(part.kv, part.token_ids) for part in parts])
        inputs: list[Inputs] = [
            self._inputs_of(part, hidden, shift)
            for part, hidden, shift in zip(parts, fused, shifts, strict=True)
        ]
        lengths = [part.kv.length for part in parts]
        caches = self._swapper.allocate([_allocated(part) for part in parts])
        found = compute(list(zip(caches, inputs, strict=True)))
        for part, length in zip(parts, lengths, strict=True):
            # The KV of tree nodes is not kept.
            end = part.write_index + len(part.token_ids) - part.num_masks
            is_tree = part.tree_mask is not None
            part.kv.length = min(length, part.write_index) if is_tree else end
        return found

    def _inputs_of(self, part: DraftPart, hidden: F32, image_shift: int) -> dict[str, NDArray[Any]]:
        inputs = self._inputs.of(
            part.kv, part.token_ids, part.write_index, part.output_rows,
            part.position_ids, part.tree_mask, image_shift=image_shift,
        )  # fmt: skip
        inputs[graph_io.DRAFT_HIDDEN], inputs[graph_io.TOP_K] = hidden[None], np.array([part.top_k])
        return inputs

    def _fused(self, parts: Sequence[DraftPart]) -> list[F32]:
        """Hidden states of each, fused in one pass."""
        taps = [part.taps for part in parts if part.taps is not None]
        if not taps:
            return [part.hidden for part in parts if part.hidden is not None]
        fused, at = self.fuse(taps[0] if len(taps) == 1 else np.concatenate(taps)), 0
        found: list[F32] = []
        for part in parts:
            if part.taps is None:
                assert part.hidden is not None
                found.append(part.hidden)
            else:
                found.append(fused[at : at + len(part.taps)])
                at += len(part.taps)
        return found

    def open_rounds(self, base: DecoderNetwork, growth: Growth) -> Rounds | None:
        """Rounds of a base and this draft on the device; None: they need the host."""
        return base.open_rounds(self._runner, growth) if self._runner.runs_async else None

    def begin_rounds(self, parts: Sequence[tuple[SequenceKV, int, int]]) -> list[RoundStart]:
        """See `DecoderNetwork.begin_rounds`; the KV of these tokens is not kept."""
        starts = [self._inputs.start(*part) for part in parts]
        return list(map(RoundStart, starts, self._swapper.allocate(parts)))


def _allocated(part: DraftPart) -> tuple[SequenceKV, int, int]:
    """Positions that later passes continue from, and those to allocate after them.

    Tree nodes follow earlier levels, but the next round begins at the committed positions. Windows
    before these must stay allocated.
    """
    end = part.write_index + len(part.token_ids)
    is_tree = part.tree_mask is not None
    kept = min(part.kv.length, part.write_index) if is_tree else part.write_index
    return part.kv, kept, end - kept


def _result(found: Outputs) -> DraftResult:
    ids, log_probs = found[graph_io.CANDIDATE_IDS], found[graph_io.CANDIDATE_LOG_PROBS]
    return DraftResult(ids[0], log_probs[0], found[graph_io.RECYCLED_HIDDEN][0])


def open_draft(folder: Path, engine: Engine) -> DraftNetwork:
    """Load a draft's engine; raises as `runners.Backend.open_engine`."""
    opened = runners.find(engine.backend).open_engine(folder, engine)
    return network(opened, engine.draft, engine.max_kv_cache_capacity)


def network(opened: Mapping[str, Runner], spec: DraftSpec, capacity: int) -> DraftNetwork:
    """See `networks.Module`."""
    return DraftNetwork(
        runner=opened[DRAFT],
        fuse=opened.get(FUSE),
        spec=spec.decoder,
        capacity=capacity,
        num_trailing=spec.num_trailing,
    )


def _shared_kind(spec: DraftSpec) -> str:
    """Token counts for costs of batches: the most frequent ones."""
    return STEP if spec.num_heads <= 1 else EXTEND


def costs(
    network: DraftNetwork, spec: DraftSpec, max_rows: int = 0, budget: Budget | None = None
) -> dict[str, dict[str, float]]:
    """See `networks.Module`: passes that expand trees, and passes over fused hidden states.

    A draft with mask tokens does not expand trees; the masks follow the fused tokens. Fused passes
    run after a pass of the base, which evicts the draft from the CPU's caches, and expansion
    follows. With the draft in the caches both take half the time.
    """
    masks = max(spec.num_heads - 1, 0)
    context, measured = measured_rows(network.capacity - masks, max_rows)
    top_k = min(CANDIDATES, spec.max_candidates, max_rows or CANDIDATES)
    random, maximum = np.random.default_rng(1), max(measured)
    taps = random.standard_normal((maximum + masks, spec.taps_width), np.float32)
    hidden = np.zeros((maximum, spec.decoder.hidden_size), np.float32)
    size = min(_BASE_HEADS * spec.draft_vocab_size * spec.decoder.hidden_size, _CACHES_BYTES)
    others = np.ones(size // 4, np.float32)  # zeros would share one page

    def run(hidden: F32, outputs: I64) -> None:
        token_ids = np.arange(len(hidden)) % spec.decoder.vocab_size
        network.run(token_ids, hidden, context, outputs, top_k=top_k)

    def grow(rows: int) -> None:
        run(hidden[:rows], np.arange(rows))

    def extend(rows: int) -> None:
        run(network.fuse(taps[: rows + masks]), np.arange(rows - 1, rows + masks))

    def follow_an_extension() -> None:
        others.sum()
        extend(1)

    budget = budget or Budget()
    found = {EXTEND: timed_by_rows(extend, measured, budget.part(0.4), others.sum)}
    if not masks:
        part = budget.part(0.7)
        if 3 * found[EXTEND]["1"] <= 1e3 * part.left_s:
            grown = timed_by_rows(grow, measured, part, follow_an_extension)
        else:  # a step takes no longer than an extension
            grown = {rows: EstimatedMs(ms) for rows, ms in found[EXTEND].items()}
        found = {STEP: grown, **found}
    network.kv.free()
    if not any(network.batch_limits) or not budget.left_s:
        return found
    return found | _costs_together(network, spec, context, hidden, top_k, budget)


def _costs_together(
    network: DraftNetwork, spec: DraftSpec, begin: int, hidden: F32, top_k: int, budget: Budget
) -> dict[str, dict[str, float]]:
    """Costs of batches, after `begin` positions of each sequence."""
    sequences = [network.new_kv() for _ in range(network.max_batch_size)]

    def run(count: int, rows: int) -> None:
        ids, wanted = np.arange(rows) % spec.decoder.vocab_size, np.arange(rows)
        asked = [
            DraftPart(
                kv=one,
                token_ids=ids,
                write_index=begin,
                output_rows=wanted,
                top_k=top_k,
                hidden=hidden[:rows],
            )
            for one in sequences[:count]
        ]
        network.run_batch(asked)

    room = min(network.batch_limits[0], len(hidden)), network.batch_limits[1]
    found = measure_shared(_shared_kind(spec), network.max_batch_size, room, run, budget)
    for one in sequences:
        one.free()
    return found
