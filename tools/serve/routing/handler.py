"""Handles a request with the engine that it names."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import Request
from starlette.responses import Response

from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.transcription.transcriber import Transcriber
from edgellm.tools.serve.engines.ask import Ask, EngineRequest
from edgellm.tools.serve.engines.llm_worker import LLMWorker
from edgellm.tools.serve.engines.models import Model
from edgellm.tools.serve.engines.request_stream import Call, Connection
from edgellm.tools.serve.engines.speech_worker import SpeechWorker
from edgellm.tools.serve.engines.worker import Worker
from edgellm.tools.serve.http.cors import IGNORED, SEED
from edgellm.tools.serve.http.errors import ApiError
from edgellm.tools.serve.output.streams import Writer, answer
from edgellm.tools.serve.schemas.history import ignored_fields
from edgellm.tools.serve.schemas.openai import Sampled
from edgellm.tools.serve.settings import Settings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHandler:
    """The engine that a request leases until it ends."""

    worker: Worker
    model: Model
    lora: str | None  # name of the requested adapter
    settings: Settings
    warned: set[str]  # ignored fields that were logged, of all requests

    @property
    def llm(self) -> LLM:
        """The engine.

        Raises:
            ApiError: 400 if it is of a speech model.
        """
        if isinstance(self.worker, LLMWorker):
            return self.worker.llm
        raise ApiError(
            400,
            f"{self.name} is a speech model: send it audio, to /v1/audio/transcriptions",
            param="model",
        )

    @property
    def transcriber(self) -> Transcriber:
        """The engine of a speech model.

        Raises:
            ApiError: 400 if it is of a language model.
        """
        if not isinstance(self.worker, SpeechWorker):
            raise ApiError(
                400,
                f"{self.name} is a language model, which does not transcribe audio: name a speech "
                "model, such as Whisper",
                param="model",
            )
        return self.worker.transcriber

    @property
    def name(self) -> str:
        """Name of the model in the request."""
        return self.lora or self.model.name

    def call(
        self,
        asks: Sequence[Ask],
        connection: Connection,
    ) -> Call:
        """Queues a request; raises as `Call`."""
        return Call(
            worker=self.worker,
            asks=asks,
            request=connection,
            total_timeout_s=self.settings.total_timeout_s,
        )

    async def respond(
        self,
        request: Request,
        asks: Sequence[Ask],
        writer: Writer,
        *,
        streams: bool,
        ignored: Sequence[str] = (),
        history: Sequence[str] = (),
    ) -> Response:
        """Queues a request and responds; headers have the ignored fields and the first seed.

        Args:
            request: of the client.
            asks: for the engine.
            writer: converts the events.
            streams: whether the output is streamed.
            ignored: options without effect, which are logged.
            history: ignored fields in earlier messages, which are not.
        """
        call = self.call(asks, request)
        headers = self.ignored_header(ignored, history)
        seeds = [ask.sampling.seed for ask in asks if isinstance(ask, EngineRequest)]
        if seeds and seeds[0] is not None:
            headers[SEED] = str(seeds[0])
        return await answer(call, writer, request, headers, streams=streams)

    def ignored_header(self, ignored: Sequence[str], history: Sequence[str] = ()) -> dict[str, str]:
        """The header with the ignored fields, of which options are logged; see `respond`."""
        for name in ignored:
            if name not in self.warned:
                self.warned.add(name)
                _log.warning("requests have %s, which is ignored; logged once", name)
        names = [*ignored, *history]
        return {IGNORED: ", ".join(names)} if names else {}

    async def respond_openai(
        self, request: Request, body: Sampled, asks: Sequence[EngineRequest], writer: Writer
    ) -> Response:
        """Respond to an OpenAI request; see `respond`."""
        ignored, history = body.ignored(self.llm.tokenizer), ignored_fields(body)
        streams = body.streams()
        return await self.respond(
            request, asks, writer, streams=streams, ignored=ignored, history=history
        )
