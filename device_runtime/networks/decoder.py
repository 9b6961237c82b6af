"""Forward passes of a language model over the KV caches of its sequences."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.errors import EdgeLLMError
from edgellm.core.graph_roles import COMMIT, DECODER, PASS
from edgellm.core.manifest import Engine
from edgellm.core.model_spec import DecoderSpec
from edgellm.device_runtime import runners
from edgellm.device_runtime.arrays import F32, I64, Bool
from edgellm.device_runtime.networks.decoder_io import PassInputs
from edgellm.device_runtime.networks.known_costs import Measured, known_costs
from edgellm.device_runtime.networks.recurrent_state import States
from edgellm.device_runtime.networks.recurrent_state_pool import HostStates
from edgellm.device_runtime.networks.sequence_kv import KVSwapper, SequenceKV
from edgellm.device_runtime.runners.batch_costs import measure_shared
from edgellm.device_runtime.runners.device_speculation import Growth, Rounds
from edgellm.device_runtime.runners.kv_cache import KVCache
from edgellm.device_runtime.runners.outputs import Outputs
from edgellm.device_runtime.runners.pass_timing import Budget, measured_rows, timed_by_rows
from edgellm.device_runtime.runners.runner import Runner


class PassResult:
    """Outputs of one pass; a device's are fetched on access, before the next pass."""

    __slots__ = ("_outputs", "_rows", "_token_ids")

    def __init__(self, outputs: Outputs, rows: int) -> None:
        self._outputs, self._rows = outputs, rows
        self._token_ids: I64 | None = None  # until it is asked for

    @property
    def token_ids(self) -> I64:
        """[R], the argmax at each position with logits."""
        found = self._token_ids
        if found is None:
            if graph_io.TOKEN_IDS in self._outputs:
                found = self._outputs[graph_io.TOKEN_IDS][0]
            else:  # numpy finds the argmax in a fifth of an operator's time
                found = self.logits.argmax(axis=-1)
            self._token_ids = found
        return found

    def highest_of(self, row: int) -> float:
        """The logit of a position's argmax, which is in `token_ids`."""
        if graph_io.TOP_LOGITS in self._outputs:
            return float(self._outputs[graph_io.TOP_LOGITS][0, row])
        return float(self.logits[row, self.token_ids[row]])

    @property
    def logits(self) -> F32:
        """[R, V]."""
        return self._outputs[graph_io.LOGITS][0]

    @property
    def taps(self) -> F32:
        """[S, T*H], auxiliary hidden states for a draft; [S, 0] if the engine has none."""
        if graph_io.HIDDEN_TAPS not in self._outputs:
            return np.zeros((self._rows, 0), np.float32)
        return self._outputs[graph_io.HIDDEN_TAPS][0]

    @property
    def alignment_queries(self) -> F32:
        """[S, N*D], of a speech model; see `graph_io.ALIGNMENT_QUERIES`."""
        return self._outputs[graph_io.ALIGNMENT_QUERIES][0]


class SequencePart(NamedTuple):
    """Input of one sequence; see `DecoderNetwork.run`."""

    kv: SequenceKV
    token_ids: I64
    write_index: int
    logits_index: I64
    position_ids: I64 | None = None
    tree_mask: Bool | None = None

    @property
    def end(self) -> int:
        """Number of positions after the pass."""
        return self.write_index + len(self.token_ids)


class RoundStart(NamedTuple):
    """Where the device writes a tree."""

    start: tuple[int, int]  # number of positions before, and the first position id
    cache: KVCache


