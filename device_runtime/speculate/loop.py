"""Rounds of speculative decoding: propose a tree, verify it in one pass, accept, compact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from edgellm.device_runtime.engine.generate import read_prompt
from edgellm.device_runtime.engine.profile import (
    DRAFT_EXTEND,
    DRAFT_PREFILL,
    GROW,
    PREFILL,
    SETTLE,
    VERIFY,
    Profile,
)
from edgellm.device_runtime.sampling.sampler import Sampler
from edgellm.device_runtime.session import PassResult, Session
from edgellm.device_runtime.speculate.accept import Accepted, accept_exactly
from edgellm.device_runtime.speculate.drafter import Drafter
from edgellm.device_runtime.speculate.tree import Tree

Accept = Callable[[Tree, PassResult, Sampler], Accepted]


@dataclass(frozen=True, slots=True)
class Round:
    """What one verification gave."""

    token_ids: tuple[int, ...]  # new tokens of the answer; at least one
    tree: Tree | None = None  # None for the token that comes out of the prefill
    path: tuple[int, ...] = ()  # accepted nodes, root first
    confidences: tuple[float, ...] = ()  # the draft's probability of every node


def speculate(
    session: Session,
    drafter: Drafter,
    prompt: Sequence[int],
    sampler: Sampler,
    max_tokens: int,
    profile: Profile,
    *,
    prefill_rows: int,
    accept: Accept = accept_exactly,
    reused: int = 0,
) -> Iterator[Round]:
    """Yield rounds until `max_tokens` tokens; the caller stops earlier at an end token.

    Invariant: the base's cache holds all committed tokens but the newest, which is the next
    tree's root.

    Args:
        session: the base; its cache is overwritten from row `reused`, as is the draft's.
        drafter: proposes trees; it is told everything that the base computes.
        prompt: token ids, at least one.
        sampler: of the request.
        max_tokens: at most this many; prompt and answer must fit into the cache.
        profile: receives the time of every stage.
        prefill_rows: rows per pass while the prompt is read.
        accept: decides which drafted tokens are taken.
        reused: rows of the prompt that both caches hold; less than its tokens.

    Raises:
        EdgeLLMError: the engine computed something that is not a number.
    """
    with profile.stage(PREFILL):
        drafter.begin(prompt[: reused + 1])
        drafter.remember(list(prompt))
        pieces = read_prompt(session, prompt, prefill_rows, reused)
        root = _read(pieces, drafter, prompt, sampler, accept)
    yield Round((root,))
    length, left = len(prompt), max_tokens - 1
    stage = DRAFT_PREFILL
    while left > 0:
        if left > 1:
            with profile.stage(stage):
                drafter.catch_up()
            stage = DRAFT_EXTEND
        with profile.stage(GROW):
            tree = drafter.propose(root, session.capacity - length - 1, left - 1)
        with profile.stage(VERIFY):
            result = _verify(session, tree, length)
        with profile.stage(SETTLE):
            outcome = accept(tree, result, sampler)
            token_ids = _commit(session, drafter, tree, result, outcome, length)
        yield Round(token_ids, tree, tuple(outcome.path), tuple(drafter.confidences(tree)))
        length, left, root = length + len(outcome.path), left - len(token_ids), outcome.bonus


def _read(
    pieces: Iterator[tuple[slice, PassResult]],
    drafter: Drafter,
    prompt: Sequence[int],
    sampler: Sampler,
    accept: Accept,
) -> int:
    """Read the prompt; the answer's first token."""
    following: list[int] = []
    for rows, result in pieces:
        following = list(prompt[rows.start + 1 : rows.stop + 1])
        if rows.stop == len(prompt):
            following.append(accept(Tree.of_root(0), result, sampler).bonus)
            drafter.remember(following[-1:])
        drafter.observe(np.asarray(following, np.int64), result.taps)
    return following[-1]


def _commit(
    session: Session,
    drafter: Drafter,
    tree: Tree,
    result: PassResult,
    outcome: Accepted,
    length: int,
) -> tuple[int, ...]:
    """Keep the accepted rows and tell the drafter; the new tokens."""
    path = np.asarray(outcome.path)
    session.compact(length, path)
    token_ids = (*tree.token_ids[path[1:]].tolist(), outcome.bonus)
    drafter.observe(np.asarray(token_ids), result.taps[path])
    drafter.remember(list(token_ids))
    drafter.learn(tree, outcome.path, len(token_ids))
    return token_ids


def _verify(session: Session, tree: Tree, length: int) -> PassResult:
    if len(tree) == 1:
        return session.run(tree.token_ids, length, _FIRST)
    depths, mask = tree.layout()
    rows = np.arange(len(tree))
    return session.run(tree.token_ids, length, rows, position_ids=length + depths, tree_mask=mask)


_FIRST = np.zeros(1, np.int64)
