"""LoRA adapters of a server: those that it begins with, and `/v1/load_lora_adapter` as vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio.to_thread
from fastapi import FastAPI
from pydantic import Field
from starlette.responses import JSONResponse

from edgellm.contract import EdgeLLMError
from edgellm.device_runtime.engine.llm import LLM
from edgellm.tools.serve.answering import Server
from edgellm.tools.serve.errors import ApiError
from edgellm.tools.serve.forms import Body

Name = Annotated[str, Field(min_length=1, max_length=200)]


class UnloadRequest(Body):
    """`/v1/unload_lora_adapter`."""

    lora_name: Name


class LoadRequest(UnloadRequest):
    """`/v1/load_lora_adapter`."""

    lora_path: str


def load_given(llm: LLM, given: Sequence[str], model: str) -> None:
    """Load the adapters of `--loraModule NAME=FOLDER`.

    Args:
        llm: the engine.
        given: as the user wrote them.
        model: the base's name in requests.

    Raises:
        EdgeLLMError: another form, a name twice, or as `LLM.load_adapter`.
    """
    for text in given:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            raise EdgeLLMError(f"--loraModule {text}", hint="give NAME=FOLDER")
        if name == model or name in llm.adapters:
            raise EdgeLLMError(f"--loraModule {text}: the name {name} is there already")
        llm.load_adapter(name, Path(folder))


def add_adapters(app: FastAPI, server: Server) -> None:
    """The paths that load adapters and drop them."""

    @app.post("/v1/load_lora_adapter")
    async def load_lora_adapter(body: LoadRequest) -> JSONResponse:
        """Take up a LoRA adapter; requests name it as their model."""
        if body.lora_name == server.settings.model:
            raise ApiError(400, "lora_name: the base has this name", param="lora_name")
        _require_changes(server)
        path = _allowed(body.lora_path, server.settings.lora_folders)
        try:
            await anyio.to_thread.run_sync(server.llm.load_adapter, body.lora_name, path)
        except EdgeLLMError as error:
            hint = f" ({error.hint})" if error.hint else ""
            raise ApiError(400, f"{error}{hint}", param="lora_path") from None
        return JSONResponse({"message": f"LoRA adapter {body.lora_name!r} is loaded"})

    @app.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadRequest) -> JSONResponse:
        """Forget a LoRA adapter that no answer is computed with."""
        _require_changes(server)
        if server.adapter_of(body.lora_name) is None:
            raise ApiError(400, "lora_name: this is the base", param="lora_name")
        await anyio.to_thread.run_sync(partial(server.llm.unload_adapter, body.lora_name))
        return JSONResponse({"message": f"LoRA adapter {body.lora_name!r} is unloaded"})


def _require_changes(server: Server) -> None:
    """Raises `ApiError` where the server's owner did not say that adapters come and go."""
    if not server.settings.lora_folders:
        raise ApiError(403, "adapters do not come and go here: the server has no --allowLoraFolder")


def _allowed(text: str, folders: tuple[Path, ...]) -> Path:
    """The folder of an adapter; raises `ApiError` for what the server's owner does not allow."""
    outside = ApiError(400, "lora_path: outside the folders that are allowed", param="lora_path")
    try:
        path = Path(text).resolve()  # links and .. are followed first
    except (ValueError, OSError, RuntimeError):
        raise outside from None
    if not any(map(path.is_relative_to, folders)):
        raise outside
    return path
