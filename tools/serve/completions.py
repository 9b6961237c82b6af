"""`/v1/completions`."""

from __future__ import annotations

import time
import uuid
from typing import Any

from edgellm.device_runtime.engine.llm import LLM, Step
from edgellm.device_runtime.sampling.logprobs import TokenLogprobs
from edgellm.tools.serve.engine import Ask
from edgellm.tools.serve.events import Finished
from edgellm.tools.serve.logprobs import completion_logprobs
from edgellm.tools.serve.schemas import CompletionRequest, StreamOptions
from edgellm.tools.serve.usage import timing, usage

DEFAULT_TOKENS = 16  # OpenAI's


def ask_of(body: CompletionRequest) -> Ask:
    """What the engine is asked."""
    return Ask(
        body.text(), body.sampling(body.logprobs), body.max_tokens or DEFAULT_TOKENS, body.stops()
    )


class CompletionWriter:
    """A text completion as it grows."""

    last = b"data: [DONE]\n\n"

    def __init__(self, body: CompletionRequest, llm: LLM, model: str) -> None:
        self._tokenizer, self._end_ids = llm.tokenizer, frozenset(llm.manifest.eos_token_ids)
        self._options = body.stream_options or StreamOptions()
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion",
            "created": int(time.time()), "model": model,
        }  # fmt: skip
        self._text = ""
        self._entries: tuple[TokenLogprobs, ...] = ()
        self._wants_logprobs = body.logprobs is not None

    def begin(self) -> list[dict[str, Any]]:
        """Nothing comes before the first token."""
        return []

    def step(self, step: Step) -> list[dict[str, Any]]:
        """One event with the text of a step."""
        entries = tuple(e for e in step.logprobs if e.token_id not in self._end_ids)
        offset, self._text = len(self._text), self._text + step.text
        self._entries += entries
        if not step.text and not entries:
            return []
        return [self._chunk(step.text, entries, offset, None)]

    def end(self, figures: Finished) -> list[dict[str, Any]]:
        """The reason why the text ends, and the usage if it was asked for."""
        found = [self._chunk("", (), len(self._text), figures.finish_reason)]
        if self._options.include_usage:
            found.append(
                {**self._head, "choices": [], "usage": usage(figures), "metrics": timing(figures)}
            )
        return found

    def whole(self, figures: Finished) -> dict[str, Any]:
        """The completion in one piece."""
        choice = self._chunk(self._text, self._entries, 0, figures.finish_reason)
        return {**choice, "usage": usage(figures), "metrics": timing(figures)}

    def _chunk(
        self, text: str, entries: tuple[TokenLogprobs, ...], offset: int, reason: str | None
    ) -> dict[str, Any]:
        logprobs = None
        if self._wants_logprobs:
            logprobs = completion_logprobs(entries, self._tokenizer, offset)
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "choices": [choice]}
