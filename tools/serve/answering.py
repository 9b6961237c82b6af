"""What the server's paths share: its parts, and how a request is answered."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from edgellm.tools.serve.asks import Ask, Embed
from edgellm.tools.serve.client_request import Call
from edgellm.tools.serve.errors import ApiError
from edgellm.tools.serve.metrics import Metrics
from edgellm.tools.serve.schemas import Sampled
from edgellm.tools.serve.settings import Settings
from edgellm.tools.serve.streams import Writer, answer
from edgellm.tools.serve.worker import Worker

_log = logging.getLogger(__name__)


class Server:
    """What the paths share."""

    def __init__(self, worker: Worker, metrics: Metrics, settings: Settings) -> None:
        self.worker, self.metrics, self.settings = worker, metrics, settings
        self.llm = worker.llm
        self.created = int(time.time())
        self._told: set[str] = set()  # fields that the log named as ignored

    def require_model(self, name: str | None) -> None:
        """Raises `ApiError` 404 for another model than the one there is."""
        if name not in (None, self.settings.model):
            raise ApiError(
                404,
                f"there is no model {name!r} here, only {self.settings.model!r}",
                code="model_not_found",
                param="model",
            )

    async def respond(
        self,
        request: Request,
        asks: Sequence[Ask] | Sequence[Embed],
        writer: Writer,
        *,
        streams: bool,
        ignored: Sequence[str] = (),
    ) -> Response:
        """Queue a request and answer it; say which of its fields were ignored."""
        call = Call(self.worker, asks, request, self.settings.total_timeout_s)
        for name in ignored:
            if name not in self._told:
                self._told.add(name)
                _log.warning("requests have %s, which is ignored; said once", name)
        headers = {"x-edgellm-ignored": ", ".join(ignored)} if ignored else {}
        return await answer(call, writer, request, headers, streams=streams)

    async def respond_openai(
        self, request: Request, body: Sampled, asks: Sequence[Ask], writer: Writer
    ) -> Response:
        """As `respond`."""
        ignored = body.ignored(self.llm.tokenizer.chat_template or "")
        return await self.respond(request, asks, writer, streams=body.streams(), ignored=ignored)

    def model_card(self) -> dict[str, Any]:
        """The model, in OpenAI's form."""
        return {
            "id": self.settings.model,
            "object": "model",
            "created": self.created,
            "owned_by": "edgellm",
            "max_model_len": self.llm.manifest.max_kv_cache_capacity,
        }
