"""One step of answers, side by side: a piece of a prompt, a token, or a round of a tree each.

Invariant between steps: the base's cache holds all tokens of a sequence but the newest, which is
the row of its next pass or the root of its next tree.
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
    DRAFT_EXTEND,
    DRAFT_PREFILL,
    GENERATION,
    GROW,
    PREFILL,
    SETTLE,
    VERIFY,
)
from edgellm.device_runtime.engine.sequence import Sequence, Step
from edgellm.device_runtime.faults import Confined, computed
from edgellm.device_runtime.networks.decoder import DecoderNetwork, PassResult, SequencePart
from edgellm.device_runtime.runners.device_speculation import RoundOutcome
from edgellm.device_runtime.sampling.sampler import draw
from edgellm.device_runtime.speculate.acceptance import Accepted, Round, accept_exactly
from edgellm.device_runtime.speculate.device_rounds import DeviceRounds, RoundPart
from edgellm.device_runtime.speculate.drafter import Drafter, Verified
from edgellm.device_runtime.speculate.shared_passes import Passes, run_all
from edgellm.device_runtime.speculate.tree import Tree

T = TypeVar("T")
_FIRST = np.zeros(1, np.int64)  # the only row; where none is wanted: not every kernel takes none


class _Turn(NamedTuple):
    """What a sequence asks of a pass of the base.

    A tuple, as all that is made for each token: behind a pass, which takes the processor's caches,
    a frozen dataclass takes three times as long.
    """

    sequence: Sequence
    part: SequencePart | None  # None: a device has run the round already
    stage: str
    continues: bool = False  # the stage
    tree: Tree | None = None  # that is verified
    verified: Verified | None = None  # by a device


class _Done(NamedTuple):
    """A round that a device ran."""

    outcome: RoundOutcome
    result: PassResult
    ask_ms: float
    wait_ms: float


_Planned = tuple[Sequence, DeviceRounds, RoundPart]
_Part = tuple[Sequence, RoundPart]


def step(slot: KVCacheManager, sequences: Iterable[Sequence]) -> list[tuple[Step, ...]]:
    """Advance every sequence that is not over by one pass or round.

    As many as the engine was built for share a pass.

    Returns:
        What it added to each answer: nothing while the prompt is read, and text that was held
        back behind the end. A sequence whose own work raised anything, or of which the engine
        computed something that is not a number, is over, with its `failure`.
    """
    going, maximum = list(sequences), slot.session.max_batch_size
    found: dict[Sequence, tuple[Step, ...]] = dict.fromkeys(going, ())
    for at in range(0, len(going), maximum):
        turns, drafting = _turns(slot, going[at : at + maximum])
        ready = _caught_up(drafting)
        if planned := _planned(slot.session, ready):
            found |= _run_rounds(slot, planned)
            elsewhere = {one for one, _, _ in planned}
            ready = [one for one in ready if one not in elsewhere]
        found |= _take(slot, turns + _draft(slot.session, ready))
    return list(found.values())


def _turns(slot: KVCacheManager, sequences: list[Sequence]) -> tuple[list[_Turn], list[Sequence]]:
    """What sequences ask of a pass, and those that draft; what goes wrong ends one answer only."""
    found: list[_Turn] = []
    drafting: list[Sequence] = []
    for at, sequence in enumerate(sequences):
        if sequence.is_over:
            continue
        with Confined(sequence.fail):
            if at and slot.waits(sequence, sequences[:at]):
                continue
            turn = _ask(slot, sequence)
            if turn is None:
                drafting.append(sequence)
            else:
                found.append(turn)
    return found, drafting


def _take(slot: KVCacheManager, turns: list[_Turn]) -> dict[Sequence, tuple[Step, ...]]:
    """Run a pass for all, and see what becomes of each."""
    found: dict[Sequence, tuple[Step, ...]] = {}
    for turn, (result, pass_ms) in computed(turns, partial(_run, slot.session), _fail):
        sequence, begin = turn.sequence, time.perf_counter()
        with Confined(sequence.fail):
            slot.admit(sequence)
            settled = _settle(slot.session, turn, result)
            _book(turn, pass_ms, (time.perf_counter() - begin) * 1e3)
            found[sequence] = sequence.take(settled)
            if turn.stage == PREFILL and not sequence.is_reading:
                slot.end_prompt(sequence)
            if sequence.finish_reason is not None:
                slot.end(sequence)
    return found


def _fail(turn: _Turn, error: EdgeLLMError) -> None:
    turn.sequence.fail(error)


def _book(turn: _Turn, pass_ms: float, settling_ms: float) -> None:
    """Note the time of a pass and of what came of it."""
    profile = turn.sequence.profile
    if turn.tree is None:
        profile.book(turn.stage, pass_ms + settling_ms, continues=turn.continues)
        return
    if turn.part is not None:
        profile.book(turn.stage, pass_ms, continues=turn.continues)
    profile.book(SETTLE, settling_ms)


def _run(session: DecoderNetwork, turns: Sized[_Turn]) -> list[tuple[PassResult, float]]:
    """The results of all turns, one pass, each with its milliseconds."""
    begin = time.perf_counter()
    parts = [turn.part for turn in turns if turn.part is not None]
    left = iter(session.run_many(parts) if parts else ())
    ms = (time.perf_counter() - begin) * 1e3
    return [
        (turn.verified.result if turn.verified is not None else next(left), ms) for turn in turns
    ]


# ---------------------------------------------------------------------------- before the pass
def _ask(slot: KVCacheManager, sequence: Sequence) -> _Turn | None:
    """None: it drafts first."""
    slot.admit(sequence)
    if sequence.is_reading:
        return _read(sequence, min(slot.prefill_rows, sequence.max_rows))
    drafter = sequence.drafter
    if drafter is None or drafter.rests:
        part = _part(sequence, np.array([sequence.newest]), _FIRST)
        return _Turn(sequence, part, GENERATION if drafter is None else VERIFY)
    return None


def _part(sequence: Sequence, token_ids: I64, logits_index: I64, **more: Any) -> SequencePart:
    """Rows behind those of a sequence."""
    assert sequence.context is not None
    return SequencePart(sequence.context, token_ids, sequence.num_rows, logits_index, **more)


def _read(sequence: Sequence, max_rows: int) -> _Turn:
    """The next piece of the prompt."""
    prompt, drafter, begin = sequence.prompt.token_ids, sequence.drafter, sequence.num_rows
    is_first = begin == sequence.reused
    if drafter is not None and is_first:
        drafter.begin(prompt[: begin + 1])
        drafter.remember(list(prompt))
    piece, row = _piece(prompt, begin, max_rows)
    return _Turn(sequence, _part(sequence, piece, row), PREFILL, continues=not is_first)


def _piece(token_ids: list[int], begin: int, max_rows: int) -> tuple[I64, I64]:
    """Of a prompt, and which of its rows are wanted: the prompt's last."""
    piece = np.asarray(token_ids[begin : begin + max_rows], np.int64)
    is_last = begin + len(piece) == len(token_ids)
    return piece, np.array([len(piece) - 1]) if is_last else _FIRST


