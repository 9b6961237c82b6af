"""LoRA adapters of a server: `--loraModule`, and vLLM's `/v1/load_lora_adapter`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio.to_thread
from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import JSONResponse

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.transcription.transcriber import Transcriber
from edgellm.tools.serve.http.errors import ApiError
from edgellm.tools.serve.routing.engine_pool import EnginePool
from edgellm.tools.serve.schemas.response_format import Body

Name = Annotated[str, Field(min_length=1, max_length=200)]


class UnloadRequest(Body):
    """`/v1/unload_lora_adapter`."""

    lora_name: Name


class LoadRequest(UnloadRequest):
    """`/v1/load_lora_adapter`."""

    lora_path: str
    model: str | None = None  # the adapter's engine; default: the first


def load_given(llm: LLM | Transcriber, given: Sequence[str], models: Sequence[str]) -> None:
    """Load the adapters of `--loraModule NAME=FOLDER`.

    Args:
        llm: the engine.
        given: values of the flag.
        models: names of engines in requests.

    Raises:
        EdgeLLMError: the form is invalid, a name is taken, or as `LLM.load_adapter`.
    """
    for text in given:
        if isinstance(llm, Transcriber):
            raise EdgeLLMError(
                f"--loraModule {text}: {models[0]} is a speech model, which takes no adapters",
                hint="leave the flag out",
            )
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            raise EdgeLLMError(f"--loraModule {text}", hint="give NAME=FOLDER")
        if name in models or name in llm.adapters:
            raise EdgeLLMError(f"--loraModule {text}: the name {name} is there already")
        llm.load_adapter(name, Path(folder))


def add_adapters(app: FastAPI, engines: EnginePool) -> None:
    """Add the routes that load and unload adapters."""

    @app.post("/v1/load_lora_adapter")
    async def load_lora_adapter(body: LoadRequest, request: Request) -> JSONResponse:
        """Load a LoRA adapter; requests name it as their model."""
        _require_changes(engines)
        place, _ = engines.find(body.model)
        _require_new(engines, body.lora_name, place.model.name)
        path = _allowed(body.lora_path, engines.settings.lora_folders)
        served = await engines.of(place.model.name, request)
        try:
            await anyio.to_thread.run_sync(served.llm.load_adapter, body.lora_name, path)
        except EdgeLLMError as error:
            hint = f" ({error.hint})" if error.hint else ""
            raise ApiError(400, f"{error}{hint}", param="lora_path") from None
        return JSONResponse({"message": f"LoRA adapter {body.lora_name!r} is loaded"})

    @app.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadRequest, request: Request) -> JSONResponse:
        """Unload a LoRA adapter that no request uses."""
        _require_changes(engines)
        place, lora = engines.find(body.lora_name)
        if lora is None:
            raise ApiError(400, "lora_name: this is the base", param="lora_name")
        if place.worker is None:
            del place.adapters[lora]
        else:
            served = await engines.of(lora, request)
            await anyio.to_thread.run_sync(partial(served.llm.unload_adapter, lora))
        return JSONResponse({"message": f"LoRA adapter {lora!r} is unloaded"})


def _require_new(engines: EnginePool, name: str, model: str) -> None:
    """Raise `ApiError` if the name is an engine's, or an adapter's of another engine."""
    for place in engines.places:
        if name == place.model.name:
            raise ApiError(400, "lora_name: the base has this name", param="lora_name")
        if name in place.adapter_names and place.model.name != model:
            raise ApiError(
                400, f"lora_name: {place.model.name} has this adapter", param="lora_name"
            )


def _require_changes(engines: EnginePool) -> None:
    """Raise `ApiError` without `--allowLoraFolder`."""
    if not engines.settings.lora_folders:
        raise ApiError(403, "adapters cannot be changed: the server has no --allowLoraFolder")


def _allowed(text: str, folders: tuple[Path, ...]) -> Path:
    """The folder of an adapter; raises `ApiError` if it is outside the allowed folders."""
    outside = ApiError(400, "lora_path: outside the folders that are allowed", param="lora_path")
    try:
        path = Path(text).resolve()  # links and .. are followed first
    except (ValueError, OSError, RuntimeError):
        raise outside from None
    if not any(map(path.is_relative_to, folders)):
        raise outside
    return path
