"""One step of answers: a piece of a prompt, a token, or a round of a tree.

Invariant between steps: the base's cache holds all tokens of a sequence but the newest, which is
the row of its next pass or the root of its next tree.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from edgellm.contract import EdgeLLMError
from edgellm.device_runtime.engine.cache_slot import CacheSlot
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
from edgellm.device_runtime.sampling.sampler import draw
from edgellm.device_runtime.sessions import F32
from edgellm.device_runtime.sessions.decoder import DecoderSession, PassResult
from edgellm.device_runtime.speculate.accept import Accepted, Round, accept_exactly
from edgellm.device_runtime.speculate.drafter import Drafter, Verified
from edgellm.device_runtime.speculate.tree import Tree

_FIRST = np.zeros(1, np.int64)  # the only row; where none is wanted: not every kernel takes none


def step(slot: CacheSlot, sequences: Iterable[Sequence]) -> list[tuple[Step, ...]]:
    """Advance every sequence, none of which is over, by one pass or round.

    Returns:
        What it added to each answer: nothing while the prompt is read, and text that was held
        back behind the end. A sequence of which the engine computed something that is not a
        number adds nothing and is over, with its `failure`.
    """
    return [_step(slot, sequence) for sequence in sequences]


def _step(slot: CacheSlot, sequence: Sequence) -> tuple[Step, ...]:
    try:
        return sequence.take(_advance(slot, sequence))
    except EdgeLLMError as error:
        sequence.fail(error)
        return ()


def _advance(slot: CacheSlot, sequence: Sequence) -> Round | None:
    """New tokens of an answer; None while its prompt is read."""
    slot.admit(sequence)
    if sequence.is_reading:
        return _read(slot.session, sequence, min(slot.prefill_rows, sequence.most_rows))
    if sequence.drafter is None:
        return _decode(slot.session, sequence)
    return _speculate(slot.session, sequence, sequence.drafter)


def _read(session: DecoderSession, sequence: Sequence, most_rows: int) -> Round | None:
    """Write a piece of the prompt; the last gives the answer's first token."""
    prompt, drafter = sequence.prompt.token_ids, sequence.drafter
    begin, is_first = sequence.num_rows, sequence.num_rows == sequence.reused
    with sequence.profile.stage(PREFILL, continues=not is_first):
        if drafter is not None and is_first:
            drafter.begin(prompt[: begin + 1])
            drafter.remember(list(prompt))
        result, end = read_piece(session, prompt, begin, most_rows)
        following = prompt[begin + 1 : end + 1]
        if is_last := end == len(prompt):
            following = [*following, draw(result, 0, sequence.sampler)]
        if drafter is not None:
            if is_last:
                drafter.remember(following[-1:])
            drafter.observe(np.asarray(following, np.int64), result.taps)
    sequence.num_rows = end
    return Round((following[-1],)) if is_last else None


def read_piece(
    session: DecoderSession, token_ids: list[int], begin: int, most_rows: int
) -> tuple[PassResult, int]:
    """Write a piece of a prompt behind its `begin` rows that are there.

    Returns:
        The pass, whose logits [1, V] are those of the prompt's last token, and of no use before
        that; and the rows that are there now.
    """
    piece = np.asarray(token_ids[begin : begin + most_rows], np.int64)
    end = begin + len(piece)
    row = _FIRST if end < len(token_ids) else np.array([len(piece) - 1])
    return session.run(piece, begin, row), end


def _decode(session: DecoderSession, sequence: Sequence) -> Round:
    with sequence.profile.stage(GENERATION):
        result = session.run(np.array([sequence.newest]), sequence.num_rows, _FIRST)
        token_id = draw(result, 0, sequence.sampler)
    sequence.num_rows += 1
    return Round((token_id,))


def _speculate(session: DecoderSession, sequence: Sequence, drafter: Drafter) -> Round:
    """Propose a tree, verify it in one pass of the base, accept a path, commit it."""
    profile, length, left = sequence.profile, sequence.num_rows, sequence.left
    if left > 1:
        with profile.stage(DRAFT_EXTEND if len(sequence.token_ids) > 1 else DRAFT_PREFILL):
            drafter.catch_up()
    sampler = sequence.sampler
    is_exact = sequence.accept is accept_exactly or sampler.params.is_greedy
    with profile.stage(GROW):
        newest, tree = (sequence.newest, length), None
        if not drafter.ask_round(session, newest, left - 1, sampler, is_exact=is_exact):
            room = min(session.capacity - length, sequence.most_rows) - 1
            tree = drafter.propose(sequence.newest, room, left - 1)
    with profile.stage(VERIFY):
        if tree is None:
            verified = drafter.finish_round()
        else:
            verified = Verified(tree, _verify(session, tree, length))
        tree, result = verified.tree, verified.result
    with profile.stage(SETTLE):
        if len(tree) == 1 and verified.accepted is None:
            # Whatever accepts draws this token, and its row stands where it belongs.
            outcome, taps = Accepted([0], draw(result, 0, sampler)), result.taps
        else:
            outcome = verified.accepted or sequence.accept(tree, result, sampler)
            path = np.asarray(outcome.path)
            session.compact(length, path)
            taps = result.taps[path]
        sequence.num_rows += len(outcome.path)
        token_ids = _commit(drafter, tree, taps, outcome)
    return Round(token_ids, tree, tuple(outcome.path), tuple(drafter.confidences(tree)))


def _verify(session: DecoderSession, tree: Tree, length: int) -> PassResult:
    if len(tree) == 1:
        return session.run(tree.token_ids, length, _FIRST)
    depths, mask = tree.layout()
    rows = np.arange(len(tree))
    return session.run(tree.token_ids, length, rows, position_ids=length + depths, tree_mask=mask)


def _commit(drafter: Drafter, tree: Tree, taps: F32, outcome: Accepted) -> tuple[int, ...]:
    """Tell the drafter what was accepted, with its features [M, T*H]; the new tokens."""
    token_ids = (*(int(tree.token_ids[node]) for node in outcome.path[1:]), outcome.bonus)
    drafter.observe(np.asarray(token_ids), taps)
    drafter.remember(list(token_ids))
    drafter.learn(tree, outcome.path, len(token_ids))
    return token_ids
