"""The decoding loop: prefill once, then one pass per token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from edgellm.contract import EdgeLLMError
from edgellm.device_runtime.profile import GENERATION, PREFILL, Profile
from edgellm.device_runtime.sampling import Sampler
from edgellm.device_runtime.session import PassResult, Session

_UNUSED_ROW = np.zeros(1, np.int64)  # not every kernel takes an empty head


def generate(
    session: Session,
    prompt: Sequence[int],
    sampler: Sampler,
    max_tokens: int,
    profile: Profile,
    *,
    prefill_rows: int,
) -> Iterator[int]:
    """Yield token ids until `max_tokens`; the caller stops earlier at an end token.

    Args:
        session: its cache is overwritten from row 0.
        prompt: token ids, at least one.
        sampler: chooses each token.
        max_tokens: at most this many; prompt and answer must fit into the cache.
        profile: receives the time of every pass.
        prefill_rows: rows per pass while the prompt is read.

    Raises:
        EdgeLLMError: the engine computed something that is not a number.
    """
    rows = np.asarray(prompt, np.int64)
    length = 0
    for count in range(max_tokens):
        with profile.stage(GENERATION if count else PREFILL):
            while len(rows) > prefill_rows:
                session.run(rows[:prefill_rows], length, _UNUSED_ROW)
                rows, length = rows[prefill_rows:], length + prefill_rows
            result = session.run(rows, length, np.array([len(rows) - 1]))
            token_id = _checked(result, sampler, length)
        length += len(rows)
        yield token_id
        rows = np.array([token_id])


def _checked(result: PassResult, sampler: Sampler, length: int) -> int:
    argmax = int(result.token_ids[0])
    highest = result.logits[0, argmax]
    if not np.isfinite(highest):
        raise EdgeLLMError(
            f"the engine computed {highest} after {length} tokens",
            hint="build the engine again; if it stays, the model overflows this precision",
        )
    return sampler.choose(result.logits[0], argmax)
