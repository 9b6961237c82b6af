"""One step of a batch of sequences: each gets a prefill chunk, a token, or a speculative round.

Invariant between steps: the base's KV cache holds all tokens of a sequence but the newest, which
is the input of its next pass or the root of its next draft tree.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Sized
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.arrays import (
    F32,
    I64,
)
from edgellm.device_runtime.engine.kv_cache_manager import KVCacheManager
from edgellm.device_runtime.engine.profile import (
    ACCEPT,
    DRAFT_EXTEND,
    DRAFT_PREFILL,
    DRAFT_TREE,
    GENERATION,
    PREFILL,
    VERIFY,
)
from edgellm.device_runtime.engine.prompt import Prompt
from edgellm.device_runtime.engine.sequence import Sequence, Step
from edgellm.device_runtime.networks.decoder import DecoderNetwork, PassResult, SequencePart
from edgellm.device_runtime.networks.sequence_kv import SequenceKV
from edgellm.device_runtime.request_faults import Confined, computed
from edgellm.device_runtime.runners.device_speculation import RoundOutcome
from edgellm.device_runtime.sampling.sampler import draw
from edgellm.device_runtime.speculate.acceptance import Accepted, Round, accept_exactly
from edgellm.device_runtime.speculate.device_rounds import DeviceRounds, RoundPart
from edgellm.device_runtime.speculate.drafter import Drafter, Verified
from edgellm.device_runtime.speculate.shared_passes import Passes, run_all
from edgellm.device_runtime.speculate.tree import Tree

T = TypeVar("T")
_FIRST_POSITION = np.zeros(
    1, np.int64
)  # the only position; also if no logits are wanted: kernels need one


class _PassInput(NamedTuple):
    """The input of one sequence to a pass of the base.

    A tuple, since one is made for each token: after a pass, when the processor's caches are cold,
    a frozen dataclass takes three times as long.
    """

    sequence: Sequence
    part: SequencePart | None  # None: the device has already run the round
    stage: str
    continues: bool = False  # extends the stage's last entry
    tree: Tree | None = None  # to verify
    verified: Verified | None = None  # by the device


class _RoundResult(NamedTuple):
    """A round that the device ran."""

    outcome: RoundOutcome
    result: PassResult
    ask_ms: float
    wait_ms: float


_PlannedRound = tuple[Sequence, DeviceRounds, RoundPart]
_RoundInput = tuple[Sequence, RoundPart]


def step(kv_cache_manager: KVCacheManager, sequences: Iterable[Sequence]) -> list[tuple[Step, ...]]:
    """Advance every unfinished sequence by one pass or round.

    Sequences share passes, up to the engine's maximum batch size.

    Returns:
        New steps of each sequence: none during prefill; at the end also text that was held back. A
        sequence is over, with its `failure`, if its own work raised an error, or if the engine
        computed a value for it that is not finite.
    """
    active, maximum = list(sequences), kv_cache_manager.base.max_batch_size
    found: dict[Sequence, tuple[Step, ...]] = dict.fromkeys(active, ())
    for at in range(0, len(active), maximum):
        inputs, drafting = _prepare_all(kv_cache_manager, active[at : at + maximum])
        ready = _catch_up_drafts(kv_cache_manager, drafting)
        if planned := _plan_device_rounds(kv_cache_manager.base, ready):
            found |= _run_rounds(kv_cache_manager, planned)
            on_device = {one for one, _, _ in planned}
            ready = [one for one in ready if one not in on_device]
        found |= _execute(kv_cache_manager, inputs + _draft(kv_cache_manager.base, ready))
    return list(found.values())


def _prepare_all(
    kv_cache_manager: KVCacheManager, sequences: list[Sequence]
) -> tuple[list[_PassInput], list[Sequence]]:
    """Inputs of sequences, and the sequences that draft; an error ends its sequence only."""
    found: list[_PassInput] = []
    drafting: list[Sequence] = []
    for at, sequence in enumerate(sequences):
        if sequence.is_over:
            continue
        with Confined(sequence.fail):
            if at and kv_cache_manager.should_wait(sequence, sequences[:at]):
                continue
            entry = _prepare(kv_cache_manager, sequence)
            if entry is None:
                drafting.append(sequence)
            else:
                found.append(entry)
    return found, drafting


def _execute(
    kv_cache_manager: KVCacheManager, inputs: list[_PassInput]
) -> dict[Sequence, tuple[Step, ...]]:
    """Run one pass for all inputs, and process each result."""
    found: dict[Sequence, tuple[Step, ...]] = {}
    for entry, (result, pass_ms) in computed(inputs, partial(_run, kv_cache_manager.base), _fail):
        sequence, begin = entry.sequence, time.perf_counter()
        with Confined(sequence.fail):
            round_ = _process(entry, result)
            _record(entry, pass_ms, (time.perf_counter() - begin) * 1e3)
            found[sequence] = sequence.take(round_)
            if sequence.finish_reason is not None:
                kv_cache_manager.end(sequence)
    return found


def _fail(entry: _PassInput, error: EdgeLLMError) -> None:
    entry.sequence.fail(error)


def _record(entry: _PassInput, pass_ms: float, process_ms: float) -> None:
    """Record the time of a pass and of its processing."""
    profile = entry.sequence.profile
    if entry.tree is None:
        profile.book(entry.stage, pass_ms + process_ms, continues=entry.continues)
        return
    if entry.part is not None:
        profile.book(entry.stage, pass_ms, continues=entry.continues)
    profile.book(ACCEPT, process_ms)


def _run(base: DecoderNetwork, inputs: Sized[_PassInput]) -> list[tuple[PassResult, float]]:
    """The results of all inputs, from one pass, each with its milliseconds."""
    begin = time.perf_counter()
    parts = [entry.part for entry in inputs if entry.part is not None]
    left = iter(base.run_batch(parts) if parts else ())
    ms = (time.perf_counter() - begin) * 1e3
    return [
        (entry.verified.result if entry.verified is not None else next(left), ms)
        for entry in inputs
    ]


# ---------------------------------------------------------------------------- before the pass
def _prepare(kv_cache_manager: KVCacheManager, sequence: Sequence) -> _PassInput | None:
    """The input of a sequence; None if it drafts first."""
    kv_cache_manager.admit(sequence)
    if sequence.is_prefilling:
        return _prefill(sequence, min(kv_cache_manager.prefill_rows, sequence.max_rows))
    drafter = sequence.drafter
    if drafter is None or drafter.is_paused:
        if _has_first_token(sequence):
            kv_cache_manager.end_prompt(sequence)
        part = _sequence_part(sequence, np.array([sequence.newest]), _FIRST_POSITION)
        return _PassInput(sequence, part, GENERATION if drafter is None else VERIFY)
    return None


def _has_first_token(sequence: Sequence) -> bool:
    """Whether the KV cache holds the prompt, and one output token is known."""
    return len(sequence.token_ids) == 1


def _sequence_part(
    sequence: Sequence, token_ids: I64, logits_index: I64, **more: Any
) -> SequencePart:
    """Tokens after those in a sequence's KV cache."""
    assert sequence.kv is not None
    return SequencePart(sequence.kv, token_ids, sequence.num_rows, logits_index, **more)


