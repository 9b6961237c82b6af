"""KServe's HTTP routes: metadata and `infer`."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from edgellm.tools.serve.engines.request_stream import DisconnectedError
from edgellm.tools.serve.http.errors import ApiError
from edgellm.tools.serve.output.streams import collect
from edgellm.tools.serve.protocols.kserve import infer, metadata
from edgellm.tools.serve.protocols.triton.generate import GenerateWriter
from edgellm.tools.serve.routing.engine_pool import EnginePool
from edgellm.tools.serve.routing.handler import EngineHandler

_MODEL = "/v2/models/{name}"
_VERSION = f"{_MODEL}/versions/{{version}}"
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": infer.InferBody.model_json_schema()}},
    }
}


def add_kserve(app: FastAPI, engines: EnginePool, version: str) -> None:
    """Add the routes, each with and without a model version."""

    def require(name: str, model_version: str) -> None:
        engines.find(name)
        if model_version != metadata.VERSION:
            raise ApiError(404, f"there is no version {model_version!r:.40}, only 1")

    @app.get("/v2")
    async def server_metadata() -> JSONResponse:
        """Describe the server."""
        return JSONResponse(metadata.server(version))

    @app.get(_VERSION, include_in_schema=False)
    @app.get(_MODEL)
    async def model_metadata(name: str, version: str = metadata.VERSION) -> JSONResponse:
        """Describe the model's tensors."""
        require(name, version)
        return JSONResponse(metadata.model(name))

    @app.get(f"{_VERSION}/config", include_in_schema=False)
    @app.get(f"{_MODEL}/config")
    async def model_config(name: str, version: str = metadata.VERSION) -> JSONResponse:
        """Describe the model's tensors in the form of Triton's configuration."""
        require(name, version)
        return JSONResponse(metadata.config_in_words(name))

    @app.get(f"{_VERSION}/ready", include_in_schema=False)
    @app.get(f"{_MODEL}/ready")
    async def model_ready(name: str, version: str = metadata.VERSION) -> Response:
        """Whether requests for the model are accepted."""
        require(name, version)
        return Response(status_code=200 if engines.is_ready else 503)

    @app.post(f"{_VERSION}/infer", include_in_schema=False)
    @app.post(f"{_MODEL}/infer", openapi_extra=_BODY)
    async def infer_text(name: str, request: Request, version: str = metadata.VERSION) -> Response:
        """Complete a prompt, given as tensors."""
        require(name, version)
        return await _infer(await engines.of(name, request), request)


async def _infer(served: EngineHandler, request: Request) -> Response:
    found = infer.parse(await request.body(), request.headers.get(infer.HEADER_LENGTH))
    body = found.body
    body.require_path(streams=False)
    writer = GenerateWriter(body, served.name, streams=False)
    call = served.call([body.ask(served.llm.defaults, served.lora)], request)
    try:
        content, headers = infer.answer(found, await collect(call, writer))
    except DisconnectedError:
        return Response(status_code=499)  # the client has disconnected
    return Response(content, headers=headers)
