"""Guided decoding: JSON, a schema, a regular expression, a grammar, or a choice of texts.

llguidance computes the mask of allowed tokens. The sampler applies it to every token that it
chooses, and exact acceptance chooses at every node of a path. So speculation is lossless here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgellm.core.commands.extras import install
from edgellm.core.errors import (
    EdgeLLMError,
    RequestError,
)
from edgellm.device_runtime.arrays import (
    F32,
    Bool,
)
from edgellm.device_runtime.sampling.ascii_regex import with_ascii_classes, with_ascii_lark
from edgellm.device_runtime.sampling.closed_schema import closed
from edgellm.device_runtime.sampling.free_text import after_thinking
from edgellm.device_runtime.sampling.params import Guide

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# As json.dumps writes. With free white space a small model might write nothing else.
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_DEAD_END = "NoExtensionBias"  # what llguidance calls a place from which no text goes on
# Forced text would be tokenized as in a prompt: text of a special token would become that token,
# which is no text of the output.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'


class Guidance:
    """Guided decoding of one model; the tokenizer is loaded on first use."""

    def __init__(self, folder: Path, vocab_size: int, end_ids: Sequence[int]) -> None:
        """Store the arguments.

        Args:
            folder: of the engine, with tokenizer.json.
            vocab_size: V of the logits.
            end_ids: end tokens, allowed where the output may end.
        """
        self._path, self._vocab_size = folder / "tokenizer.json", vocab_size
        self._end_ids = sorted(end_ids)
        self._tokenizer: LLTokenizer | None = None

    def start(self, guide: Guide) -> Constraint:
        """A constraint for one request.

        Raises:
            EdgeLLMError: llguidance is missing, or does not support the tokenizer.
            RequestError: the guide is invalid; the message has the place.
        """
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError:
            raise EdgeLLMError("guided decoding needs llguidance", hint=install("guide")) from None
        if self._tokenizer is None:
            try:
                self._tokenizer = LLTokenizer(
                    str(self._path), n_vocab=self._vocab_size, eos_token=self._end_ids
                )
            except ValueError as error:
                raise EdgeLLMError(
                    f"guided decoding with this tokenizer is not possible: {error}"
                ) from None
        grammar = _unforced(_grammar(guide))
        if guide.thinking is not None and guide.kind != "lark_with_thinking":
            grammar = after_thinking(grammar, guide.thinking)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            name = "grammar" if guide.kind.startswith("lark") else guide.kind
            raise RequestError(f"the {name} of the answer is faulty: {_fault(matcher)}")
        return Constraint(matcher)


def _grammar(guide: Guide) -> str:
    from llguidance import LLMatcher, grammar_from

    if guide.kind == "json_object" or guide.kind == "json_schema":
        text = guide.text if guide.kind == "json_schema" else '{"type": "object"}'
        try:
            schema = closed(json.loads(text))
            schema = json.dumps({} if schema is True else schema)  # llguidance takes objects
            return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_FORM)  # type: ignore[arg-type]  # a TypedDict
        except ValueError as error:
            raise RequestError(f"the schema of the answer is not JSON: {error}") from None
        except RecursionError:
            raise RequestError("the schema of the answer is nested too deeply") from None
    if guide.kind == "regex":
        return LLMatcher.grammar_from_regex(with_ascii_classes(guide.text))
    try:
        if guide.kind == "choice":  # one terminal: as many rules exceed a parser's row at 2,000
            return LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {_alternatives(guide.text)}")
        kind = "ebnf" if guide.kind == "ebnf" else "lark"
        grammar = grammar_from(kind, guide.text)
    except (ValueError, TypeError) as error:
        raise RequestError(f"the {guide.kind} of the answer is faulty: {error}") from None
    return with_ascii_lark(grammar)


def _unforced(grammar: str) -> str:
    """A grammar in Lark, under which the model chooses the tokens of a text."""
    if grammar.startswith('{"grammars"'):  # as llguidance writes expressions and schemas
        found = json.loads(grammar)["grammars"][0]
        grammar = found["lark_grammar"] or f"start: %json {json.dumps(found['json_schema'])}"
    return grammar + _NO_FORCING


def _alternatives(choices: str) -> str:
    return " | ".join(map(json.dumps, json.loads(choices)))


class Constraint:
    """State of the guide in one output: computes the allowed tokens."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def take(self, token_ids: Sequence[int]) -> None:
        """Add tokens to the output.

        Raises:
            RequestError: a token is not allowed, or the guide is too complex to continue.
        """
        if not self._matcher.is_stopped() and not self._matcher.consume_tokens(list(token_ids)):
            raise RequestError(f"guiding the answer failed: {_fault(self._matcher)}")

    def apply(self, logits: F32, path: Sequence[int] = ()) -> F32:
        """A copy of logits [V], with -inf for tokens not allowed after the output and `path`."""
        return np.where(self._allowed(path), logits, np.float32(-np.inf))

    def _allowed(self, path: Sequence[int]) -> Bool:
        matcher = self._matcher
        if path:
            matcher = matcher.deep_copy()
            matcher.consume_tokens(list(path))
        allowed = np.frombuffer(matcher.compute_logit_bias(), np.uint8) > 0
        # Where no text of the form goes on, llguidance fails and allows an end.
        if matcher.is_error() or not allowed.any():
            raise RequestError(f"guiding the answer failed: {_fault(matcher)}")
        return allowed


def _fault(matcher: LLMatcher) -> str:
    """One line of llguidance's error; further lines are the parser's state."""
    first, *more = matcher.get_error().splitlines() or [_DEAD_END]
    if first == _DEAD_END:
        return "no text of this form goes on from here"
    reason = next((line for line in more if line.startswith("error: ")), "")
    return f"{first} {reason.removeprefix('error: ')}".strip()
