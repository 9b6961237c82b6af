"""The paths of the other interfaces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from edgellm.tools.serve.http.errors import MESSAGES, RESPONSES
from edgellm.tools.serve.output.chat_output import ChatOutput
from edgellm.tools.serve.output.streams import Writer
from edgellm.tools.serve.protocols.anthropic.messages import CountRequest, MessagesRequest
from edgellm.tools.serve.protocols.anthropic.writer import MessagesWriter
from edgellm.tools.serve.protocols.ollama import LATEST, OllamaChat, OllamaGenerate, OllamaWriter
from edgellm.tools.serve.protocols.openai import chat, completions
from edgellm.tools.serve.protocols.openai.responses import ResponsesRequest
from edgellm.tools.serve.protocols.openai.responses_writer import ResponsesWriter
from edgellm.tools.serve.protocols.openai.tokenize import count_of
from edgellm.tools.serve.routing.engine_pool import EnginePool, Place
from edgellm.tools.serve.routing.handler import EngineHandler
from edgellm.tools.serve.schemas.openai import ChatRequest


def add_dialects(app: FastAPI, engines: EnginePool, version: str) -> None:
    """Anthropic's interface, OpenAI's Responses, and Ollama's."""
    _add_messages(app, engines)
    _add_responses(app, engines)
    _add_ollama(app, engines)
    _add_ollama_models(app, engines, version)


class _Asked:
    """A conversation that goes its way through the server."""

    def __init__(self, served: EngineHandler, body: ChatRequest) -> None:
        self._served, self._body = served, body
        self.llm, self.model = served.llm, served.name

    @classmethod
    async def of(cls, engines: EnginePool, body: ChatRequest, request: Request) -> _Asked:
        """Of the engine that it names; raises as `EnginePool.of`."""
        return cls(await engines.of(body.model, request), body)

    async def answer(self) -> ChatOutput:
        """What reads it; raises as `chat.ask_of`."""
        served, body = self._served, self._body
        self._ask = await chat.ask_of(body, served.llm, served.settings.images, served.lora)
        end = await chat.prompt_end(self._ask, body, served.llm)
        return ChatOutput(body, served.llm, prompt_end=end)

    async def respond(
        self, request: Request, writer: Writer, ignored: Sequence[str] = ()
    ) -> Response:
        """Queue it and answer it."""
        names = [*self._body.ignored(self._served.llm.tokenizer), *ignored]
        streams = self._body.streams()
        return await self._served.respond(
            request, [self._ask], writer, streams=streams, ignored=names
        )


def _add_messages(app: FastAPI, engines: EnginePool) -> None:
    @app.post(MESSAGES)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation, in Anthropic's form."""
        asked = await _Asked.of(engines, body.as_chat(), request)
        writer = MessagesWriter(await asked.answer(), asked.model)
        return await asked.respond(request, writer)

    @app.post(f"{MESSAGES}/count_tokens")
    async def count_tokens(body: CountRequest, request: Request) -> JSONResponse:
        """The tokens of a conversation."""
        given = ChatRequest.model_validate(body.conversation())
        served = await engines.of(given.model, request)
        ask = await chat.ask_of(given, served.llm, engines.settings.images)
        return JSONResponse({"input_tokens": await count_of(ask, served.llm)})


def _add_responses(app: FastAPI, engines: EnginePool) -> None:
    @app.post(RESPONSES)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation, in the form of OpenAI's Responses."""
        asked = await _Asked.of(engines, body.as_chat(), request)
        answer = await asked.answer()
        writer = ResponsesWriter(body, answer, asked.llm, asked.model)
        return await asked.respond(request, writer, body.ignored())


def _add_ollama(app: FastAPI, engines: EnginePool) -> None:
    @app.post("/api/chat")
    async def ollama_chat(body: OllamaChat, request: Request) -> Response:
        """Answer a conversation, in Ollama's form."""
        asked = await _Asked.of(engines, body.as_chat(), request)
        writer = OllamaWriter(await asked.answer(), asked.model, chats=True)
        return await asked.respond(request, writer, body.ignored())

    @app.post("/api/generate")
    async def ollama_generate(body: OllamaGenerate, request: Request) -> Response:
        """Answer one turn, or continue a text, in Ollama's form."""
        if not body.raw:
            asked = await _Asked.of(engines, body.as_chat(), request)
            writer = OllamaWriter(await asked.answer(), asked.model, chats=False)
            return await asked.respond(request, writer, body.ignored())
        given = body.as_completion()
        served = await engines.of(given.model, request)
        asks = completions.asks_of(given, served.lora)
        asks = [replace(ask, max_tokens=given.max_tokens) for ask in asks]
        writer = OllamaWriter(None, served.name, chats=False)
        streams, ignored = body.stream, body.ignored()
        return await served.respond(request, asks, writer, streams=streams, ignored=ignored)


def _add_ollama_models(app: FastAPI, engines: EnginePool, version: str) -> None:
    began = datetime.fromtimestamp(engines.created, timezone.utc)
    since = began.isoformat().replace("+00:00", "Z")

    def card(place: Place) -> dict[str, Any]:
        name = place.model.name + LATEST
        told = {"name": name, "model": name, "modified_at": since, "details": _details(place)}
        return {**told, "size": place.model.num_bytes}

    @app.get("/api/tags")
    async def ollama_tags() -> JSONResponse:
        """The engines."""
        return JSONResponse({"models": [card(place) for place in engines.places]})

    @app.get("/api/ps")
    async def ollama_ps() -> JSONResponse:
        """Those that are loaded."""
        loaded = [place for place in engines.places if place.worker is not None]
        return JSONResponse({"models": [card(place) for place in loaded]})

    @app.post("/api/show")
    async def ollama_show(body: dict[str, Any], request: Request) -> JSONResponse:
        """What a model can do."""
        name = str(body.get("model", body.get("name", ""))).removesuffix(LATEST)
        served = await engines.of(name, request)
        place, _ = engines.find(name)
        manifest = served.model.manifest
        decoder = manifest.decoder
        capabilities = ["completion"]
        capabilities += ["vision"] if served.llm.images is not None else []
        info = {
            "general.architecture": decoder.model_type,
            "general.parameter_count": decoder.num_parameters,
            f"{decoder.model_type}.context_length": manifest.max_kv_cache_capacity,
        }
        return JSONResponse(
            {
                "details": _details(place),
                "template": served.llm.tokenizer.chat_template or "",
                "capabilities": capabilities,
                "model_info": info,
                "modified_at": since,
            }
        )

    @app.get("/api/version")
    async def ollama_version() -> JSONResponse:
        """The server's version."""
        return JSONResponse({"version": version})


def _details(place: Place) -> dict[str, Any]:
    family = place.model.manifest.decoder.model_type
    return {"format": "edgellm", "family": family, "families": [family]}
