"""Passes of a language model, with the keys of its cached positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core.graph_roles import COMMIT, DECODER, PASS
from edgellm.core.manifest import Engine
from edgellm.core.model_spec import DecoderSpec
from edgellm.device_runtime import runners
from edgellm.device_runtime.arrays import (
    F32,
    I64,
    Bool,
    ImageRows,
    RowKey,
)
from edgellm.device_runtime.kv_cache.prefix_cache import count_common, marked, row_keys
from edgellm.device_runtime.networks.decoder_io import PassInputs
from edgellm.device_runtime.networks.decoder_parts import PassResult, SequencePart
from edgellm.device_runtime.networks.known_costs import Measured, known_costs
from edgellm.device_runtime.networks.recurrent_state import CHECKPOINT_ROWS, States
from edgellm.device_runtime.networks.recurrent_state_pool import StateMemory
from edgellm.device_runtime.networks.sequence_kv import Begun, Context, Contexts
from edgellm.device_runtime.runners import ArrangesPasses, Outputs, Runner, TakesAdapters
from edgellm.device_runtime.runners.batch_costs import measure_shared
from edgellm.device_runtime.runners.device_speculation import GrowsTrees, Growth, Rounds
from edgellm.device_runtime.runners.pass_timing import Budget, measured_rows, timed_by_rows


class DecoderNetwork:
    """A loaded decoder with a KV cache of `capacity` positions for each sequence.

    Keys are truncated before their positions are overwritten, and appended after positions are
    written. So they are valid after an error at any point, whatever code runs the passes.
    """

    def __init__(
        self, runner: Runner, spec: DecoderSpec, capacity: int, commit: Runner | None = None
    ) -> None:
        """`commit` is the graph that commits states of recurrent layers, if there are any."""
        self.capacity, self._states = capacity, None
        self._runner, self._contexts = runner, Contexts(runner)
        self.max_batch_size = self._contexts.max_together  # sequences of one pass
        if spec.recurrent is not None:
            assert commit is not None
            self._states = States(commit, spec.recurrent, self.max_batch_size)
        self._inputs = PassInputs(runner, spec, capacity)
        self.context = Context()  # current for all methods but `run_many`
        self.context.is_spare = True
        self._costs: Measured = {}

    @property
    def free_rows(self) -> int | None:
        """Positions that are free for further sequences; None if all share one cache."""
        return self._contexts.free_rows

    @property
    def page_rows(self) -> int:
        """Positions of a KV block."""
        return self._contexts.page_rows

    def free_rows_without(self, contexts: Iterable[Context]) -> int:
        """Free positions if these contexts were freed."""
        return self._contexts.free_rows_without(contexts)

    def on_shortage(self, forget_one: Callable[[], bool]) -> None:
        """See `prefix_cache.SequenceCache`."""
        self._contexts.forget_one = forget_one

    @property
    def pass_rows(self) -> int:
        """Maximum tokens of a sequence in a pass, if windows limit its cache; 0: no limit."""
        return self._contexts.pass_rows

    @property
    def state_bytes(self) -> int:
        """Size of the recurrent states of a sequence."""
        return 0 if self._states is None else self._states.num_bytes

    def use(self, context: Context) -> None:
        """Switch to another sequence."""
        self._contexts.admit(context)
        self.context = context

    def cut(self, length: int) -> None:
        """Truncate the cache to the first `length` positions."""
        if self._states is not None and self.context.memory is not None:
            self._states.cut(self.context.memory, length)
        self.context.cut(length)

    def new_context(self) -> Context:
        """The context of a new, empty sequence."""
        return Context()

    def fork(self, context: Context) -> Context:
        """Copy a context, sharing its positions."""
        new = self._contexts.fork(context)
        if self._states is not None and context.memory is not None:
            new.memory = self._states.fork(context.memory)
        return new

    def save(self, context: Context) -> None:
        """Swap out a context, to free its memory."""
        self._contexts.save(context)

    def close(self, context: Context) -> None:
        """Free a context; it is not extended any more."""
        if self._states is not None:
            self._states.release(context.memory)
        self._contexts.close(context)

    def run(
        self,
        token_ids: I64,
        write_index: int,
        logits_index: I64,
        *,
        position_ids: I64 | None = None,
        tree_mask: Bool | None = None,
    ) -> PassResult:
        """Compute S new tokens, and write their keys and values at `write_index`.

        Args:
            token_ids: int64 [S].
            write_index: number of valid positions in the cache; the new ones follow.
            logits_index: int64 [R], the new tokens that get logits.
            position_ids: int64 [S], counted as in text also if images have other positions; None
                counts on from `write_index`.
            tree_mask: bool [S, S], token i attends to token j; None is causal. Keys of a tree are
                appended when `compact` has chosen a path.

        Raises:
            LimitError: the cache is too small, or the tokens are more than `pass_rows`.
        """
        part = SequencePart(
            self.context, token_ids, write_index, logits_index, position_ids, tree_mask
        )
        return self.run_many([part])[0]

    def run_many(self, parts: Sequence[SequencePart]) -> list[PassResult]:
        """As `run`, for several sequences with their own contexts, in one pass if possible.

        Args:
            parts: one pass takes up to `max_batch_size`.

        Raises:
            LimitError: a cache is too small; nothing is computed.
        """
        shifts = self._inputs.hold([(part.context, part.token_ids) for part in parts])
        asked: list[tuple[Context, dict[str, NDArray[Any]]]] = []
        places: list[tuple[Context, int, int]] = []
        for part, shift in zip(parts, shifts, strict=True):
            asked.append((part.context, self._inputs.of(*part, image_shift=shift)))
            places.append((part.context, part.write_index, len(part.token_ids)))
        if self._states is not None:
            rows = [(self._memory(part.context), part.write_index) for part in parts]
            self._states.give(rows, [inputs for _, inputs in asked])
        for context, begin, _ in places:
            del context.keys[begin:]
        self._contexts.reserve(places)
        found = self._contexts.run(asked)
        results: list[PassResult] = []
        for part, outputs in zip(parts, found, strict=True):
            if self._states is not None:
                accepted = len(part.token_ids) if part.tree_mask is None else 0
                self._states.ran(self._memory(part.context), outputs, accepted)
            results.append(_record(part, outputs))
        return results

    def begin_rounds(self, parts: Sequence[tuple[Context, int, int]]) -> list[Begun]:
        """Prepare trees that the device runs.

        Args:
            parts: contexts, their positions before the tree, and nodes of the tree.

        Raises:
            LimitError: as `run`.
        """
        starts = [self._inputs.start(*part) for part in parts]
        for context, length, _ in parts:
            del context.keys[length:]
        self._contexts.reserve(parts)
        caches = [self._contexts.admit(context) for context, _, _ in parts]
        return list(map(Begun, starts, caches))

    def end_round(self, context: Context, token_ids: I64, outputs: Outputs) -> PassResult:
        """Record a device's tree of these tokens; as `run` with a mask, before `compact`."""
        context.written = _keys(context, token_ids, context.num_rows)
        context.num_rows += len(token_ids)
        return PassResult(outputs, len(token_ids))

    def open_rounds(self, draft: Runner, growth: Growth) -> Rounds | None:
        """See `runners.device_speculation.GrowsTrees`; most backends need the host."""
        runner = self._runner
        return runner.open_rounds(draft, growth) if isinstance(runner, GrowsTrees) else None

    def set_images(self, images: ImageRows) -> None:
        """Set the images of the next prompt, until the next call."""
        self.context.images = images

    def costs_of(self, engine: Engine) -> Measured:
        """Milliseconds of passes of its engine, as measured by the build or now."""
        if not self._costs:
            wanted = max(engine.max_verify_tree_size, self.max_batch_size)
            measure = partial(
                costs, self, engine.decoder, engine.max_input_len, max_requested=wanted
            )
            self._costs = known_costs(self._runner, PASS, engine.cost_ms, measure)
        return self._costs

    @property
    def shared_rows(self) -> tuple[int, int]:
        """See `runners.ArrangesPasses`; zeros if the runner needs no costs."""
        return self._runner.shared_rows if isinstance(self._runner, ArrangesPasses) else (0, 0)

    def hold_adapters(self, weights: F32, table: I64) -> None:
        """Set the adapters of further passes, see `runners.TakesAdapters`; only with LoRA."""
        assert isinstance(self._runner, TakesAdapters)
        self._runner.hold_adapters(weights, table)
        self._inputs.takes_adapters = True

    def compact(self, length: int, rows: I64) -> None:
        """Compact the cache: the positions `length + rows` become `length`, `length + 1`, ...

        Args:
            length: number of positions before, which stay.
            rows: int64, ascending; the accepted tokens of the last pass.
        """
        context = self.context
        if self._states is not None:
            self._states.accept(self._memory(context), rows)
        del context.keys[length:]
        self._contexts.admit(context).compact(length, rows)
        context.num_rows = length + len(rows)
        _append(context, length, [context.written[row] for row in rows.tolist()])

    def read_rows(self, length: int) -> NDArray[Any]:
        """See `runners.Cache`."""
        return self._contexts.admit(self.context).read_rows(length)

    def write_rows(
        self, rows: NDArray[Any], keys: Sequence[RowKey] = (), least_rows: int = 0
    ) -> None:
        """See `prefix_cache.SequenceCache`."""
        self.context.keys = []
        self._contexts.write_rows(self.context, rows, least_rows)
        self.context.keys = list(keys[: rows.shape[-2]])
        if self._states is not None:
            self._states.release(self.context.memory)
            self.context.memory = self._states.new()

    def read_states(self, length: int) -> tuple[NDArray[Any], ...]:
        """See `prefix_cache.StatefulCache`."""
        memory = self.context.memory
        if self._states is None or memory is None:
            return ()
        return self._states.read(memory, length)

    def write_states(self, states: tuple[NDArray[Any], ...], length: int) -> None:
        """See `prefix_cache.StatefulCache`."""
        if self._states is not None:
            self._states.write(self._memory(self.context), states, length)

    @property
    def num_rows(self) -> int:
        """Positions with keys."""
        return len(self.context.keys)

    def held(self, keys: Sequence[RowKey]) -> int:
        """See `prefix_cache.SequenceCache`."""
        return self._reach(self.context, count_common(self.context.keys, keys))

    def held_by(self, context: Context, keys: Sequence[RowKey]) -> int:
        """See `prefix_cache.SequenceCache`."""
        return self._reach(context, count_common(context.keys, keys))

    def _reach(self, context: Context, length: int) -> int:
        """The longest prefix, up to `length`, from which a pass can continue.

        Recurrent states cannot be truncated; windows do not attend to freed positions.
        """
        memory = context.memory
        length = length if memory is None else memory.reach(length)
        return length if length >= context.least_rows else 0

    def begin_text(self, prompt_rows: int, held: int, marks: Iterable[int] = ()) -> int:
        """Prepare prefill; return the number of positions from which it can continue.

        Args:
            prompt_rows: tokens of the prompt; the last is always computed.
            held: cached positions of the prompt, perhaps without states.
            marks: prefix lengths that get checkpoints for later prompts, besides the default ones.
        """
        if self._states is not None:
            every = range(CHECKPOINT_ROWS, prompt_rows, CHECKPOINT_ROWS)
            self._memory(self.context).marks = {*marks, *every, prompt_rows - 1}
        return self._reach(self.context, held)

    def end_text(self, length: int) -> None:
        """End a text after `length` positions; rejected tokens of a tree may follow them.

        Must precede the next pass, since recurrent states cannot be truncated after it.
        """
        if self._states is not None and length < self.context.num_rows:
            self.cut(length)

    def _memory(self, context: Context) -> StateMemory:
        assert self._states is not None
        if context.memory is None:
            context.memory = self._states.new()
        return context.memory

    @property
    def least_rows(self) -> int:
        """See `prefix_cache.SequenceCache`."""
        return self.context.least_rows


