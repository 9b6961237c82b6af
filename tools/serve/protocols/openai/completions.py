"""`/v1/completions`: one prompt or several, each completed separately."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

from edgellm.device_runtime.api.generation_request import GenerationDefaults
from edgellm.device_runtime.api.llm import LLM, Step
from edgellm.device_runtime.sampling.logprobs import TokenLogprobs
from edgellm.tools.serve.engines.ask import EngineRequest
from edgellm.tools.serve.engines.events import Finished, Started
from edgellm.tools.serve.output.streams import EVENTS
from edgellm.tools.serve.output.usage import timing, together, usage
from edgellm.tools.serve.protocols.openai.logprobs import TokenPlaces, completion_logprobs
from edgellm.tools.serve.schemas.openai import CompletionRequest, StreamOptions

DEFAULT_TOKENS = 16  # OpenAI's


def asks_of(
    body: CompletionRequest, defaults: GenerationDefaults, lora: str | None = None
) -> list[EngineRequest]:
    """The engine requests of all prompts; raises as `CompletionRequest.form`.

    Args:
        body: the request.
        defaults: of the engine and the server.
        lora: name of the LoRA adapter.
    """
    sampling = body.sampling(defaults, body.logprobs, body.form())
    maximum = body.max_tokens or defaults.max_generate_length or DEFAULT_TOKENS
    of_prompt = body.logprobs if body.echo else None
    prompts = (p if isinstance(p, str) else tuple(p) for p in body.prompts())
    asks = (
        EngineRequest(
            prompt=prompt,
            sampling=sampling,
            max_tokens=maximum,
            stop=body.stops(),
            priority=body.priority or 0,
            prompt_logprobs=of_prompt,
            lora=lora,
        )
        for prompt in prompts
    )
    return [one for ask in asks for one in ask.times(body.n)]


@dataclass(slots=True, kw_only=True)
class _Choice:
    """One choice of a completion."""

    index: int
    places: TokenPlaces  # of the tokens that were sent
    prompt: str = ""  # at the start of the text
    text: str = ""
    begins: bool = False  # whether its first token starts a text
    num_sent: int = 0  # characters
    entries: tuple[TokenLogprobs, ...] = ()
    held: tuple[TokenLogprobs, ...] = ()  # not sent yet: bytes of a run that goes on
    ids: tuple[int, ...] = ()
    started: Started | None = None
    figures: Finished | None = None  # when it is complete

    def new(self) -> str:
        """Text that was not sent yet."""
        text, self.num_sent = self.text[self.num_sent :], len(self.text)
        return text


class CompletionWriter:
    """Writes text completions whose choices are generated concurrently."""

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
        self._of_one = body.n or 1
        self._wants_ids = bool(body.return_token_ids)
        self._hidden = llm.tokenizer.hidden_ids()
        prompts = [prompt for prompt in body.prompts() for _ in range(self._of_one)]
        self._choices = [
            _Choice(index=index, places=self._places()) for index in range(len(prompts))
        ]
        for choice, prompt in zip(self._choices, prompts, strict=True) if body.echo else ():
            text = prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)
            choice.prompt = choice.text = text
        self._now = self._choices[0]

    def switch(self, at: int) -> None:
        """See `Writer.switch`: the next events belong to choice `at`."""
        self._now = self._choices[at]

    def begin(self, started: Started) -> list[dict[str, Any]]:
        """The event of the prompt with its log-probabilities, if requested."""
        now = self._now
        now.started = started
        if not started.prompt_ids:
            return []
        now.places.begins = True
        return [self._event([self._shown(now.new(), (), now.places, None, started)])]

    def step(self, step: Step) -> list[dict[str, Any]]:
        """The event with the text of a step."""
        now = self._now
        entries = tuple(e for e in step.logprobs if e.token_id not in self._end_ids)
        if not now.ids:
            now.begins = step.begins
        now.places.begins = step.begins
        now.text += step.text
        now.entries += entries
        now.ids += step.token_ids
        now.held += entries
        if now.places.is_open([entry.token_id for entry in now.held]):
            entries = ()
        else:
            entries, now.held = now.held, ()
        if not step.text and not entries:
            return []
        return [self._event([self._shown(now.new(), entries, now.places, None)])]

    def end(self, figures: Finished) -> list[dict[str, Any]]:
        """The finish reason of a choice, and after the last choice the usage if requested."""
        now = self._now
        entries, now.held = now.held, ()
        shown = self._shown(now.new(), entries, now.places, figures.finish_reason)
        found = [self._event([shown])]
        now.figures = figures
        if self._options.include_usage and all(one.figures for one in self._choices):
            found.append({**self._event([]), **self._usage()})
        return found

    def whole(self, figures: Finished) -> dict[str, Any]:
        """The whole body."""
        self._now.figures = figures
        if not all(one.figures for one in self._choices):
            return {}
        return {**self._event([*map(self._completed, self._choices)]), **self._usage()}

    def _completed(self, choice: _Choice) -> dict[str, Any]:
        assert choice.figures is not None
        self._now, reason = choice, choice.figures.finish_reason
        places = self._places()  # from the first token
        places.begins = choice.begins or bool(choice.prompt)
        found = self._shown(choice.text, choice.entries, places, reason, choice.started)
        return {**found, **({"token_ids": choice.ids} if self._wants_ids else {})}

    def _places(self) -> TokenPlaces:
        return TokenPlaces(self._tokenizer, self._hidden)

    def _usage(self) -> dict[str, Any]:
        complete = [one.figures for one in self._choices if one.figures is not None]
        figures = together(complete, of_one=self._of_one)
        return {"usage": usage(figures), "metrics": timing(figures)}

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "choices": choices}

    def _shown(
        self,
        text: str,
        entries: tuple[TokenLogprobs, ...],
        places: TokenPlaces,
        reason: str | None,
        started: Started | None = None,
    ) -> dict[str, Any]:
        logprobs = self._logprobs(entries, places, started) if self._wants_logprobs else None
        return {
            "index": self._now.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
        }

    def _logprobs(
        self, entries: tuple[TokenLogprobs, ...], places: TokenPlaces, started: Started | None
    ) -> dict[str, Any]:
        """Log-probabilities of the output, after those of the prompt that `started` has."""
        if started is None or not started.prompt_ids:
            return completion_logprobs(entries, places)
        prompt, first = self._now.prompt, started.prompt_ids[0]
        read = completion_logprobs(started.prompt_logprobs, places, first, prompt)
        places.begin_output(prompt)
        found = completion_logprobs(entries, places)
        return {name: values + found[name] for name, values in read.items()}
