"""Sampling parameters: the one list of the sampling options of a request.

Request files, the server's protocols, the flags of `edgellm-chat` and the reference pages derive
their fields from `OPTIONS`. A new option is declared here, and used where it acts.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, Literal

from edgellm.core.errors import RequestError
from edgellm.device_runtime.validation import is_number, is_whole, require_kind

GREEDY_BELOW_TEMPERATURE = 1e-3
LARGEST_BIAS, MAX_BIASES, MAX_STOPS = 100, 1024, 1024
_LARGEST_REPETITION = 100.0  # the smallest is its inverse; logits stay finite
_MAX_GRAMMAR = 1 << 20  # characters
_HALF = re.compile("[\ud800-\udfff]")
_SEED_BITS = 32  # of random seeds, which every JSON parser reads exactly

# A grammar of the last kind describes the reasoning, too.
GuideKind = Literal[
    "json_object", "json_schema", "regex", "choice", "ebnf", "lark", "lark_with_thinking"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """The tags of reasoning before a guided output."""

    opening: str
    closing: str
    is_inside: bool  # whether the prompt opens the reasoning
    ids: tuple[tuple[str, int], ...] = ()  # of tags that are tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """Output in messages with channels (gpt-oss): a guided text is the message of the last one."""

    ids: tuple[tuple[str, int], ...] = ()  # of marks that are tokens


@dataclass(frozen=True, slots=True)
class Guide:
    """The constraint on an output, after its reasoning if the model reasons."""

    kind: GuideKind
    text: str = ""  # the schema or the list of choices as JSON, the expression, the grammar
    thinking: Thinking | Channels | None = None  # set by the engine; None: no reasoning

    def __post_init__(self) -> None:
        """Reject huge texts and half surrogate pairs; raises `RequestError`."""
        if len(self.text) > _MAX_GRAMMAR:
            raise RequestError(f"the guide has more than {_MAX_GRAMMAR} characters")
        if half := _HALF.search(self.text):
            raise RequestError(
                f"the {self.kind} of the answer is faulty: character {half.start()} is half of a "
                "surrogate pair"
            )

    @classmethod
    def of_schema(cls, schema: Any) -> Guide:
        """An output in JSON of a schema, which is parsed JSON."""
        return cls("json_schema", json.dumps(schema))


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of `SamplingParams`."""

    name: str
    kind: type[bool | int | float]
    default: bool | int | float | None  # None: random
    doc: str
    bounds: Mapping[str, float]  # by `ge`, `gt` and `le`, as msgspec and pydantic name them

    def check(self, value: Any) -> None:
        """Raise `RequestError` for a value of another type, or out of range."""
        if (value, self.default) == (None, None):
            return
        if self.kind is bool:
            require_kind(self.name, value, bool, "True or False")
        elif self.kind is int and not is_whole(value):
            raise RequestError(f"{self.name} {value!r} is not a whole number")
        elif not is_number(value):
            raise RequestError(f"{self.name} {value!r} is not a number")
        bounds = self.bounds
        if not (
            math.isfinite(value)
            and bounds.get("ge", value) <= value <= bounds.get("le", value)
            and bounds.get("gt", -math.inf) < value
        ):
            raise RequestError(f"{self.name} {value} is out of range")


def _option(default: float, doc: str, **bounds: float) -> Any:
    return field(default=default, metadata={"doc": doc, "bounds": bounds, "kind": type(default)})