def _record(part: SequencePart, outputs: Outputs) -> PassResult:
    """Record what a pass has written, and return its result."""
    context, rows = part.context, len(part.token_ids)
    context.num_rows = part.write_index + rows
    context.written = _keys(context, part.token_ids, part.write_index)
    if part.position_ids is None and part.tree_mask is None:
        _append(context, part.write_index, context.written)
    return PassResult(outputs, rows)


def _append(context: Context, length: int, keys: list[RowKey]) -> None:
    if len(context.keys) == length:  # not after positions without keys
        context.keys += keys


def _keys(context: Context, token_ids: I64, begin: int) -> list[RowKey]:
    """Keys of the positions from `begin` on."""
    ids = token_ids.tolist()
    keys = ids if context.images is None else row_keys(ids, context.images.keys)
    return keys if begin or context.adapter is None else marked(keys, context.adapter)


def open_decoder(folder: Path, engine: Engine) -> DecoderNetwork:
    """Load an engine of a language model; raises as `runners.Backend.open_engine`."""
    opened = runners.find(engine.backend).open_engine(folder, engine)
    return session(opened, engine.decoder, engine.max_kv_cache_capacity)


def session(opened: Mapping[str, Runner], spec: DecoderSpec, capacity: int) -> DecoderNetwork:
    """See `networks.Module`."""
    return DecoderNetwork(opened[DECODER], spec, capacity, opened.get(COMMIT))


