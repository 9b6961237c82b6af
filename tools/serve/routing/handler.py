"""How a request is answered by the engine that it names."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import Request
from starlette.responses import Response

from edgellm.device_runtime.api.llm import LLM
from edgellm.tools.serve.engines.ask import EmbeddingJob, EngineRequest
from edgellm.tools.serve.engines.models import Model
from edgellm.tools.serve.engines.request_stream import Call, Connection
from edgellm.tools.serve.engines.worker import Worker
from edgellm.tools.serve.output.streams import Writer, answer
from edgellm.tools.serve.schemas.openai import Sampled
from edgellm.tools.serve.settings import Settings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineHandler:
    """The engine that a request has until it ends."""

    worker: Worker
    model: Model
    lora: str | None  # the adapter that it names
    settings: Settings
    told: set[str]  # fields that the log named as ignored; of all requests

    @property
    def llm(self) -> LLM:
        """The engine."""
        return self.worker.llm

    @property
    def name(self) -> str:
        """What the request calls it."""
        return self.lora or self.model.name

    def call(
        self, asks: Sequence[EngineRequest] | Sequence[EmbeddingJob], connection: Connection
    ) -> Call:
        """Queue a request; raises as `Call`."""
        return Call(self.worker, asks, connection, self.settings.total_timeout_s)

    async def respond(
        self,
        request: Request,
        asks: Sequence[EngineRequest] | Sequence[EmbeddingJob],
        writer: Writer,
        *,
        streams: bool,
        ignored: Sequence[str] = (),
    ) -> Response:
        """Queue a request and answer it; say which of its fields were ignored."""
        call = self.call(asks, request)
        for name in ignored:
            if name not in self.told:
                self.told.add(name)
                _log.warning("requests have %s, which is ignored; said once", name)
        headers = {"x-edgellm-ignored": ", ".join(ignored)} if ignored else {}
        return await answer(call, writer, request, headers, streams=streams)

    async def respond_openai(
        self, request: Request, body: Sampled, asks: Sequence[EngineRequest], writer: Writer
    ) -> Response:
        """As `respond`."""
        ignored = body.ignored(self.llm.tokenizer)
        return await self.respond(request, asks, writer, streams=body.streams(), ignored=ignored)
