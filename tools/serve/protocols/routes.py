"""Routes of the Anthropic, Responses and Ollama protocols."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from edgellm.core.graph_roles import PASS
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.tools.serve.engines.models import device_of
from edgellm.tools.serve.http.errors import MESSAGES, RESPONSES
from edgellm.tools.serve.output.chat_output import ChatOutput
from edgellm.tools.serve.output.streams import Writer
from edgellm.tools.serve.protocols import ollama_models
from edgellm.tools.serve.protocols.anthropic.messages import CountRequest, MessagesRequest
from edgellm.tools.serve.protocols.anthropic.writer import MessagesWriter
from edgellm.tools.serve.protocols.ollama import (
    LATEST,
    OllamaChat,
    OllamaGenerate,
    OllamaWriter,
    StepLogprobs,
)
from edgellm.tools.serve.protocols.ollama_models import EmbedWriter, OllamaEmbed, OllamaEmbeddings
from edgellm.tools.serve.protocols.openai import chat, completions
from edgellm.tools.serve.protocols.openai.responses import ResponsesRequest
from edgellm.tools.serve.protocols.openai.responses_writer import ResponsesWriter
from edgellm.tools.serve.protocols.openai.tokenize import count_of
from edgellm.tools.serve.routing.engine_pool import EnginePool
from edgellm.tools.serve.routing.handler import EngineHandler
from edgellm.tools.serve.schemas.history import ignored_fields
from edgellm.tools.serve.schemas.openai import ChatRequest
from edgellm.tools.serve.schemas.sampling import NEUTRAL


def add_protocols(app: FastAPI, engines: EnginePool) -> None:
    """Add Anthropic's, OpenAI's Responses and Ollama's routes."""
    _add_messages(app, engines)
    _add_responses(app, engines)
    _add_ollama(app, engines)
    _add_ollama_embeddings(app, engines)
    _add_ollama_models(app, engines)


_Protocol = MessagesRequest | ResponsesRequest | OllamaChat | OllamaGenerate


class _Conversation:
    """A chat request of another protocol, and its engine."""

    def __init__(self, served: EngineHandler, body: ChatRequest, history: Sequence[str]) -> None:
        self._served, self._body, self._history = served, body, history
        self.llm, self.model = served.llm, served.name

    @classmethod
    async def of(
        cls, engines: EnginePool, given: _Protocol, request: Request, keep_s: float | None = None
    ) -> _Conversation:
        """Leases the engine that the request names; raises as `EnginePool.of`."""
        body = given.as_chat()
        return cls(await engines.of(body.model, request, keep_s), body, ignored_fields(given))

    async def output(self) -> ChatOutput:
        """Create the engine request and its output parser; raises as `chat.ask_of`."""
        served, body = self._served, self._body
        self._ask = await chat.ask_of(body, served.llm, served.settings.images, served.lora)
        end = await chat.prompt_end(self._ask, body, served.llm)
        return ChatOutput(body, served.llm, prompt_end=end)

    @property
    def logprobs(self) -> StepLogprobs:
        """The log-probabilities of the output's tokens."""
        return StepLogprobs.of(self._body, self.llm)

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of the request, after `output`."""
        return self._ask.sampling

    async def respond(
        self, request: Request, writer: Writer, ignored: Sequence[str] = ()
    ) -> Response:
        """Queues the request and responds."""
        names = [*self._body.ignored(self._served.llm.tokenizer), *ignored]
        streams = self._body.streams()
        return await self._served.respond(
            request, [self._ask], writer, streams=streams, ignored=names, history=self._history
        )


def _add_messages(app: FastAPI, engines: EnginePool) -> None:
    @app.post(MESSAGES)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Respond to a conversation, in Anthropic's form."""
        asked = await _Conversation.of(engines, body, request)
        writer = MessagesWriter(await asked.output(), asked.model)
        return await asked.respond(request, writer, body.ignored())

    @app.post(f"{MESSAGES}/count_tokens")
    async def count_tokens(body: CountRequest, request: Request) -> JSONResponse:
        """Count the tokens of a conversation."""
        given = ChatRequest.model_validate(body.conversation())
        served = await engines.of(given.model, request)
        ask = await chat.ask_of(given, served.llm, engines.settings.images)
        return JSONResponse({"input_tokens": await count_of(ask, served.llm)})


def _add_responses(app: FastAPI, engines: EnginePool) -> None:
    @app.post(RESPONSES)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Respond to a conversation, in the form of OpenAI's Responses."""
        asked = await _Conversation.of(engines, body, request)
        answer = await asked.output()
        writer = ResponsesWriter(
            body=body, answer=answer, llm=asked.llm, model=asked.model, sampling=asked.sampling
        )
        return await asked.respond(request, writer, body.ignored())