class DecoderNetwork:
    """A loaded decoder with KV caches of `capacity` positions for each sequence."""

    def __init__(
        self, *, runner: Runner, spec: DecoderSpec, capacity: int, commit: Runner | None = None
    ) -> None:
        """`commit` is the graph that commits states of recurrent layers, unless the runner does."""
        self.capacity, self._states = capacity, None
        self._runner, self._swapper = runner, KVSwapper(runner)
        self.max_batch_size = runner.max_batch_size
        if spec.recurrent is not None:
            store = runner.states or HostStates(commit, spec.recurrent, self.max_batch_size)
            self._states = States(store, self.max_batch_size)
        self._inputs = PassInputs(runner, spec, capacity)
        self.kv = self.new_kv()  # of passes that are given no other
        self._costs: Measured = {}

    def new_kv(self) -> SequenceKV:
        """The KV cache of a new, empty sequence."""
        return SequenceKV(self._swapper, self._states)

    @property
    def num_free(self) -> int:
        """Positions that are free for further sequences."""
        return self._swapper.pool.num_free

    def num_free_without(self, sequences: Iterable[SequenceKV]) -> int:
        """Free positions if these sequences were freed."""
        return self._swapper.num_free_without(sequences)

    @property
    def block_size(self) -> int:
        """Positions of a KV block."""
        return self._swapper.pool.block_size

    @property
    def max_pass_tokens(self) -> int:
        """See `KVPool`."""
        return self._swapper.pool.max_pass_tokens

    def on_shortage(self, evict: Callable[[], bool]) -> None:
        """See `prefix_cache.CachedNetwork`."""
        self._swapper.evict = evict

    @property
    def state_bytes(self) -> int:
        """Size of the recurrent states of a sequence."""
        return 0 if self._states is None else self._states.num_bytes

    def run(
        self,
        token_ids: I64,
        write_index: int,
        logits_index: I64,
        *,
        kv: SequenceKV | None = None,
        position_ids: I64 | None = None,
        tree_mask: Bool | None = None,
    ) -> PassResult:
        """Compute S new tokens, and write their keys and values at `write_index`.

        Args:
            token_ids: int64 [S].
            write_index: number of valid positions in the cache; the new ones follow.
            logits_index: int64 [R], the new tokens that get logits.
            kv: of the sequence; None: `self.kv`.
            position_ids: int64 [S], counted as in text also if images have other positions; None
                counts on from `write_index`.
            tree_mask: bool [S, S], token i attends to token j; None is causal. Keys of a tree are
                appended when `SequenceKV.compact` has chosen a path.

        Raises:
            LimitError: the cache is too small, or the tokens are more than `max_pass_tokens`.
        """
        part = SequencePart(
            kv or self.kv, token_ids, write_index, logits_index, position_ids, tree_mask
        )
        return self.run_batch([part])[0]

    def run_batch(self, parts: Sequence[SequencePart]) -> list[PassResult]:
        """As `run`, for several sequences in one pass.

        Args:
            parts: at most `max_batch_size`, or `num_packable` whole new sequences.

        Raises:
            LimitError: a cache is too small; nothing is computed.
        """
        shifts = self._inputs.hold([(part.kv, part.token_ids) for part in parts])
        inputs = [
            self._inputs.of(*part, image_shift=shift)
            for part, shift in zip(parts, shifts, strict=True)
        ]
        if self._states is not None:
            lengths = [(part.kv.state_memory(), part.write_index) for part in parts]
            self._states.give(lengths, inputs)
        for part in parts:
            del part.kv.keys[part.write_index :]
        caches = self._swapper.allocate(
            [(part.kv, part.write_index, len(part.token_ids)) for part in parts]
        )
        found = self._runner.run_batch(list(zip(caches, inputs, strict=True)))
        results: list[PassResult] = []
        for part, outputs in zip(parts, found, strict=True):
            if self._states is not None:
                accepted = len(part.token_ids) if part.tree_mask is None else 0
                self._states.ran(part.kv.state_memory(), outputs, accepted)
            is_tree = part.position_ids is not None or part.tree_mask is not None
            part.kv.record(part.token_ids, part.write_index, is_tree=is_tree)
            results.append(PassResult(outputs, len(part.token_ids)))
        return results

    def num_packable(self, lengths: Sequence[int]) -> int:
        """See `Runner`; recurrent layers have states for `max_batch_size` sequences."""
        found = self._runner.num_packable(lengths)
        return found if self._states is None else min(found, self.max_batch_size)

    def begin_rounds(self, parts: Sequence[tuple[SequenceKV, int, int]]) -> list[RoundStart]:
        """Prepare trees that the device runs.

        Args:
            parts: KV caches, their positions before the tree, and nodes of the tree.

        Raises:
            LimitError: as `run`.
        """
        starts = [self._inputs.start(*part) for part in parts]
        for kv, length, _ in parts:
            del kv.keys[length:]
        return list(map(RoundStart, starts, self._swapper.allocate(parts)))

    def end_round(self, kv: SequenceKV, token_ids: I64, outputs: Outputs) -> PassResult:
        """Record a device's tree of these tokens; as `run` with a mask, before `compact`."""
        kv.record(token_ids, kv.length, is_tree=True)
        return PassResult(outputs, len(token_ids))

    def open_rounds(self, draft: Runner, growth: Growth) -> Rounds | None:
        """See `Runner.open_rounds`."""
        return self._runner.open_rounds(draft, growth)

    def costs_of(self, engine: Engine) -> Measured:
        """Milliseconds of passes of its engine, as measured by the build or now."""
        if not self._costs:
            wanted = max(engine.max_verify_tree_size, self.max_batch_size)
            longest = min(engine.max_input_len, engine.main_graphs[-1].max_rows or sys.maxsize)
            measure = partial(costs, self, engine.decoder, longest, max_requested=wanted)
            self._costs = known_costs(self._runner, PASS, engine.cost_ms, measure)
        return self._costs

    @property
    def batch_limits(self) -> tuple[int, int]:
        """See `Runner`."""
        return self._runner.batch_limits

    @property
    def num_windows(self) -> int:
        """See `Runner`."""
        return self._runner.num_windows

    def listen(self, cross: Mapping[str, NDArray[np.float32]], place: int) -> None:
        """See `Runner.hold_window`."""
        self._inputs.listen(cross, place)

    def hold_adapters(self, weights: F32, table: I64) -> None:
        """See `Runner.hold_adapters`."""
        self._runner.hold_adapters(weights, table)
        self._inputs.takes_adapters = True


