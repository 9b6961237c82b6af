"""Client of several servers with the same model; retries requests of a lost server."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from edgellm.core.errors import EdgeLLMError

_TIMEOUT_S = 600.0  # of one request
_MAX_PAUSE_S = 30.0
_RETRIED = (408, 425, 429, 500, 502, 503, 504)  # busy, or about to stop


class RejectedError(Exception):
    """A server rejects a request as invalid; the message is its reason."""


@dataclass(frozen=True, slots=True)
class Servers:
    """URLs of the servers, and the time to wait for them."""

    urls: tuple[str, ...]
    patience_s: float = 600.0  # limit of retries of one request
    sleep: Callable[[float], None] = time.sleep

    @classmethod
    def read(cls, text: str) -> Servers:
        """Parse comma-separated URLs; raise `EdgeLLMError` if one is invalid."""
        urls = tuple(url.strip().rstrip("/") for url in text.split(",") if url.strip())
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise EdgeLLMError(
                    f"--ray {url}: not the address of a server",
                    hint="give them as http://HOST:8000,http://OTHER:8000",
                )
        if len(set(urls)) < len(urls) or not urls:
            raise EdgeLLMError("--ray takes different servers", hint="http://HOST:8000,...")
        return cls(urls)

    def post(self, path: str, body: dict[str, Any], first: int) -> dict[str, Any]:
        """Return the response of server number `first`, or of the next one that responds.

        Raises:
            RejectedError: a server rejects the request as invalid.
            EdgeLLMError: no server responds within `patience_s`.
        """
        content = json.dumps(body).encode()
        deadline, pause, reason = time.monotonic() + self.patience_s, 1.0, ""
        while True:
            for place in range(len(self.urls)):
                url = self.urls[(first + place) % len(self.urls)]
                try:
                    return _post(url + path, content)
                except (OSError, http.client.HTTPException, ValueError) as error:
                    reason = f"{url}: {error}"
            if time.monotonic() + pause > deadline:
                raise EdgeLLMError(
                    f"no server responds; the last error: {reason}",
                    hint="start one of them, then run the same command again to continue",
                )
            self.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_S)

    def model(self) -> str:
        """Return the name of the model, the same on all servers that respond.

        Raises:
            EdgeLLMError: no server responds, or they have different models.
        """
        found = {url: name for url in self.urls if (name := _model(url)) is not None}
        if not found:
            raise EdgeLLMError(
                f"none of these servers responds: {', '.join(self.urls)}",
                hint="start them with edgellm-serve, or check whether their ports are open",
            )
        if len(set(found.values())) > 1:
            shown = ", ".join(f"{url} has {name}" for url, name in found.items())
            raise EdgeLLMError(
                f"the servers have different models: {shown}",
                hint="give the engine one name on all devices: edgellm-serve --modelName",
            )
        return next(iter(found.values()))


def _post(url: str, content: bytes) -> dict[str, Any]:
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        if error.code in _RETRIED:
            raise
        raise RejectedError(_reason(error)) from None


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"


def _model(url: str) -> str | None:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
            return str(json.loads(response.read())["data"][0]["id"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError, TypeError):
        return None


def places(count: int, servers: Servers) -> Sequence[int]:
    """Return the first server of each of `count` requests, round robin."""
    return [index % len(servers.urls) for index in range(count)]