def read_piece(
    session: DecoderNetwork, token_ids: list[int], begin: int, max_rows: int
) -> tuple[PassResult, int]:
    """Write a piece of a prompt behind its `begin` rows that are there.

    Returns:
        The pass, whose logits [1, V] are those of the prompt's last token, and of no use before
        that; and the rows that are there now.
    """
    piece, row = _piece(token_ids, begin, max_rows)
    return session.run(piece, begin, row), begin + len(piece)


def _caught_up(sequences: list[Sequence]) -> list[Sequence]:
    """Those whose drafts have read what was committed, in shared passes."""
    reading: list[tuple[Sequence, Passes[None]]] = []
    for one in sequences:
        with Confined(one.fail):
            if one.left > 1:
                reading.append((one, _drafter(one).catch_up()))
    _drafted(reading, DRAFT_EXTEND)
    return [one for one in sequences if not one.is_over]


def _planned(session: DecoderNetwork, sequences: list[Sequence]) -> list[_Planned]:
    """The rounds that a device can run alone."""
    found: list[_Planned] = []
    for sequence in sequences:
        with Confined(sequence.fail):
            drafter, sampler = _drafter(sequence), sequence.sampler
            assert sequence.context is not None
            exact = sequence.accept is accept_exactly or sampler.params.is_greedy
            newest = sequence.newest, sequence.context, sequence.num_rows
            left = sequence.left - 1
            planned = drafter.plan_round(session, newest, left, sampler, is_exact=exact)
            if planned is not None:
                found.append((sequence, *planned))
    return found


def _run_rounds(slot: KVCacheManager, planned: list[_Planned]) -> dict[Sequence, tuple[Step, ...]]:
    """Rounds of a device, as many together as it runs, and what becomes of each answer."""
    found: dict[Sequence, tuple[Step, ...]] = {}
    rounds = planned[0][1]
    while planned:
        count = rounds.maximum([part for _, _, part in planned])
        some, planned = planned[:count], planned[count:]
        found |= _run_round(slot, rounds, [(sequence, part) for sequence, _, part in some])
    return found


def _run_round(
    slot: KVCacheManager, rounds: DeviceRounds, parts: list[_Part]
) -> dict[Sequence, tuple[Step, ...]]:
    found: dict[Sequence, tuple[Step, ...]] = {}
    for (sequence, _), done in computed(parts, partial(_compute_round, rounds), _fail_part):
        with Confined(sequence.fail):
            sequence.profile.book(GROW, done.ask_ms)
            sequence.profile.book(VERIFY, done.wait_ms)
            verified = _drafter(sequence).take_round(done.outcome, done.result)
            turn = _Turn(sequence, None, VERIFY, tree=verified.tree, verified=verified)
            found |= _take(slot, [turn])
    return found


