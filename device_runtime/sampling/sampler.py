"""Sampling: from logits to a distribution, and a draw from it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgellm.core.errors import (
    EdgeLLMError,
    RequestError,
)
from edgellm.device_runtime.arrays import (
    F32,
    I64,
)
from edgellm.device_runtime.networks.decoder import PassResult
from edgellm.device_runtime.sampling.guidance import Constraint, Guide
from edgellm.device_runtime.sampling.logprobs import TokenLogprobs, token_logprobs
from edgellm.device_runtime.sampling.penalties import Penalties, PenaltyRules
from edgellm.device_runtime.validation import is_number, is_whole, require_kind

GREEDY_BELOW_TEMPERATURE = 1e-3
LARGEST_BIAS, MAX_BIASES, MAX_STOPS = 100, 1024, 1024
_WHOLE = "top_k", "seed", "num_logprobs", "min_tokens"
_NUMBERS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
)  # fmt: skip
LARGEST_REPETITION = 100.0  # the smallest is its inverse; logits stay finite


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters; the defaults are those of request files."""

    temperature: float = 1.0
    top_p: float = 0.8
    top_k: int = 50  # 0 keeps all
    seed: int = 42
    _: KW_ONLY
    min_p: float = 0.0  # relative to the likeliest token; 0 keeps all
    repetition_penalty: float = 1.0  # see `PenaltyRules`
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    guide: Guide | None = None  # the constraint on the output; None: free text
    num_logprobs: int | None = None  # number of likeliest tokens to record; None: no recording
    min_tokens: int = 0  # minimum tokens before the end
    ignore_eos: bool = False  # the model's end tokens do not end the output
    stop_token_ids: tuple[int, ...] = ()  # further end tokens, without text

    def __post_init__(self) -> None:
        """Reject invalid values; raises `RequestError`."""
        self._check_kinds()
        for name, allowed in (
            ("temperature", 0 <= self.temperature < math.inf),
            ("top_p", 0 < self.top_p <= 1),
            ("top_k", self.top_k >= 0),
            ("seed", 0 <= self.seed < 2**63),
            ("min_p", 0 <= self.min_p <= 1),
            (
                "repetition_penalty",
                1 / LARGEST_REPETITION <= self.repetition_penalty <= LARGEST_REPETITION,
            ),
            ("presence_penalty", -2 <= self.presence_penalty <= 2),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2),
            ("num_logprobs", self.num_logprobs is None or self.num_logprobs >= 0),
            ("min_tokens", self.min_tokens >= 0),
        ):
            if not allowed:
                raise RequestError(f"{name} {getattr(self, name)} is out of range")
        if len(self.logit_bias) > MAX_BIASES:
            raise RequestError(f"logit_bias names {len(self.logit_bias)} tokens, at most 1024 may")
        for token_id, bias in self.logit_bias.items():
            if token_id < 0 or not -LARGEST_BIAS <= bias <= LARGEST_BIAS:
                raise RequestError(f"logit_bias {bias} of token {token_id} is out of range")
        if len(self.stop_token_ids) > MAX_STOPS:
            raise RequestError(f"stop_token_ids has more than {MAX_STOPS} tokens")
        if min(self.stop_token_ids, default=0) < 0:
            raise RequestError(f"stop_token_ids names token {min(self.stop_token_ids)}")
        if self.ignore_eos and self.guide is not None:
            raise RequestError("ignore_eos: guided decoding ends where its form ends")

    def require_fit(self, vocab_size: int, max_tokens: int) -> None:
        """Raise `RequestError` for unknown token ids, or more tokens than are allowed."""
        for name, token_ids in (
            ("logit_bias", self.logit_bias),
            ("stop_token_ids", self.stop_token_ids),
        ):
            if unknown := [token_id for token_id in token_ids if token_id >= vocab_size]:
                raise RequestError(
                    f"{name} names token {unknown[0]}, the model has {vocab_size} tokens"
                )
        if self.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is more than the output limit {max_tokens}"
            )

    def ends(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """The tokens that end an output, given the model's end tokens."""
        own = () if self.ignore_eos else eos_token_ids
        return frozenset(self.stop_token_ids).union(own)

    def _check_kinds(self) -> None:
        """Check types; raises `RequestError`."""
        for name in _WHOLE:
            value = getattr(self, name)
            if not is_whole(value) and (value is not None or name != "num_logprobs"):
                raise RequestError(f"{name} {value!r} is not a whole number")
        for name in _NUMBERS:
            if not is_number(getattr(self, name)):
                raise RequestError(f"{name} {getattr(self, name)!r} is not a number")
        require_kind("logit_bias", self.logit_bias, Mapping, "an object of biases by token id")
        for token_id, bias in self.logit_bias.items():
            if not is_whole(token_id) or not is_number(bias):
                raise RequestError(f"logit_bias {token_id!r}: {bias!r} is not a bias of a token id")
        require_kind("ignore_eos", self.ignore_eos, bool, "True or False")
        if unknown := [each for each in self.stop_token_ids if not is_whole(each)]:
            raise RequestError(f"stop_token_ids: {unknown[0]!r} is not a token id")
        require_kind("guide", self.guide, (Guide, type(None)), "a Guide")

    @property
    def rules(self) -> PenaltyRules:
        """Rules that change the logits."""
        return PenaltyRules(
            self.logit_bias, self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        )

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW_TEMPERATURE or self.top_k == 1


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
        params: SamplingParams,
        prompt: Sequence[int] = (),
        constraint: Constraint | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        """Start an output.

        Args:
            params: of the request.
            prompt: its token ids, for the repetition penalty.
            constraint: of guided decoding.
            eos_token_ids: the model's end tokens.
        """
        self.params = params
        self.ends = params.ends(eos_token_ids)
        self._constraint = constraint
        self._penalties = None if params.rules.do_nothing else Penalties(params.rules, prompt)
        has_rules = self._penalties is not None or constraint is not None
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

    def adjusted(self, logits: F32, path: Sequence[int] = ()) -> F32:
        """Logits [V] with biases, penalties and the guide's mask, after the text and `path`."""
        if self._penalties is not None:
            logits = self._penalties.apply(logits, path)
        if self._constraint is not None:
            logits = self._constraint.apply(logits, path)
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
