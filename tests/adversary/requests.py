"""Hostile requests to every endpoint of a running server, over plain sockets.

Verdict: a correct response or a status 4xx with a JSON error, never 500. The server survives,
its next response is the reference, and its memory is bounded.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adversary.attack import Finding, require
from adversary.mutations import break_bytes, break_json
from adversary.workshop import Workshop
from serve_process import ServerProcess

SHARE = 80
MODEL = "tiny"
MAX_GROWTH_BYTES = 256 << 20
PATIENCE_S = 60.0
_TURNS = [{"role": "user", "content": "w1 w2"}]
_TOOL = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": MODEL,
        "messages": _TURNS,
        "max_tokens": 4,
        "temperature": 0,
        "stop": ["w9"],
        "logprobs": True,
        "top_logprobs": 2,
        "stream": False,
        "seed": 1,
        "tool_choice": "auto",
        "tools": [{"type": "function", "function": _TOOL}],
        "logit_bias": {"5": 1.5},
        "stream_options": None,
        "response_format": {"type": "text"},
    },
    "/v1/completions": {
        "model": MODEL,
        "prompt": "w1 w2",
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": 2,
        "echo": False,
        "top_p": 0.9,
        "stop": "w9",
    },
    "/v1/messages": {
        "model": MODEL,
        "messages": _TURNS,
        "max_tokens": 4,
        "system": "w3",
        "temperature": 0,
        "stop_sequences": ["w9"],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
    },
    "/v1/responses": {
        "model": MODEL,
        "input": "w1",
        "max_output_tokens": 16,
        "instructions": "w2",
        "text": {"format": {"type": "text"}},
    },
    "/api/chat": {
        "model": MODEL,
        "messages": _TURNS,
        "stream": False,
        "options": {"num_predict": 4, "temperature": 0, "stop": ["w9"]},
        "keep_alive": "5m",
    },
    "/api/generate": {
        "model": MODEL,
        "prompt": "w1",
        "stream": False,
        "options": {"num_predict": 4},
    },
    "/tokenize": {"model": MODEL, "prompt": "w1 w2"},
    "/detokenize": {"model": MODEL, "tokens": [5, 6]},
}
_HEADERS = (
    "content-type: text/plain",
    "content-type: application/json; charset=utf-16",
    "content-type:",
    "content-encoding: gzip",
    "accept: text/html",
    "accept-encoding: \xff",
    "expect: 100-continue",
    "authorization: Bearer \x00",
    "x-request-id: " + "a" * 9000,
    "connection: upgrade",
    "upgrade: websocket",
    "transfer-encoding: gzip",
    "range: bytes=0-1",
    "cookie: " + "b" * 9000,
    "host: evil.example",
    "host:",
    "content-length: -1",
    "content-length: 99999999999999999999",
    "content-length: 1e3",
    "transfer-encoding: chunked, chunked",
    "if-match: *",
)
_METHODS = (
    "GET",
    "POST",
    "PUT",
    "DELETE",
    "HEAD",
    "OPTIONS",
    "PATCH",
    "TRACE",
    "get",
    "\x00",
    "X" * 9000,
)
_PATHS = (
    "/%00",
    "/..%2f..%2fetc/passwd",
    "//",
    "/v1/models/%ff",
    "/v1/models/" + "a" * 9000,
    "/v1/chat/completions?model=x&" + "a=b&" * 2000,
    "*",
    "http://evil.example/",
    "/#",
    "/v2/models/tiny/infer",
    "/\xc3\xa9",
    "/v1/models/..",
    "/page/%2e%2e/%2e%2e",
)


class Victim:
    """A server, its reference response and its initial memory."""

    def __init__(self, engine: Path) -> None:
        self.server = ServerProcess(engine, "--modelName", MODEL, "--queueSize", 8)
        document = json.loads(self.server.send("/openapi.json")[2])
        self.operations = sorted(
            (path, method.upper()) for path, found in document["paths"].items() for method in found
        )
        self.reference = self.answer()
        for _ in range(3):
            self.answer()
        self.rss_bytes = self.server.rss_bytes()

    def answer(self) -> str:
        body = {"prompt": "w33 w44", "max_tokens": 8, "temperature": 0, "model": MODEL}
        status, found = self.server.json("/v1/completions", body)
        require(status == 200, f"an honest client gets {status}: {found}")
        return found["choices"][0]["text"]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE_S)

    def close(self) -> None:
        self.server.process.kill()
        self.server.process.communicate()


@functools.cache
def _victim(workshop: Workshop) -> Victim:
    victim = Victim(workshop.lettered_engine)
    workshop.on_close(victim.close)
    return victim


def attack(workshop: Workshop, number: int, rng: random.Random, folder: Path) -> str:
    victim = _victim(workshop)
    kind = sorted(ACTS)[number % len(ACTS)]
    sent: list[bytes] = []
    try:
        outcome = ACTS[kind](victim, rng, sent)
        require(victim.server.process.poll() is None, "the server is gone")
        found = victim.answer()
        require(found == victim.reference, f"the next answer is {found!r}")
        growth = victim.server.rss_bytes() - victim.rss_bytes
        require(growth < MAX_GROWTH_BYTES, f"memory grew by {growth} bytes")
    except (Finding, OSError) as error:
        (folder / "sent").write_bytes(b"\n\n".join(sent))
        raise Finding(
            f"{kind}: {error}; {folder}/sent begins {sent[0][:300] if sent else b''!r}"
        ) from None
    return f"{kind}: {outcome}"


def _request(path: str, method: str, body: bytes, *lines: str, length: int | None = None) -> bytes:
    known = {line.partition(":")[0] for line in lines}
    fixed = {
        "host": "localhost",
        "content-type": "application/json",
        "content-length": str(len(body) if length is None else length),
    }
    rest = [f"{name}: {value}" for name, value in fixed.items() if name not in known]
    head = "\r\n".join([f"{method} {path} HTTP/1.1", *lines, *rest, "", ""])
    return head.encode("latin-1", "replace") + body


def _operation(victim: Victim, rng: random.Random) -> tuple[str, str, Any]:
    path, method = rng.choice([*victim.operations, *((path, "POST") for path in BODIES)])
    content = BODIES.get(path, {"model": MODEL, "input": "w1", "query": "w1", "documents": ["w2"]})
    filled = path.replace("{name}", MODEL).replace("{model}", MODEL).replace("{version}", "1")
    return filled, method, content


def _body(content: Any, rng: random.Random) -> bytes:
    if rng.random() < 0.75:
        return break_json(content, rng)[1].encode("utf-8", "surrogatepass")
    return break_bytes(json.dumps(content).encode(), rng)[1]


# ------------------------------------------------------------------------------------ acts
def _hostile_body(victim: Victim, rng: random.Random, sent: list[bytes]) -> str:
    path, method, content = _operation(victim, rng)
    sent.append(_request(path, method, _body(content, rng)))
    return _judged(victim, sent[-1])


def _hostile_head(victim: Victim, rng: random.Random, sent: list[bytes]) -> str:
    path, method, content = _operation(victim, rng)
    if rng.random() < 0.4:
        path = rng.choice(_PATHS)
    if rng.random() < 0.4:
        method = rng.choice(_METHODS)
    lines = rng.sample(_HEADERS, rng.randrange(4))
    sent.append(_request(path, method, json.dumps(content).encode(), *lines))
    return _judged(victim, sent[-1], is_http=False)


def _hang_up(victim: Victim, rng: random.Random, sent: list[bytes]) -> str:
    """Close the connection in the middle of a request or of a stream."""
    path = rng.choice(sorted(BODIES))
    content = {**BODIES[path], "stream": True, "max_tokens": 200}
    whole = _request(path, "POST", json.dumps(content).encode())
    sent.append(whole[: rng.randrange(1, len(whole) + 1)])
    with victim.connect() as connection:
        connection.sendall(sent[-1])
        if sent[-1] == whole or rng.random() < 0.3:
            time.sleep(rng.random() * 0.1)
        if rng.random() < 0.5:  # a reset instead of an end
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return "gone"


def _half_open(victim: Victim, rng: random.Random, sent: list[bytes]) -> str:
    """Many idle connections, which stay open during a valid request."""
    with contextlib.ExitStack() as stack:
        for _ in range(rng.choice([5, 40, 150])):
            connection = stack.enter_context(victim.connect())
            whole = _request("/v1/completions", "POST", b"{}", length=rng.choice([2, 50, 10**6]))
            sent.append(whole[: rng.randrange(len(whole))])
            connection.sendall(sent[-1])
        found = victim.answer()
        require(found == victim.reference, f"with half-open connections: {found!r}")
    return "served"


def _many(victim: Victim, rng: random.Random, sent: list[bytes]) -> str:
    """Several concurrent requests, some of them hostile; then their responses."""
    with contextlib.ExitStack() as stack:
        waiting = []
        for _ in range(rng.randrange(2, 12)):
            path, method, content = _operation(victim, rng)
            body = _body(content, rng) if rng.random() < 0.5 else json.dumps(content).encode()
            sent.append(_request(path, method, body))
            connection = stack.enter_context(victim.connect())
            with contextlib.suppress(ConnectionError):
                connection.sendall(sent[-1])
            waiting.append(connection)
        for connection, request in zip(waiting, sent, strict=True):
            _require_answer(connection, request)
    return "answered"


def _pipelined(victim: Victim, rng: random.Random, sent: list[bytes]) -> str:
    """Several requests in one packet; the first response counts."""
    for _ in range(rng.randrange(2, 6)):
        path, method, content = _operation(victim, rng)
        sent.append(_request(path, method, _body(content, rng)))
    return _judged(victim, b"".join(sent), is_http=False)


def _junk(victim: Victim, rng: random.Random, sent: list[bytes]) -> str:
    """Bytes that are not HTTP."""
    data = rng.choice(
        [
            rng.randbytes(200),
            b"\0" * 200,
            b"\r\n" * 100,
            b"GET",
            b"\x16\x03\x01" + rng.randbytes(99),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"POST / HTTP/9.9\r\n\r\n",
            b"A" * 100_000,
        ]
    )
    sent.append(data + b"\r\n\r\n")
    return _judged(victim, sent[-1], is_http=False)


ACTS: dict[str, Callable[[Victim, random.Random, list[bytes]], str]] = {
    "body": _hostile_body,
    "body 2": _hostile_body,
    "body 3": _hostile_body,
    "head": _hostile_head,
    "hang up": _hang_up,
    "half open": _half_open,
    "many": _many,
    "pipelined": _pipelined,
    "junk": _junk,
}


def _judged(victim: Victim, data: bytes, *, is_http: bool = True) -> str:
    with victim.connect() as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        return _require_answer(connection, data, is_http=is_http)


def _require_answer(connection: socket.socket, request: bytes, *, is_http: bool = True) -> str:
    """The status; for bytes that are not HTTP also silence or a closed connection."""
    found = _received(connection)
    if not found and not is_http:
        return "closed"
    require(found.startswith(b"HTTP/1.1 "), f"no HTTP comes back: {found[:200]!r}")
    head, _, body = found.partition(b"\r\n\r\n")
    status = int(head[9:12])
    require(status < 500 or status in (501, 503), f"status {status}: {body[:500]!r}")
    require(b"Traceback" not in body, f"a traceback: {body[:500]!r}")
    if is_http and status >= 400 and not request.startswith(b"HEAD"):
        require(b"application/json" in head.lower(), f"no JSON in {status}: {found[:500]!r}")
        json.loads(body)
    return str(status)


def _received(connection: socket.socket) -> bytes:
    """Receive until the response is complete, the server closes, or it is silent."""
    found = bytearray()
    connection.settimeout(PATIENCE_S)
    with contextlib.suppress(TimeoutError, ConnectionError):
        while piece := connection.recv(1 << 16):
            found += piece
            head, separator, body = found.partition(b"\r\n\r\n")
            if separator and _is_whole(head.lower(), body):
                break
    return bytes(found)


def _is_whole(head: bytes, body: bytes) -> bool:
    if b"transfer-encoding: chunked" in head:
        return body.endswith(b"0\r\n\r\n")
    for line in head.split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) >= int(line.partition(b":")[2])
    return True
