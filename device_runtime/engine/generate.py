"""Plain decoding: the prompt once, then one pass per token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from edgellm.contract import EdgeLLMError
from edgellm.device_runtime.engine.profile import GENERATION, PREFILL, Profile
from edgellm.device_runtime.sampling.sampler import Sampler
from edgellm.device_runtime.session import PassResult, Session

_UNUSED_ROW = np.zeros(1, np.int64)  # not every kernel takes an empty head


def read_prompt(
    session: Session, prompt: Sequence[int], prefill_rows: int, reused: int = 0
) -> Iterator[tuple[slice, PassResult]]:
    """Write the prompt into the cache behind the `reused` rows that are there, in pieces.

    Yields:
        The piece's place in the prompt and its pass, whose logits [1, V] are those of the last
        token for the last piece, and of no use for the others.
    """
    token_ids = np.asarray(prompt, np.int64)
    for begin in range(reused, len(token_ids), prefill_rows):
        piece = token_ids[begin : begin + prefill_rows]
        end = begin + len(piece)
        row = _UNUSED_ROW if end < len(token_ids) else np.array([len(piece) - 1])
        yield slice(begin, end), session.run(piece, begin, row)


def generate(
    session: Session,
    prompt: Sequence[int],
    sampler: Sampler,
    max_tokens: int,
    profile: Profile,
    *,
    prefill_rows: int,
    reused: int = 0,
) -> Iterator[int]:
    """Yield token ids until `max_tokens`; the caller stops earlier at an end token.

    Args:
        session: its cache is overwritten from row `reused`.
        prompt: token ids, at least one.
        sampler: chooses each token.
        max_tokens: at most this many; prompt and answer must fit into the cache.
        profile: receives the time of every pass.
        prefill_rows: rows per pass while the prompt is read.
        reused: rows of the prompt that the cache holds; less than its tokens.

    Raises:
        EdgeLLMError: the engine computed something that is not a number.
    """
    with profile.stage(PREFILL):
        *_, (_, result) = read_prompt(session, prompt, prefill_rows, reused)
        token_id = draw(result, 0, sampler)
    yield token_id
    for length in range(len(prompt), len(prompt) + max_tokens - 1):
        with profile.stage(GENERATION):
            token_id = draw(session.run(np.array([token_id]), length, _UNUSED_ROW), 0, sampler)
        yield token_id


def draw(result: PassResult, row: int, sampler: Sampler) -> int:
    """The token that the sampler chooses after a row of a pass, to be one of the answer.

    Raises:
        EdgeLLMError: the engine computed something that is not a number.
    """
    argmax = int(result.token_ids[row])
    highest = result.highest[row]
    if not np.isfinite(highest):
        raise EdgeLLMError(
            f"the engine computed {highest}",
            hint="build the engine again; if it stays, the model overflows this precision",
        )
    if not sampler.needs_logits:  # a device then keeps them
        return argmax
    logits = result.logits[row]
    token_id = sampler.choose(logits, argmax)
    sampler.record(logits, token_id)
    return token_id
