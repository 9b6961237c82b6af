"""Log-probabilities of output tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgellm.device_runtime.arrays import F32


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token, before temperature, top-k and top-p."""

    token_id: int
    logprob: float  # natural logarithm of its probability
    top: tuple[tuple[int, float], ...]  # likeliest token ids with log-probabilities, best first


def token_logprobs(logits: F32, token_id: int, count: int) -> TokenLogprobs:
    """Log-probabilities of a chosen token and of the `count` likeliest ones.

    Args:
        logits: float32 [V].
        token_id: the token that was chosen.
        count: at most V; 0 gives only the chosen token.
    """
    shifted = logits.astype(np.float64) - logits.max()
    normalizer = np.log(np.exp(shifted).sum())
    count = min(count, len(logits))
    likely = np.argpartition(-logits, count - 1)[:count] if count else np.zeros(0, np.int64)
    likely = likely[np.lexsort((likely, -logits[likely]))]
    top = tuple((int(at), float(shifted[at] - normalizer)) for at in likely)
    return TokenLogprobs(token_id, float(shifted[token_id] - normalizer), top)
