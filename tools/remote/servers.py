"""Requests to any of several servers that have the same model; one that is gone loses nothing."""

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

_TIMEOUT_S = 600.0  # of one answer
_LONGEST_PAUSE_S = 30.0
_LATER = (408, 425, 429, 500, 502, 503, 504)  # busy, or about to stop


class RefusedError(Exception):
    """A request that no server would answer, with the reason."""


@dataclass(frozen=True, slots=True)
class Servers:
    """Where the model is, and how long it may be away."""

    urls: tuple[str, ...]
    patience_s: float = 600.0  # without any answer to a request
    sleep: Callable[[float], None] = time.sleep

    @classmethod
    def read(cls, text: str) -> Servers:
        """URLs with commas between them; raises `EdgeLLMError` for what is none."""
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

    def ask(self, path: str, body: dict[str, Any], first: int) -> dict[str, Any]:
        """The answer of the server at the place `first`, or of one after it that is there.

        Raises:
            RefusedError: the request is wrong for a server.
            EdgeLLMError: no server answered for `patience_s`.
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
                    f"no server answers; the last said {reason}",
                    hint="start one of them and give the same command again: it goes on",
                )
            self.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def model(self) -> str:
        """The model's name, which all servers that are there give.

        Raises:
            EdgeLLMError: none is there, or they have different models.
        """
        found = {url: name for url in self.urls if (name := _model(url)) is not None}
        if not found:
            raise EdgeLLMError(
                f"none of these servers answers: {', '.join(self.urls)}",
                hint="start them with edgellm-serve, or see whether their ports are open",
            )
        if len(set(found.values())) > 1:
            shown = ", ".join(f"{url} has {name}" for url, name in found.items())
            raise EdgeLLMError(
                f"the servers have different models: {shown}",
                hint="edgellm-serve --modelName gives one name to the same engine on all devices",
            )
        return next(iter(found.values()))


def _post(url: str, content: bytes) -> dict[str, Any]:
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        if error.code in _LATER:
            raise
        raise RefusedError(_reason(error)) from None


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
    """Which server each of `count` requests goes to first: they take turns."""
    return [index % len(servers.urls) for index in range(count)]