def _prefill(sequence: Sequence, max_rows: int) -> _PassInput:
    """The next chunk of the prompt."""
    prompt, drafter, begin = sequence.prompt.token_ids, sequence.drafter, sequence.num_rows
    is_first = begin == sequence.reused
    if drafter is not None and is_first:
        drafter.begin(prompt[: begin + 1])
        drafter.remember(list(prompt))
    chunk, row = _chunk(prompt, begin, sequence.prompt.chunk_end(begin, max_rows))
    return _PassInput(
        sequence, _sequence_part(sequence, chunk, row), PREFILL, continues=not is_first
    )


def _chunk(token_ids: list[int], begin: int, end: int) -> tuple[I64, I64]:
    """A chunk of a prompt, and its positions that need logits: the prompt's last."""
    chunk = np.asarray(token_ids[begin:end], np.int64)
    return chunk, np.array([len(chunk) - 1]) if end == len(token_ids) else _FIRST_POSITION


def prefill_chunk(
    base: DecoderNetwork, kv: SequenceKV, prompt: Prompt, begin: int, max_rows: int
) -> tuple[PassResult, int]:
    """Prefill a chunk of a prompt after its first `begin` tokens.

    Returns:
        The result, whose logits [1, V] are those of the prompt's last token, and of no use before
        that; and the number of tokens in the KV cache.
    """
    end = prompt.chunk_end(begin, max_rows)
    chunk, row = _chunk(prompt.token_ids, begin, end)
    return base.run(chunk, begin, row, kv=kv), end


