"""Access control before the application: API keys, host names, body sizes."""

from __future__ import annotations

import asyncio
import hmac
from contextlib import ExitStack

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgellm.tools.serve import heap
from edgellm.tools.serve.engines.request_stream import BODY_BYTES
from edgellm.tools.serve.http.cors import require_known_site
from edgellm.tools.serve.http.errors import MESSAGES, ApiError, response_for
from edgellm.tools.serve.routing.engine_pool import LEASES, EnginePool
from edgellm.tools.serve.settings import Settings, is_loopback, key_hash

OPEN_PATHS = frozenset(("/health", "/ready", "/v2/health/live", "/v2/health/ready"))
OPEN_FOLDER = "/page/"
WITHOUT_ENGINE = frozenset(("/tokenize", "/detokenize", f"{MESSAGES}/count_tokens", "/api/show"))
_GONE: Message = {"type": "http.disconnect"}
_DISCARD_S, _DISCARD_BYTES = 2.0, 256 << 20


class Auth:
    """ASGI middleware that checks a request and reads its whole body."""

    def __init__(self, app: ASGIApp, engines: EnginePool) -> None:
        self._app, self._settings, self._engines = app, engines.settings, engines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward or reject a request; see ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # of health checks; the connection sends no body
            scope = {**scope, "method": "GET"}
        scope["arrived"] = asyncio.get_running_loop().time()
        scope[BODY_BYTES] = 0
        try:
            await self._pass_on(scope, receive, send)
        finally:
            heap.after_request(scope[BODY_BYTES])

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        headers = Headers(scope=scope)
        try:
            self._require_host(headers)
            self._require_key(path, headers)
            if scope["method"] == "POST":
                require_known_site(headers, self._settings.origins)
                if path not in WITHOUT_ENGINE:
                    self._engines.require_room()
                if path.startswith(("/v2/", "/api/")):
                    _take_as_json(scope)
                receive = await self._with_body(scope, headers, receive)
        except ApiError as error:
            if error.status != 400:
                await _discard(headers, receive)
            await response_for(path, error)(scope, receive, send)
            return
        try:
            with ExitStack() as scope[LEASES]:
                await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if self._engines.is_ready:
                raise
            # The server stops before this client has read its whole output.

    def _require_host(self, headers: Headers) -> None:
        """Raise 403 for foreign host names on a local server (DNS rebinding)."""
        if not self._settings.local_only:
            return
        host = headers.get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if not is_loopback(name):
            raise ApiError(
                403,
                "this server answers only to names of its own machine, such as localhost: let a "
                "proxy send that (nginx: proxy_set_header Host localhost;), or start the server "
                "with --host and --apiKeyFile",
            )

    def _require_key(self, path: str, headers: Headers) -> None:
        is_open = path == "/" or path in OPEN_PATHS or path.startswith(OPEN_FOLDER)
        if is_open:
            return
        own = headers.get("x-api-key")  # header of Anthropic's clients
        given = headers.get("authorization", "") if own is None else f"Bearer {own}"
        require_key(self._settings, given)

    async def _with_body(self, scope: Scope, headers: Headers, receive: Receive) -> Receive:
        """Read the body; return a `receive` that gives it at once.

        Raises:
            ApiError: 413 if the body is too large, 408 if it does not arrive in time.
        """
        limit = self._settings.max_body_bytes
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or int(length) > limit:
            raise _too_large(limit)
        body, message = bytearray(), _GONE
        with anyio.move_on_after(self._settings.body_timeout_s) as in_time:
            while (message := await receive())["type"] == "http.request":
                body += message.get("body", b"")
                scope[BODY_BYTES] = len(body)
                if len(body) > limit:
                    raise _too_large(limit)
                if not message.get("more_body", False):
                    break
        if in_time.cancelled_caught:
            raise ApiError(408, "the body did not come in time")
        return _replay(bytes(body), message, receive)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body has more than {limit} bytes")


def require_key(settings: Settings, authorization: str) -> None:
    """Raise `ApiError` 401 if keys are required and the header has none of them."""
    if not settings.key_hashes:
        return
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise ApiError(401, "an API key is needed: authorization: Bearer KEY")
    given = key_hash(key.strip())
    # No early exit: the time must not reveal a key.
    if not sum(hmac.compare_digest(given, known) for known in settings.key_hashes):
        raise ApiError(401, "this API key is not known", code="invalid_api_key")


def _take_as_json(scope: Scope) -> None:
    """Set the content type to JSON: clients of Triton and Ollama often send a wrong one."""
    others = [header for header in scope["headers"] if header[0] != b"content-type"]
    scope["headers"] = [*others, (b"content-type", b"application/json")]


def _replay(body: bytes, last: Message, receive: Receive) -> Receive:
    pending = [
        last if last["type"] == "http.disconnect" else {"type": "http.request", "body": body}
    ]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed


async def _discard(headers: Headers, receive: Receive) -> None:
    """Read the rest of a rejected body, up to a limit; clients read the error only afterwards."""
    if "content-length" not in headers and "transfer-encoding" not in headers:
        return
    if headers.get("expect", "").lower() == "100-continue":
        return
    left = _DISCARD_BYTES
    with anyio.move_on_after(_DISCARD_S):
        while left > 0 and (message := await receive())["type"] == "http.request":
            left -= len(message.get("body", b""))
            if not message.get("more_body", False):
                break