def open_decoder(folder: Path, engine: Engine) -> DecoderNetwork:
    """Load an engine of a language model.

    Raises:
        EdgeLLMError: it has a speech model, or as `runners.Backend.open_engine`.
    """
    if engine.decoder.audio is not None:
        raise EdgeLLMError(
            f"{folder} has a speech model ({engine.decoder.model_type}), not a language model",
            hint=f"edgellm transcribe FILE {folder} writes down what an audio file says",
        )
    opened = runners.find(engine.backend).open_engine(folder, engine)
    return network(opened, engine.decoder, engine.max_kv_cache_capacity)


def network(opened: Mapping[str, Runner], spec: DecoderSpec, capacity: int) -> DecoderNetwork:
    """See `networks.Module`."""
    return DecoderNetwork(
        runner=opened[DECODER], spec=spec, capacity=capacity, commit=opened.get(COMMIT)
    )


def costs(
    network: DecoderNetwork,
    spec: DecoderSpec,
    max_rows: int = 0,
    budget: Budget | None = None,
    *,
    max_requested: int = 0,
) -> dict[str, dict[str, float]]:
    """See `networks.Module`: for one sequence, and for batches if the runner needs them.

    All tokens get logits, or the last if there are more than `max_requested`.
    """
    context, measured = measured_rows(network.capacity, max_rows)
    budget, is_shared = budget or Budget(), any(network.batch_limits)

    def run(rows: int) -> None:
        first = rows - 1 if 0 < max_requested < rows else 0
        network.run(np.arange(rows) % spec.vocab_size, context, np.arange(first, rows))

    found = {PASS: timed_by_rows(run, measured, budget.part(0.5 if is_shared else 1))}
    network.kv.free()
    if not is_shared or not budget.left_s:
        return found
    return found | _costs_together(network, spec, context, max(measured), budget)


def _costs_together(
    network: DecoderNetwork, spec: DecoderSpec, begin: int, max_rows: int, budget: Budget
) -> dict[str, dict[str, float]]:
    """Costs of tokens and trees of batches, after `begin` positions of each sequence."""
    sequences = [network.new_kv() for _ in range(network.max_batch_size)]

    def run(count: int, rows: int) -> None:
        ids, mask = np.arange(rows), np.tri(rows, dtype=np.bool_) if rows > 1 else None
        asked = ids % spec.vocab_size, begin, ids, begin + ids, mask
        network.run_batch([SequencePart(one, *asked) for one in sequences[:count]])

    room = min(max_rows, network.batch_limits[0]), network.batch_limits[1]
    found = measure_shared(PASS, network.max_batch_size, room, run, budget)
    for one in sequences:
        one.free()
    return found