def _compute_round(rounds: DeviceRounds, parts: Sized[_Part]) -> list[_Done]:
    begin = time.perf_counter()
    rounds.ask([part for _, part in parts])
    asked = time.perf_counter()
    outcomes = rounds.finish()
    times_ms = (asked - begin) * 1e3, (time.perf_counter() - asked) * 1e3
    return [_Done(*outcome, *times_ms) for outcome in outcomes]


def _fail_part(part: _Part, error: EdgeLLMError) -> None:
    part[0].fail(error)


def _draft(session: DecoderNetwork, sequences: list[Sequence]) -> list[_Turn]:
    """Trees of several sequences, whose drafts share passes."""
    proposing: list[tuple[Sequence, Passes[Tree]]] = []
    for sequence in sequences:
        with Confined(sequence.fail):
            room = min(session.capacity - sequence.num_rows, sequence.max_rows) - 1
            tree = _drafter(sequence).propose(sequence.newest, room, sequence.left - 1)
            proposing.append((sequence, tree))
    turns: list[_Turn] = []
    for sequence, tree in _drafted(proposing, GROW):
        with Confined(sequence.fail):
            turns.append(_verifying(sequence, tree))
    return turns


def _drafter(sequence: Sequence) -> Drafter:
    assert sequence.drafter is not None
    return sequence.drafter


def _drafted(work: list[tuple[Sequence, Passes[T]]], stage: str) -> list[tuple[Sequence, T]]:
    """What comes of drafters' work, side by side; what fails ends its answer only."""
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
        is_first = stage == DRAFT_EXTEND and len(sequence.token_ids) == 1
        sequence.profile.book(DRAFT_PREFILL if is_first else stage, ms)
        found.append((sequence, outcome))
    return found


def _verifying(sequence: Sequence, tree: Tree) -> _Turn:
    if len(tree) == 1:
        return _Turn(sequence, _part(sequence, tree.token_ids, _FIRST), VERIFY, tree=tree)
    depths, mask = tree.layout()
    more = {"position_ids": sequence.num_rows + depths, "tree_mask": mask}
    part = _part(sequence, tree.token_ids, np.arange(len(tree)), **more)
    return _Turn(sequence, part, VERIFY, tree=tree)


# ---------------------------------------------------------------------------- behind the pass
def _settle(session: DecoderNetwork, turn: _Turn, result: PassResult) -> Round | None:
    """New tokens of an answer; None while its prompt is read."""
    sequence = turn.sequence
    if turn.tree is not None:
        accepted = None if turn.verified is None else turn.verified.accepted
        return _accept(session, sequence, turn.tree, result, accepted)
    if turn.stage == PREFILL:
        assert turn.part is not None
        return _settle_piece(sequence, turn.part.end, result)
    token_id = draw(result, 0, sequence.sampler)
    sequence.num_rows += 1
    if sequence.drafter is None:
        return Round((token_id,))
    assert turn.part is not None
    sequence.drafter.pass_by(token_id, result.taps)
    return Round((token_id,), Tree.of_roots(turn.part.token_ids), (0,), (1.0,))


def _settle_piece(sequence: Sequence, end: int, result: PassResult) -> Round | None:
    """The last piece of a prompt gives the answer's first token."""
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


def _accept(
    session: DecoderNetwork,
    sequence: Sequence,
    tree: Tree,
    result: PassResult,
    accepted: Accepted | None,
) -> Round:
    """Accept a path of a tree, unless a device did, and commit it."""
    drafter, length = sequence.drafter, sequence.num_rows
    assert drafter is not None
    if len(tree) == 1 and accepted is None:
        # Whatever accepts draws this token, and its row stands where it belongs.
        outcome, taps = Accepted([0], draw(result, 0, sequence.sampler)), result.taps
    else:
        outcome = accepted or sequence.accept(tree, result, sequence.sampler)
        path = np.asarray(outcome.path)
        session.compact(length, path)
        taps = result.taps[path]
    sequence.num_rows += len(outcome.path)
    token_ids = _commit(drafter, tree, taps, outcome)
    return Round(token_ids, tree, tuple(outcome.path), tuple(drafter.confidences(tree)))


def _commit(drafter: Drafter, tree: Tree, taps: F32, outcome: Accepted) -> tuple[int, ...]:
    """Tell the drafter what was accepted, with its features [M, T*H]; the new tokens."""
    token_ids = (*(int(tree.token_ids[node]) for node in outcome.path[1:]), outcome.bonus)
    drafter.observe(np.asarray(token_ids), taps)
    drafter.remember(list(token_ids))
    drafter.learn(tree, outcome.path, len(token_ids))
    return token_ids
