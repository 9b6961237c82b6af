"""Sampling: from logits to a distribution, and a draw from it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgellm.core.errors import (
    EdgeLLMError,
)
from edgellm.device_runtime.arrays import (
    F32,
    I64,
)
from edgellm.device_runtime.networks.decoder import PassResult
from edgellm.device_runtime.sampling.bad_words import BadWords
from edgellm.device_runtime.sampling.guidance import Constraint
from edgellm.device_runtime.sampling.logprobs import TokenLogprobs, token_logprobs
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.device_runtime.sampling.penalties import Penalties, PenaltyRules


def processed_distribution(logits: F32, params: SamplingParams) -> tuple[I64, NDArray[np.float64]]:
    """The distribution after temperature, top-k, top-p and min-p (transformers' order).

    Args:
        logits: float32 [V].
        params: not greedy.

    Returns:
        Ids of the remaining tokens, ascending, and their probabilities, which sum to 1.
    """
    token_ids = np.arange(len(logits))
    if 0 < params.top_k < len(logits):
        kth = np.partition(logits, -params.top_k)[-params.top_k]
        token_ids = np.flatnonzero(logits >= kth)
    token_ids = token_ids[logits[token_ids] > -np.inf]  # never draw disallowed tokens
    scaled = logits[token_ids].astype(np.float64) / params.temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    if params.top_p < 1:
        kept = np.sort(_nucleus(probabilities, params.top_p))
        token_ids, probabilities = token_ids[kept], probabilities[kept]
        probabilities /= probabilities.sum()
    if params.min_p > 0:
        kept = probabilities >= params.min_p * probabilities.max()
        token_ids, probabilities = token_ids[kept], probabilities[kept]
        probabilities /= probabilities.sum()
    return token_ids, probabilities


def _nucleus(probabilities: NDArray[np.float64], top_p: float) -> I64:
    """Indices of the likeliest tokens: as few as have a total probability of `top_p`."""
    # Tokens below this have a total below 1 - top_p, so the nucleus ends before them, and not the
    # whole vocabulary is sorted.
    likely = np.flatnonzero(probabilities >= (1 - top_p) / (2 * len(probabilities)))
    order = likely[np.argsort(-probabilities[likely], kind="stable")]
    before = np.cumsum(probabilities[order]) - probabilities[order]
    return order[: max(int(np.count_nonzero(before < top_p)), 1)]


class Sampler:
    """Chooses the tokens of one request in order; reproducible by its seed.

    Chosen tokens are part of the text that penalties use. Exact acceptance chooses every token at
    its node, so that a node's context is the path of its ancestors.
    """

    def __init__(
        self,
        *,
        params: SamplingParams,
        prompt: Sequence[int] = (),
        constraint: Constraint | None = None,
        eos_token_ids: Iterable[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        """Start an output.

        Args:
            params: of the request.
            prompt: its token ids, for the repetition penalty.
            constraint: of guided decoding.
            eos_token_ids: the model's end tokens.
            bad_words: token ids of the bad words.
        """
        self.params = params
        self.ends = params.ends(eos_token_ids)
        self._constraint = constraint
        rules = PenaltyRules.of(params)
        self._penalties = None if rules.do_nothing else Penalties(rules, prompt)
        self._bad_words = BadWords(bad_words) if bad_words else None
        rules_of_text = (self._penalties, constraint, self._bad_words)
        has_rules = any(each is not None for each in rules_of_text)
        # Whether logits depend on the text so far.
        self._adjusts = has_rules or params.min_tokens > 0
        # Whether a position's largest logits and random numbers suffice, without recording.
        self.needs_picks_only = not self._adjusts and params.num_logprobs is None
        # Whether more than the argmax is needed.
        self.needs_logits = not (params.is_greedy and self.needs_picks_only)
        self._num_taken = 0
        self.logprobs: list[TokenLogprobs] = []  # of the output tokens, if requested
        self._random = np.random.Generator(np.random.Philox(params.seed))

    def predict(self, count: int) -> NDArray[np.float64]:
        """Random numbers of the next draws, without consuming them."""
        return copy.deepcopy(self._random).random(count)

    def spend(self, count: int) -> None:
        """Consume the random numbers of `count` draws made elsewhere."""
        self._random.random(count)

    def record(self, logits: F32, token_id: int) -> None:
        """Record the log-probabilities of a taken token, from logits float32 [V]."""
        if self.params.num_logprobs is not None:
            self.logprobs.append(token_logprobs(logits, token_id, self.params.num_logprobs))

    def choose(self, logits: F32, argmax: int) -> int:
        """The next token from logits float32 [V] and their argmax."""
        if not self._adjusts:
            return self._pick(logits, argmax)
        logits = self.adjusted(logits)
        token_id = self._pick(logits, int(logits.argmax()))
        self.take([token_id])
        return token_id

    def take(self, token_ids: Sequence[int]) -> None:
        """Add tokens to the text."""
        self._num_taken += len(token_ids)
        if self._penalties is not None:
            self._penalties.add(token_ids)
        if self._constraint is not None:
            self._constraint.take(token_ids)
        if self._bad_words is not None:
            self._bad_words.take(token_ids)

    def adjusted(self, logits: F32, path: Sequence[int] = ()) -> F32:
        """Logits [V] with biases, penalties and the guide's mask, after the text and `path`."""
        if self._penalties is not None:
            logits = self._penalties.apply(logits, path)
        if self._constraint is not None:
            logits = self._constraint.apply(logits, path)
        if self._bad_words is not None:
            logits = self._bad_words.apply(logits, path)
        if self._num_taken + len(path) >= self.params.min_tokens:
            return logits
        longer = logits.copy()
        longer[[token_id for token_id in self.ends if token_id < len(longer)]] = -np.inf
        # A completed guide may allow only end tokens.
        return longer if longer.max() > -np.inf else logits

    def _pick(self, logits: F32, argmax: int) -> int:
        if self.params.is_greedy:
            return argmax
        token_ids, probabilities = processed_distribution(logits, self.params)
        edges = np.cumsum(probabilities)
        drawn = np.searchsorted(edges, self._random.random() * edges[-1], side="right")
        return int(token_ids[min(drawn, len(token_ids) - 1)])


def draw(result: PassResult, row: int, sampler: Sampler) -> int:
    """Sample the next token of the output from a position of a pass.

    Raises:
        EdgeLLMError: a logit is not finite.
    """
    argmax = int(result.token_ids[row])
    highest = result.highest_of(row)
    if not math.isfinite(highest):
        raise EdgeLLMError(
            f"the engine computed {highest}",
            hint="build the engine again; if it persists, the model overflows this precision",
        )
    if not sampler.needs_logits:  # a device then keeps them
        return argmax
    logits = result.logits[row]
    token_id = sampler.choose(logits, argmax)
    sampler.record(logits, token_id)
    return token_id
