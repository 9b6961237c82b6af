"""The paths of the other interfaces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from edgellm.tools.serve import chat, completions
from edgellm.tools.serve.answering import Server
from edgellm.tools.serve.chat_answer import ChatAnswer
from edgellm.tools.serve.dialects.messages import CountRequest, MessagesRequest
from edgellm.tools.serve.dialects.messages_writer import MessagesWriter
from edgellm.tools.serve.dialects.ollama import LATEST, OllamaChat, OllamaGenerate, OllamaWriter
from edgellm.tools.serve.dialects.responses import ResponsesRequest
from edgellm.tools.serve.dialects.responses_writer import ResponsesWriter
from edgellm.tools.serve.errors import MESSAGES, RESPONSES
from edgellm.tools.serve.schemas import ChatRequest
from edgellm.tools.serve.streams import Writer
from edgellm.tools.serve.tokens import count_of


def add_dialects(app: FastAPI, server: Server, version: str) -> None:
    """Anthropic's interface, OpenAI's Responses, and Ollama's."""
    _add_messages(app, server)
    _add_responses(app, server)
    _add_ollama(app, server)
    _add_ollama_models(app, server, version)


class _Asked:
    """A conversation that goes its way through the server."""

    def __init__(self, server: Server, body: ChatRequest) -> None:
        self._lora = server.adapter_of(body.model)
        self.model = self._lora or server.settings.model
        self._server, self._body = server, body

    async def answer(self) -> ChatAnswer:
        """What reads it; raises as `chat.ask_of`."""
        server, body = self._server, self._body
        self._ask = await chat.ask_of(body, server.llm, server.settings.images, self._lora)
        end = await chat.prompt_end(self._ask, body, server.llm)
        return ChatAnswer(body, server.llm, prompt_end=end)

    async def respond(
        self, request: Request, writer: Writer, ignored: Sequence[str] = ()
    ) -> Response:
        """Queue it and answer it."""
        names = [*self._body.ignored(self._server.llm.tokenizer.chat_template or ""), *ignored]
        streams = self._body.streams()
        return await self._server.respond(
            request, [self._ask], writer, streams=streams, ignored=names
        )


def _add_messages(app: FastAPI, server: Server) -> None:
    @app.post(MESSAGES)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation, in Anthropic's form."""
        asked = _Asked(server, body.as_chat())
        writer = MessagesWriter(await asked.answer(), asked.model)
        return await asked.respond(request, writer)

    @app.post(f"{MESSAGES}/count_tokens")
    async def count_tokens(body: CountRequest) -> JSONResponse:
        """The tokens of a conversation."""
        given = ChatRequest.model_validate(body.conversation())
        server.adapter_of(given.model)
        ask = await chat.ask_of(given, server.llm, server.settings.images)
        return JSONResponse({"input_tokens": await count_of(ask, server.llm)})


def _add_responses(app: FastAPI, server: Server) -> None:
    @app.post(RESPONSES)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation, in the form of OpenAI's Responses."""
        asked = _Asked(server, body.as_chat())
        answer = await asked.answer()
        writer = ResponsesWriter(body, answer, server.llm, asked.model)
        return await asked.respond(request, writer, body.ignored())


def _add_ollama(app: FastAPI, server: Server) -> None:
    @app.post("/api/chat")
    async def ollama_chat(body: OllamaChat, request: Request) -> Response:
        """Answer a conversation, in Ollama's form."""
        asked = _Asked(server, body.as_chat())
        writer = OllamaWriter(await asked.answer(), asked.model, chats=True)
        return await asked.respond(request, writer, body.ignored())

    @app.post("/api/generate")
    async def ollama_generate(body: OllamaGenerate, request: Request) -> Response:
        """Answer one turn, or continue a text, in Ollama's form."""
        if not body.raw:
            asked = _Asked(server, body.as_chat())
            writer = OllamaWriter(await asked.answer(), asked.model, chats=False)
            return await asked.respond(request, writer, body.ignored())
        given = body.as_completion()
        lora = server.adapter_of(given.model)
        asks = completions.asks_of(given, lora)
        asks = [replace(ask, max_tokens=given.max_tokens) for ask in asks]
        writer = OllamaWriter(None, lora or server.settings.model, chats=False)
        streams, ignored = body.stream, body.ignored()
        return await server.respond(request, asks, writer, streams=streams, ignored=ignored)


def _add_ollama_models(app: FastAPI, server: Server, version: str) -> None:
    manifest = server.llm.manifest
    decoder = manifest.decoder
    details = {"format": "edgellm", "family": decoder.model_type, "families": [decoder.model_type]}

    def card() -> dict[str, Any]:
        name = server.settings.model + LATEST
        since = (
            datetime.fromtimestamp(server.created, timezone.utc).isoformat().replace("+00:00", "Z")
        )
        return {"name": name, "model": name, "modified_at": since, "details": details}

    @app.get("/api/tags")
    async def ollama_tags() -> JSONResponse:
        """The one model."""
        return JSONResponse({"models": [card()]})

    @app.get("/api/ps")
    async def ollama_ps() -> JSONResponse:
        """The one model, which is loaded."""
        return JSONResponse({"models": [card()]})

    @app.post("/api/show")
    async def ollama_show(body: dict[str, Any]) -> JSONResponse:
        """What the model can do."""
        server.require_model(str(body.get("model", body.get("name", ""))).removesuffix(LATEST))
        template = server.llm.tokenizer.chat_template or ""
        capabilities = ["completion"]
        capabilities += ["vision"] if server.llm.images is not None else []
        info = {
            "general.architecture": decoder.model_type,
            "general.parameter_count": decoder.num_parameters,
            f"{decoder.model_type}.context_length": manifest.max_kv_cache_capacity,
        }
        return JSONResponse(
            {
                "details": details,
                "template": template,
                "capabilities": capabilities,
                "model_info": info,
                "modified_at": card()["modified_at"],
            }
        )

    @app.get("/api/version")
    async def ollama_version() -> JSONResponse:
        """The server's version."""
        return JSONResponse({"version": version})
