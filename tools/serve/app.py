"""The paths of the server."""

from __future__ import annotations

import importlib.metadata

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from edgellm.tools.serve import chat, completions, errors
from edgellm.tools.serve.answering import Server
from edgellm.tools.serve.dialects.routes import add_dialects
from edgellm.tools.serve.embeddings import (
    EmbeddingRequest,
    EmbeddingWriter,
    RerankRequest,
    RerankWriter,
)
from edgellm.tools.serve.guard import Guard
from edgellm.tools.serve.kserve.routes import add_kserve
from edgellm.tools.serve.metrics import Metrics
from edgellm.tools.serve.openapi import document
from edgellm.tools.serve.pages import add_page
from edgellm.tools.serve.schemas import ChatRequest, CompletionRequest
from edgellm.tools.serve.settings import Settings
from edgellm.tools.serve.sites import share
from edgellm.tools.serve.tokens import DetokenizeRequest, TokenizeRequest, detokenized, tokenized
from edgellm.tools.serve.triton import GenerateRequest, GenerateWriter
from edgellm.tools.serve.worker import Worker


def create_app(worker: Worker, metrics: Metrics, settings: Settings) -> FastAPI:
    """The application; its worker must be started and stopped by the caller."""
    version = importlib.metadata.version("edgellm")
    # No documentation pages: they would load scripts from other hosts.
    app = FastAPI(title="edgellm-serve", version=version, docs_url=None, redoc_url=None)
    server = Server(worker, metrics, settings)
    app.state.server = server
    _add_openai(app, server)
    add_dialects(app, server, version)
    _add_triton(app, server)
    add_kserve(app, server, version)
    _add_tokens(app, server, version)
    _add_states(app, server)
    add_page(app)
    errors.install(app)
    app.openapi = document(app)  # type: ignore[method-assign]
    app.add_middleware(Guard, settings=settings, worker=worker)
    share(app, settings.origins)  # outside the guard: a page may read its refusals
    return app


def create_metrics_app(server: Server) -> FastAPI:
    """An application with the figures alone, for a port of their own."""
    app = FastAPI(title="edgellm-serve", docs_url=None, redoc_url=None, openapi_url=None)
    _add_metrics(app, server)
    errors.install(app)
    app.add_middleware(Guard, settings=server.settings, worker=server.worker)
    return app


def _add_openai(app: FastAPI, server: Server) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        server.require_model(body.model)
        ask = await chat.ask_of(body, server.llm, server.settings.images)
        end = await chat.prompt_end(ask, body, server.llm)
        writer = chat.ChatWriter(body, server.llm, server.settings.model, prompt_end=end)
        return await server.respond_openai(request, body, [ask], writer)

    @app.post("/v1/completions")
    async def text_completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text, or several."""
        server.require_model(body.model)
        asks = completions.asks_of(body)
        writer = completions.CompletionWriter(body, server.llm, server.settings.model)
        return await server.respond_openai(request, body, asks, writer)

    @app.post("/v1/embeddings")
    async def embed(body: EmbeddingRequest, request: Request) -> Response:
        """Vectors of texts."""
        server.require_model(body.model)
        writer = EmbeddingWriter(body, server.settings.model)
        return await server.respond(request, body.asks(server.llm), writer, streams=False)

    @app.post("/v1/rerank")
    @app.post("/rerank")
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Documents in the order of their nearness to a query."""
        server.require_model(body.model)
        writer = RerankWriter(body, server.settings.model)
        return await server.respond(request, body.asks(), writer, streams=False)

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        """The one model."""
        return JSONResponse({"object": "list", "data": [server.model_card()]})

    @app.get("/v1/models/{name}")
    async def model(name: str) -> JSONResponse:
        """The one model, by its name."""
        server.require_model(name)
        return JSONResponse(server.model_card())


def _add_triton(app: FastAPI, server: Server) -> None:
    async def generated(
        name: str, body: GenerateRequest, request: Request, *, streams: bool
    ) -> Response:
        server.require_model(name)
        body.require_path(streams=streams)
        writer = GenerateWriter(body, server.llm.tokenizer, server.settings.model, streams=streams)
        return await server.respond(request, [body.ask()], writer, streams=streams)

    @app.post("/v2/models/{name}/generate")
    async def generate(name: str, body: GenerateRequest, request: Request) -> Response:
        """Continue a text."""
        return await generated(name, body, request, streams=False)

    @app.post("/v2/models/{name}/generate_stream")
    async def generate_stream(name: str, body: GenerateRequest, request: Request) -> Response:
        """Continue a text, in server-sent events."""
        return await generated(name, body, request, streams=True)

    @app.get("/v2/health/ready")
    async def triton_ready() -> Response:
        """Whether requests are taken."""
        return Response(status_code=200 if server.worker.is_ready else 503)

    @app.get("/v2/health/live")
    async def triton_live() -> Response:
        """Whether the server runs."""
        return Response(status_code=200)


def _add_tokens(app: FastAPI, server: Server, version: str) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> JSONResponse:
        """The tokens of a text or of messages."""
        server.require_model(body.model)
        return JSONResponse(await tokenized(body, server.llm))

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> JSONResponse:
        """The text of tokens."""
        server.require_model(body.model)
        return JSONResponse(await detokenized(body, server.llm))

    @app.get("/version")
    async def own_version() -> JSONResponse:
        """The server's version."""
        return JSONResponse({"version": version})


def _add_states(app: FastAPI, server: Server) -> None:
    def state(word: str, *, good: bool) -> JSONResponse:
        return JSONResponse({"status": word if good else "unavailable"}, 200 if good else 503)

    @app.get("/health")
    async def health() -> JSONResponse:
        """Whether the server and its engine's thread run."""
        return state("ok", good=server.worker.is_alive)

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Whether requests are taken; not while the server waits for its last answers."""
        return state("ready", good=server.worker.is_ready)

    _add_metrics(app, server)


def _add_metrics(app: FastAPI, server: Server) -> None:
    @app.get("/metrics")
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(server.metrics.page(), media_type="text/plain; version=0.0.4")
