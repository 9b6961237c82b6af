"""`/v1/completions`: one text or several, each continued for itself."""

from __future__ import annotations

import time
import uuid
from typing import Any

from edgellm.device_runtime.engine.llm import LLM, Step
from edgellm.device_runtime.sampling.logprobs import TokenLogprobs
from edgellm.tools.serve.asks import Ask
from edgellm.tools.serve.events import Finished, Started
from edgellm.tools.serve.logprobs import completion_logprobs
from edgellm.tools.serve.schemas import CompletionRequest, StreamOptions
from edgellm.tools.serve.streams import EVENTS
from edgellm.tools.serve.usage import timing, together, usage

DEFAULT_TOKENS = 16  # OpenAI's


def asks_of(body: CompletionRequest) -> list[Ask]:
    """What the engine is asked, prompt by prompt; raises `ApiError` for several forms."""
    sampling = body.sampling(body.logprobs, body.form())
    most = body.max_tokens or DEFAULT_TOKENS
    of_prompt = body.logprobs if body.echo else None
    prompts = (p if isinstance(p, str) else tuple(p) for p in body.prompts())
    return [
        Ask(
            prompt,
            sampling,
            most,
            body.stops(),
            priority=body.priority or 0,
            prompt_logprobs=of_prompt,
        )
        for prompt in prompts
    ]


class CompletionWriter:
    """Text completions as they grow, one prompt after the other."""

    framing, last = EVENTS, b"data: [DONE]\n\n"

    def __init__(self, body: CompletionRequest, llm: LLM, model: str) -> None:
        self._tokenizer = llm.tokenizer
        self._end_ids = body.ends(llm.manifest.eos_token_ids)
        self._options = body.stream_options or StreamOptions()
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._wants_logprobs = body.logprobs is not None
        self._prompts = body.prompts()
        self._echo = bool(body.echo)
        self._wants_ids = bool(body.return_token_ids)
        self._choices: list[dict[str, Any]] = []
        self._figures: list[Finished] = []
        self._begin()

    def begin(self, started: Started) -> list[dict[str, Any]]:
        """The prompt with its log-probabilities, if they are wanted."""
        self._started = started
        if not started.prompt_ids:
            return []
        return [self._event([self._choice(self._new(), (), 0, None, started)])]

    def step(self, step: Step) -> list[dict[str, Any]]:
        """One event with the text of a step."""
        entries = tuple(e for e in step.logprobs if e.token_id not in self._end_ids)
        offset, self._text = len(self._text), self._text + self._gap(step) + step.text
        self._entries += entries
        self._ids += step.token_ids
        if not step.text and not entries:
            return []
        return [self._event([self._choice(self._new(), entries, offset, None)])]

    def end(self, figures: Finished) -> list[dict[str, Any]]:
        """The reason why a text ends, and after the last one the usage if it was asked for."""
        last = self._choice(self._new(), (), len(self._text), figures.finish_reason)
        found = [self._event([last])]
        self._next(figures)
        if self._options.include_usage and len(self._figures) == len(self._prompts):
            found.append({**self._event([]), **self._usage()})
        return found

    def whole(self, figures: Finished) -> dict[str, Any]:
        """The completions in one piece."""
        choice = self._choice(self._text, self._entries, 0, figures.finish_reason, self._started)
        self._choices.append({**choice, **({"token_ids": self._ids} if self._wants_ids else {})})
        self._next(figures)
        return {**self._event(self._choices), **self._usage()}

    def _begin(self) -> None:
        """The text of the next choice, with what was not told of it yet."""
        self._text, self._told = "", 0
        self._entries: tuple[TokenLogprobs, ...] = ()
        self._ids: tuple[int, ...] = ()
        self._echoed = self._echo  # and nothing behind it yet
        if self._echo:
            prompt = self._prompts[len(self._figures)]
            self._text = prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _gap(self, step: Step) -> str:
        if not self._echoed or not step.text:
            return ""
        prompt, self._echoed = self._prompts[len(self._figures)], False
        return self._tokenizer.gap(prompt, step.token_ids)

    def _next(self, figures: Finished) -> None:
        self._figures.append(figures)
        if len(self._figures) < len(self._prompts):
            self._begin()

    def _new(self) -> str:
        text, self._told = self._text[self._told :], len(self._text)
        return text

    def _usage(self) -> dict[str, Any]:
        figures = together(self._figures)
        return {"usage": usage(figures), "metrics": timing(figures)}

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "choices": choices}

    def _choice(
        self,
        text: str,
        entries: tuple[TokenLogprobs, ...],
        offset: int,
        reason: str | None,
        started: Started | None = None,
    ) -> dict[str, Any]:
        logprobs = None
        if self._wants_logprobs:
            first = started.prompt_ids[0] if started is not None and started.prompt_ids else None
            read = started.prompt_logprobs if started is not None else ()
            logprobs = completion_logprobs((*read, *entries), self._tokenizer, offset, first)
        return {
            "index": len(self._figures),
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