def _catch_up_drafts(kv_cache_manager: KVCacheManager, sequences: list[Sequence]) -> list[Sequence]:
    """Sequences whose drafts have processed the committed tokens, in shared passes.

    Prompts are cached after that, since hidden states that wait take more memory than a draft's KV.
    """
    extending: list[tuple[Sequence, Passes[None]]] = []
    for one in sequences:
        with Confined(one.fail):
            if one.left > 1:
                extending.append((one, _drafter(one).catch_up()))
    _run_drafters(extending, DRAFT_EXTEND)
    for one in sequences:
        if _has_first_token(one) and not one.is_over:
            with Confined(one.fail):
                kv_cache_manager.end_prompt(one)
    return [one for one in sequences if not one.is_over]


def _plan_device_rounds(base: DecoderNetwork, sequences: list[Sequence]) -> list[_PlannedRound]:
    """The rounds that the device can run without the host."""
    found: list[_PlannedRound] = []
    for sequence in sequences:
        with Confined(sequence.fail):
            drafter, sampler = _drafter(sequence), sequence.sampler
            assert sequence.kv is not None
            exact = sequence.accept is accept_exactly or sampler.params.is_greedy
            newest = sequence.newest, sequence.kv, sequence.num_rows
            left = sequence.left - 1
            planned = drafter.plan_round(base, newest, left, sampler, is_exact=exact)
            if planned is not None:
                found.append((sequence, *planned))
    return found


def _run_rounds(
    kv_cache_manager: KVCacheManager, planned: list[_PlannedRound]
) -> dict[Sequence, tuple[Step, ...]]:
    """Run device rounds, in batches of the device's size, and process their results."""
    found: dict[Sequence, tuple[Step, ...]] = {}
    rounds = planned[0][1]
    while planned:
        count = rounds.maximum([part for _, _, part in planned])
        some, planned = planned[:count], planned[count:]
        found |= _run_round(
            kv_cache_manager, rounds, [(sequence, part) for sequence, _, part in some]
        )
    return found


def _run_round(
    kv_cache_manager: KVCacheManager, rounds: DeviceRounds, parts: list[_RoundInput]
) -> dict[Sequence, tuple[Step, ...]]:
    found: dict[Sequence, tuple[Step, ...]] = {}
    for (sequence, _), done in computed(parts, partial(_compute_round, rounds), _fail_part):
        with Confined(sequence.fail):
            sequence.profile.book(DRAFT_TREE, done.ask_ms)
            sequence.profile.book(VERIFY, done.wait_ms)
            verified = _drafter(sequence).take_round(done.outcome, done.result)
            entry = _PassInput(sequence, None, VERIFY, tree=verified.tree, verified=verified)
            found |= _execute(kv_cache_manager, [entry])
    return found


def _compute_round(rounds: DeviceRounds, parts: Sized[_RoundInput]) -> list[_RoundResult]:
    begin = time.perf_counter()
    rounds.ask([part for _, part in parts])
    asked = time.perf_counter()
    outcomes = rounds.finish()
    times_ms = (asked - begin) * 1e3, (time.perf_counter() - asked) * 1e3
    return [_RoundResult(*outcome, *times_ms) for outcome in outcomes]


def _fail_part(part: _RoundInput, error: EdgeLLMError) -> None:
    part[0].fail(error)


def _draft(base: DecoderNetwork, sequences: list[Sequence]) -> list[_PassInput]:
    """Draft trees of several sequences, in shared passes."""
    proposing: list[tuple[Sequence, Passes[Tree]]] = []
    for sequence in sequences:
        with Confined(sequence.fail):
            room = min(base.capacity - sequence.num_rows, sequence.max_rows) - 1
            tree = _drafter(sequence).propose(sequence.newest, room, sequence.left - 1)
            proposing.append((sequence, tree))
    inputs: list[_PassInput] = []
    for sequence, tree in _run_drafters(proposing, DRAFT_TREE):
        with Confined(sequence.fail):
            inputs.append(_verification_input(sequence, tree))
    return inputs


