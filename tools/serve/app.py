"""The HTTP application: its routes and middleware."""

from __future__ import annotations

import importlib.metadata

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from edgellm.tools.serve.auth import Auth
from edgellm.tools.serve.http import errors
from edgellm.tools.serve.http.cors import share
from edgellm.tools.serve.http.openapi import document
from edgellm.tools.serve.http.page import add_page
from edgellm.tools.serve.http.request_log import RequestLog
from edgellm.tools.serve.protocols.kserve.routes import add_kserve
from edgellm.tools.serve.protocols.openai import chat, completions
from edgellm.tools.serve.protocols.openai import models as model_cards
from edgellm.tools.serve.protocols.openai.embeddings import (
    EmbeddingRequest,
    EmbeddingWriter,
    RerankRequest,
    RerankWriter,
)
from edgellm.tools.serve.protocols.openai.lora import add_adapters
from edgellm.tools.serve.protocols.openai.tokenize import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenized,
    tokenized,
)
from edgellm.tools.serve.protocols.openai.transcriptions import add_transcriptions
from edgellm.tools.serve.protocols.routes import add_protocols
from edgellm.tools.serve.protocols.triton.generate import GenerateRequest, GenerateWriter
from edgellm.tools.serve.routing.engine_pool import EnginePool
from edgellm.tools.serve.schemas.openai import ChatRequest, CompletionRequest


def create_app(engines: EnginePool) -> FastAPI:
    """Create the application; the caller starts and closes its engines."""
    version = importlib.metadata.version("edgellm")
    # No documentation pages: they would load scripts from other hosts.
    app = FastAPI(title="edgellm-serve", version=version, docs_url=None, redoc_url=None)
    _add_openai(app, engines)
    add_adapters(app, engines)
    add_transcriptions(app, engines)
    add_protocols(app, engines)
    _add_triton(app, engines)
    add_kserve(app, engines, version)
    _add_tokens(app, engines, version)
    _add_states(app, engines)
    add_page(app)
    errors.install(app)
    app.openapi = document(app)  # type: ignore[method-assign]
    app.add_middleware(Auth, engines=engines)
    share(app, engines.settings.origins)  # around `Auth`, so that web pages can read its errors
    app.add_middleware(RequestLog)  # outermost
    return app


def create_metrics_app(engines: EnginePool) -> FastAPI:
    """Create an application with metrics only, for a separate port."""
    app = FastAPI(title="edgellm-serve", docs_url=None, redoc_url=None, openapi_url=None)
    _add_metrics(app, engines)
    errors.install(app)
    app.add_middleware(Auth, engines=engines)
    return app


def _add_openai(app: FastAPI, engines: EnginePool) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Respond to a conversation."""
        served = await engines.of(body.model, request)
        ask = await chat.ask_of(body, served.llm, engines.settings.images, served.lora)
        end = await chat.prompt_end(ask, body, served.llm)
        writer = chat.ChatWriter(body=body, llm=served.llm, model=served.name, prompt_end=end)
        return await served.respond_openai(request, body, ask.times(body.n), writer)

    @app.post("/v1/completions")
    async def text_completions(body: CompletionRequest, request: Request) -> Response:
        """Complete one prompt or several."""
        served = await engines.of(body.model, request)
        asks = completions.asks_of(body, served.llm.defaults, served.lora)
        writer = completions.CompletionWriter(body, served.llm, served.name)
        return await served.respond_openai(request, body, asks, writer)

    @app.post("/v1/embeddings")
    async def embed(body: EmbeddingRequest, request: Request) -> Response:
        """Embed texts."""
        served = await engines.of(body.model, request)
        writer = EmbeddingWriter(body, served.name)
        asks = body.asks(served.llm, served.lora)
        return await served.respond(request, asks, writer, streams=False)

    @app.post("/v1/rerank")
    @app.post("/v2/rerank")
    @app.post("/rerank")
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Rank documents by a reranker, or by similarity of embeddings to the query."""
        served = await engines.of(body.model, request)
        writer = RerankWriter(body, served.llm.pooler, served.name)
        return await served.respond(
            request, body.asks(served.llm, served.lora), writer, streams=False
        )

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        """List the engines and their LoRA adapters."""
        return JSONResponse({"object": "list", "data": model_cards.all_cards(engines)})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        """Describe one engine or adapter."""
        return JSONResponse(model_cards.card(engines, *engines.find(name)))


def _add_triton(app: FastAPI, engines: EnginePool) -> None:
    async def generated(
        name: str, body: GenerateRequest, request: Request, *, streams: bool
    ) -> Response:
        body.require_path(streams=streams)
        served = await engines.of(name, request)
        writer = GenerateWriter(body, served.name, streams=streams)
        asks = [body.ask(served.llm.defaults, served.lora)]
        return await served.respond(request, asks, writer, streams=streams)

    @app.post("/v2/models/{name}/generate")
    async def generate(name: str, body: GenerateRequest, request: Request) -> Response:
        """Complete a prompt."""
        return await generated(name, body, request, streams=False)

    @app.post("/v2/models/{name}/generate_stream")
    async def generate_stream(name: str, body: GenerateRequest, request: Request) -> Response:
        """Complete a prompt, streamed as server-sent events."""
        return await generated(name, body, request, streams=True)

    @app.get("/v2/health/ready")
    async def triton_ready() -> Response:
        """Whether requests are accepted."""
        return Response(status_code=200 if engines.is_ready else 503)

    @app.get("/v2/health/live")
    async def triton_live() -> Response:
        """Whether the server runs."""
        return Response(status_code=200)


def _add_tokens(app: FastAPI, engines: EnginePool, version: str) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> JSONResponse:
        """Tokenize a text or messages."""
        served = await engines.of(body.model, request)
        return JSONResponse(await tokenized(body, served.llm))

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> JSONResponse:
        """Decode token ids."""
        served = await engines.of(body.model, request)
        return JSONResponse(await detokenized(body, served.llm))

    @app.get("/version")
    async def own_version() -> JSONResponse:
        """The server's version."""
        return JSONResponse({"version": version})


def _add_states(app: FastAPI, engines: EnginePool) -> None:
    def state(word: str, *, good: bool) -> JSONResponse:
        return JSONResponse({"status": word if good else "unavailable"}, 200 if good else 503)

    @app.get("/health")
    async def health() -> JSONResponse:
        """Whether the server and its engines' threads run."""
        return state("ok", good=engines.is_alive)

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Whether requests are accepted; not while the server drains."""
        return state("ready", good=engines.is_ready)

    _add_metrics(app, engines)


def _add_metrics(app: FastAPI, engines: EnginePool) -> None:
    @app.get("/metrics")
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(engines.registry.page(), media_type="text/plain; version=0.0.4")