def costs(
    session: DecoderNetwork,
    spec: DecoderSpec,
    max_rows: int = 0,
    budget: Budget | None = None,
    *,
    max_requested: int = 0,
) -> dict[str, dict[str, float]]:
    """See `networks.Module`: for one sequence, and for batches if the runner needs them.

    All tokens get logits, or the last if there are more than `max_requested`.
    """
    context, measured = measured_rows(session.capacity, max_rows)
    budget, is_shared = budget or Budget(), any(session.shared_rows)

    def run(rows: int) -> None:
        first = rows - 1 if 0 < max_requested < rows else 0
        session.run(np.arange(rows) % spec.vocab_size, context, np.arange(first, rows))

    found = {PASS: timed_by_rows(run, measured, budget.part(0.5 if is_shared else 1))}
    if not is_shared or not budget.left_s:
        return found
    return found | _costs_together(session, spec, context, max(measured), budget)


def _costs_together(
    session: DecoderNetwork, spec: DecoderSpec, begin: int, max_rows: int, budget: Budget
) -> dict[str, dict[str, float]]:
    """Costs of tokens and trees of batches, after `begin` positions of each sequence."""
    session.close(session.context)
    contexts = [session.new_context() for _ in range(session.max_batch_size)]

    def run(count: int, rows: int) -> None:
        ids, mask = np.arange(rows), np.tri(rows, dtype=np.bool_) if rows > 1 else None
        asked = ids % spec.vocab_size, begin, ids, begin + ids, mask
        session.run_many([SequencePart(one, *asked) for one in contexts[:count]])

    room = min(max_rows, session.shared_rows[0]), session.shared_rows[1]
    found = measure_shared(PASS, session.max_batch_size, room, run, budget)
    for one in contexts:
        session.close(one)
    return found