def _add_ollama(app: FastAPI, engines: EnginePool) -> None:
    async def loaded(body: OllamaChat | OllamaGenerate, request: Request) -> Response:
        """Load the model, or unload it."""
        name, chats = body.model.removesuffix(LATEST), isinstance(body, OllamaChat)
        if body.keep_s == 0:
            await engines.unload(name)
            return JSONResponse(ollama_models.loaded(body.model, "unload", chats=chats))
        served = await engines.of(name, request, body.keep_s)
        found = ollama_models.loaded(body.model, "load", chats=chats)
        return JSONResponse(found, headers=served.ignored_header(body.ignored()))

    async def talked(body: OllamaChat | OllamaGenerate, request: Request) -> Response:
        asked = await _Conversation.of(engines, body, request, body.keep_s)
        writer = OllamaWriter(
            answer=await asked.output(),
            model=asked.model,
            logprobs=asked.logprobs,
            chats=isinstance(body, OllamaChat),
        )
        return await asked.respond(request, writer, body.ignored())

    @app.post("/api/chat")
    async def ollama_chat(body: OllamaChat, request: Request) -> Response:
        """Respond to a conversation, in Ollama's form."""
        if body.only_loads:
            return await loaded(body, request)
        return await talked(body, request)

    @app.post("/api/generate")
    async def ollama_generate(body: OllamaGenerate, request: Request) -> Response:
        """Respond to one message, or complete a raw prompt, in Ollama's form."""
        if body.only_loads:
            return await loaded(body, request)
        if not body.raw:
            return await talked(body, request)
        given = body.as_completion()
        served = await engines.of(given.model, request, body.keep_s)
        asks = completions.asks_of(given, served.llm.defaults, served.lora)
        asks = [replace(ask, max_tokens=given.max_tokens) for ask in asks]
        logprobs = StepLogprobs.of(given, served.llm)
        writer = OllamaWriter(answer=None, model=served.name, logprobs=logprobs, chats=False)
        streams, ignored = body.stream, body.ignored()
        return await served.respond(request, asks, writer, streams=streams, ignored=ignored)


def _add_ollama_embeddings(app: FastAPI, engines: EnginePool) -> None:
    async def embedded(body: OllamaEmbed | OllamaEmbeddings, request: Request) -> Response:
        name = body.model.removesuffix(LATEST)
        if body.keep_s == 0 and not body.texts():
            await engines.unload(name)
            return JSONResponse(ollama_models.without_texts(body))
        served = await engines.of(name, request, body.keep_s)
        if not (asks := body.asks(served.lora)):
            return JSONResponse(ollama_models.without_texts(body))
        writer = EmbedWriter(body, body.model)
        ignored = body.ignored()
        return await served.respond(request, asks, writer, streams=False, ignored=ignored)

    @app.post("/api/embed")
    async def ollama_embed(body: OllamaEmbed, request: Request) -> Response:
        """Embed texts, in Ollama's form."""
        return await embedded(body, request)

    @app.post("/api/embeddings")
    async def ollama_embeddings(body: OllamaEmbeddings, request: Request) -> Response:
        """Embed one text, in Ollama's older form."""
        return await embedded(body, request)


def _add_ollama_models(app: FastAPI, engines: EnginePool) -> None:
    began = datetime.fromtimestamp(engines.created, timezone.utc)
    since = began.isoformat().replace("+00:00", "Z")

    @app.get("/api/tags")
    async def ollama_tags() -> JSONResponse:
        """List the engines."""
        models = [ollama_models.card(place.model, since) for place in engines.places]
        return JSONResponse({"models": models})

    @app.get("/api/ps")
    async def ollama_ps() -> JSONResponse:
        """List the loaded engines."""
        loaded = [place for place in engines.places if place.worker is not None]
        return JSONResponse({"models": [ollama_models.running(place, since) for place in loaded]})

    @app.post("/api/show")
    async def ollama_show(body: dict[str, Any], request: Request) -> JSONResponse:
        """Describe a model and its capabilities."""
        name = str(body.get("model") or body.get("name") or "").removesuffix(LATEST)
        served = await engines.of(name, request)
        llm = None if served.model.is_speech else served.llm
        shown = ollama_models.description(served.model, llm, since)
        page = await asyncio.to_thread(_page_facts, served)
        return JSONResponse({**shown, "edgellm": page})

    @app.get("/api/version")
    async def ollama_version() -> JSONResponse:
        """The version of Ollama's protocol."""
        return JSONResponse({"version": ollama_models.API_VERSION})


def _page_facts(served: EngineHandler) -> dict[str, Any]:
    """What the chat page shows besides: an extension of Ollama's form."""
    manifest = served.model.manifest
    facts = {"device": device_of(manifest), "max_body_bytes": served.settings.max_body_bytes}
    if served.model.is_speech:
        return facts
    one, defaults = manifest.cost_ms.get(PASS, {}).get("1"), served.llm.defaults
    return {
        **facts,
        "tokens_per_second": round(1000 / one, 1) if one else None,  # of passes with one token
        "defaults": {**NEUTRAL, **defaults.sampling, "max_tokens": defaults.max_generate_length},
    }