def _drafter(sequence: Sequence) -> Drafter:
    assert sequence.drafter is not None
    return sequence.drafter


def _run_drafters(work: list[tuple[Sequence, Passes[T]]], stage: str) -> list[tuple[Sequence, T]]:
    """Results of drafters' work, in shared passes; an error ends its sequence only."""
    if not work:
        return []
    begin = time.perf_counter()
    outcomes = run_all([passes for _, passes in work])
    ms = (time.perf_counter() - begin) * 1e3
    found: list[tuple[Sequence, T]] = []
    for (sequence, _), outcome in zip(work, outcomes, strict=True):
        if isinstance(outcome, EdgeLLMError):
            sequence.fail(outcome)
            continue
        is_first = stage == DRAFT_EXTEND and _has_first_token(sequence)
        sequence.profile.book(DRAFT_PREFILL if is_first else stage, ms)
        found.append((sequence, outcome))
    return found


def _verification_input(sequence: Sequence, tree: Tree) -> _PassInput:
    if len(tree) == 1:
        return _PassInput(
            sequence, _sequence_part(sequence, tree.token_ids, _FIRST_POSITION), VERIFY, tree=tree
        )
    depths, mask = tree.layout()
    more = {"position_ids": sequence.num_rows + depths, "tree_mask": mask}
    part = _sequence_part(sequence, tree.token_ids, np.arange(len(tree)), **more)
    return _PassInput(sequence, part, VERIFY, tree=tree)


# ---------------------------------------------------------------------------- after the pass
def _process(entry: _PassInput, result: PassResult) -> Round | None:
    """New tokens of a sequence; None during prefill."""
    sequence = entry.sequence
    if entry.tree is not None:
        accepted = None if entry.verified is None else entry.verified.accepted
        return _accept(sequence, entry.tree, result, accepted)
    if entry.stage == PREFILL:
        assert entry.part is not None
        return _process_chunk(sequence, entry.part.end, result)
    token_id = draw(result, 0, sequence.sampler)
    sequence.num_rows += 1
    if sequence.drafter is None:
        return Round((token_id,))
    assert entry.part is not None
    sequence.drafter.observe_plain(token_id, result.taps)
    return Round((token_id,), Tree.of_roots(entry.part.token_ids), (0,), (1.0,))


def _process_chunk(sequence: Sequence, end: int, result: PassResult) -> Round | None:
    """Process a chunk of a prompt; the last one gives the first output token."""
    prompt, drafter = sequence.prompt.token_ids, sequence.drafter
    following = prompt[sequence.num_rows + 1 : end + 1]
    if is_last := end == len(prompt):
        following = [*following, draw(result, 0, sequence.sampler)]
    if drafter is not None:
        if is_last:
            drafter.remember(following[-1:])
        drafter.observe(np.asarray(following, np.int64), result.taps)
    sequence.num_rows = end
    return Round((following[-1],)) if is_last else None


def _accept(sequence: Sequence, tree: Tree, result: PassResult, accepted: Accepted | None) -> Round:
    """Accept a path of a tree, unless the device did, and commit it."""
    drafter, length = sequence.drafter, sequence.num_rows
    assert drafter is not None
    assert sequence.kv is not None
    if len(tree) == 1 and accepted is None:
        # Any acceptance rule draws this token, and its position is already right.
        outcome, taps = Accepted([0], draw(result, 0, sequence.sampler)), result.taps
    else:
        outcome = accepted or sequence.accept(tree, result, sequence.sampler)
        path = np.asarray(outcome.path)
        sequence.kv.compact(length, path)
        taps = result.taps[path]
    sequence.num_rows += len(outcome.path)
    token_ids = _commit(drafter, tree, taps, outcome)
    return Round(token_ids, tree, tuple(outcome.path), tuple(drafter.confidences(tree)))


def _commit(drafter: Drafter, tree: Tree, taps: F32, outcome: Accepted) -> tuple[int, ...]:
    """Pass the accepted tokens to the drafter, with hidden states [M, T*H]; return new tokens."""
    token_ids = (*(int(tree.token_ids[node]) for node in outcome.path[1:]), outcome.bonus)
    drafter.observe(np.asarray(token_ids), taps)
    drafter.remember(list(token_ids))
    drafter.learn(tree, outcome.path, len(token_ids))
    return token_ids