def _seed() -> Any:
    about = {"doc": "Makes sampled outputs repeatable.", "bounds": {"ge": 0, "le": 2**63 - 1}}
    return field(default=None, metadata={**about, "kind": int})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters; the defaults are those of request files.

    They are complete: a field that is left out has the default here, not the model's, see
    `GenerationDefaults`.
    """

    temperature: float = _option(1.0, "Divides the logits; 0 takes the most likely token.", ge=0)
    top_p: float = _option(
        0.8, "Keeps the most likely tokens up to this probability in total.", gt=0, le=1
    )
    top_k: int = _option(50, "Keeps this many of the most likely tokens; 0 keeps all.", ge=0)
    seed: int | None = _seed()  # None: random, see `seeded`
    _: KW_ONLY
    min_p: float = _option(
        0.0, "Drops tokens below this share of the most likely token's probability.", ge=0, le=1
    )
    repetition_penalty: float = _option(
        1.0,
        "Divides logits above 0, and multiplies others, of tokens in the prompt or output.",
        ge=1 / _LARGEST_REPETITION,
        le=_LARGEST_REPETITION,
    )
    presence_penalty: float = _option(
        0.0, "Is subtracted from the logits of tokens in the output.", ge=-2, le=2
    )
    frequency_penalty: float = _option(
        0.0, "Is subtracted from a token's logit for each occurrence in the output.", ge=-2, le=2
    )
    min_tokens: int = _option(0, "Minimum tokens before an end token.", ge=0)
    ignore_eos: bool = _option(False, "The model's end tokens do not end the output.")
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # by token id
    stop_token_ids: tuple[int, ...] = ()  # further end tokens, without text
    bad_words: tuple[str, ...] = ()  # texts that the output does not contain
    guide: Guide | None = None  # the constraint on the output; None: free text
    num_logprobs: int | None = None  # number of likeliest tokens to record; None: no recording

    def __post_init__(self) -> None:
        """Reject invalid values; raises `RequestError`."""
        for option in OPTIONS.values():
            option.check(getattr(self, option.name))
        self._check_biases()
        if unknown := [each for each in self.stop_token_ids if not is_whole(each)]:
            raise RequestError(f"stop_token_ids: {unknown[0]!r} is not a token id")
        if len(self.stop_token_ids) > MAX_STOPS:
            raise RequestError(f"stop_token_ids has more than {MAX_STOPS} tokens")
        if min(self.stop_token_ids, default=0) < 0:
            raise RequestError(f"stop_token_ids names token {min(self.stop_token_ids)}")
        self._check_bad_words()
        require_kind("guide", self.guide, (Guide, type(None)), "a Guide")
        if self.ignore_eos and self.guide is not None:
            raise RequestError("ignore_eos: guided decoding ends where its form ends")
        if self.num_logprobs is not None:
            if not is_whole(self.num_logprobs):
                raise RequestError(f"num_logprobs {self.num_logprobs!r} is not a whole number")
            if self.num_logprobs < 0:
                raise RequestError(f"num_logprobs {self.num_logprobs} is out of range")

    def _check_biases(self) -> None:
        require_kind("logit_bias", self.logit_bias, Mapping, "an object of biases by token id")
        if len(self.logit_bias) > MAX_BIASES:
            raise RequestError(
                f"logit_bias names {len(self.logit_bias)} tokens, at most {MAX_BIASES} may"
            )
        for token_id, bias in self.logit_bias.items():
            if not is_whole(token_id) or not is_number(bias):
                raise RequestError(f"logit_bias {token_id!r}: {bias!r} is not a bias of a token id")
            if token_id < 0 or not -LARGEST_BIAS <= bias <= LARGEST_BIAS:
                raise RequestError(f"logit_bias {bias} of token {token_id} is out of range")

    def _check_bad_words(self) -> None:
        if len(self.bad_words) > MAX_STOPS:
            raise RequestError(f"bad_words has more than {MAX_STOPS} texts")
        for word in self.bad_words:
            if not isinstance(word, str) or not word.strip():
                raise RequestError(f"bad_words: {word!r:.40} is not a word")

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

    def seeded(self) -> SamplingParams:
        """The same with a seed: a random one unless it has one, or samples nothing."""
        if self.seed is not None or self.is_greedy:
            return self
        return replace(self, seed=secrets.randbits(_SEED_BITS))

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW_TEMPERATURE or self.top_k == 1


def _options() -> Iterator[Option]:
    for one in fields(SamplingParams):
        default: Any = one.default
        if one.metadata:
            yield Option(name=one.name, default=default, **one.metadata)


OPTIONS = {one.name: one for one in _options()}
