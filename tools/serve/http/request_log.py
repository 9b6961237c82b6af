"""The server's log: one line for each request, over HTTP or gRPC, as text or JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_FACTS = "edgellm.request_facts"  # in a scope: a `RequestFacts`
PROBES = frozenset(("/health", "/ready", "/metrics", "/v2/health/live", "/v2/health/ready"))
_TEXT = "%(levelname)s: %(message)s"
_MAX_PATH = 200  # characters
_OWN = logging.getLogger("edgellm")
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestFacts:
    """What the engine did for a request."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    ending: str = ""  # why the output ended early; "": it did not


class RequestLog:
    """ASGI middleware that logs each request when its response has been sent.

    Probes are logged at level debug. Queries, headers and bodies are never logged.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request; see ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        clock = asyncio.get_running_loop().time
        began, status = clock(), 0
        facts = scope[REQUEST_FACTS] = RequestFacts()

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, observed)
        finally:
            level = logging.DEBUG if scope["path"] in PROBES else logging.INFO
            place = (scope["method"], scope["path"])
            _write(level, place, status, facts, (clock() - began) * 1e3)


class LoggedCall:
    """Context of a gRPC call, which logs it at the end; `status` is the name of its code."""

    def __init__(self, path: str, *, is_probe: bool) -> None:
        """Probes are logged at level debug."""
        self.facts, self.status = RequestFacts(), "OK"
        self._path, self._level = path, logging.DEBUG if is_probe else logging.INFO

    def __enter__(self) -> LoggedCall:
        self._began = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, asyncio.CancelledError | GeneratorExit):
            self.status = "CANCELLED"
            self.facts.ending = self.facts.ending or "the client disconnected"
        ms = (time.monotonic() - self._began) * 1e3
        _write(self._level, ("gRPC", self._path), self.status, self.facts, ms)


def _write(
    level: int, place: tuple[str, str], status: int | str, facts: RequestFacts, ms: float
) -> None:
    """Log a request; `place` is its method and its path."""
    # A path may contain line breaks, which would look like further lines.
    method, path = place[0], quote(place[1][:_MAX_PATH], safe="/:")
    counts = f", {facts.prompt_tokens} + {facts.output_tokens} tokens"
    tokens = counts if facts.prompt_tokens else ""
    ending = f" ({facts.ending})" if facts.ending else ""
    fields = {
        "method": method,
        "path": path,
        "status": status,
        "prompt_tokens": facts.prompt_tokens,
        "output_tokens": facts.output_tokens,
        "ms": round(ms, 1),
        **({"ending": facts.ending} if ending else {}),
    }
    line = f"{method} {path} {status}{tokens}, {ms:.0f} ms{ending}"
    _log.log(level, "%s", line, extra={"fields": fields})


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, message, and the fields of a request."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        time = datetime.fromtimestamp(record.created, timezone.utc)
        content: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        return json.dumps(content, ensure_ascii=False)


def configure(level: str, kind: str) -> None:
    """Write the log to standard error.

    Args:
        level: the least severe that is written; of other libraries, warnings at least.
        kind: "text" or "json".
    """
    handler = logging.StreamHandler()
    is_json = kind == "json"
    handler.setFormatter(JsonFormatter() if is_json else logging.Formatter(_TEXT))
    least = getattr(logging, level.upper())
    logging.basicConfig(handlers=[handler], level=max(least, logging.WARNING))
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of clients' bodies
    _OWN.setLevel(least)
