"""An in-process server: idle connections are closed, and all tasks end."""

from __future__ import annotations

import http.client
import json
import socket
import time

import pytest
from inside_server import serving_inside

from edgellm.tools.serve.engines.loading import Loading
from edgellm.tools.serve.engines.models import read_models
from edgellm.tools.serve.http import connection
from edgellm.tools.serve.settings import Settings

LONG = {"prompt": "w20 w30", "max_tokens": 4000, "temperature": 0, "stream": True}
HEAD = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture
def inside(roomy_engine):
    settings = Settings(queue_size=4, request_timeout_s=60)
    with serving_inside(read_models([f"tiny={roomy_engine}"]), Loading(), settings) as server:
        yield server


def _connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def test_idle_connections_are_closed(inside, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_S", 1.0)
    with _connect(inside) as silent, _connect(inside) as half, _connect(inside) as second:
        half.sendall(HEAD[:20])
        second.sendall(HEAD)
        answer = b""
        while b"}" not in answer:
            answer += second.recv(4096)
        second.sendall(HEAD[:20])  # uvicorn's own limit ends here
        for _ in range(4):
            time.sleep(0.05)
            half.sendall(b"x")  # dribbling prolongs nothing
        assert [client.recv(1) for client in (silent, half, second)] == [b""] * 3


def test_a_response_may_take_longer_than_the_head_limit(inside, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_S", 0.02)
    client = http.client.HTTPConnection("127.0.0.1", inside.port, timeout=60)
    body = json.dumps({**LONG, "max_tokens": 800})
    client.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    began = time.monotonic()
    assert b"[DONE]" in client.getresponse().read()
    assert time.monotonic() - began > 0.05
    client.close()


def test_no_task_is_left(inside):
    before = inside.tasks()
    body = json.dumps(LONG).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    whole = f"{head}content-type: application/json\r\n\r\n".encode() + body
    for sent, reads in ((whole, 1), (whole, 0), (whole[:-1], 0), (HEAD * 50, 1), (b"\0", 1)) * 3:
        with _connect(inside) as client:
            client.sendall(sent)
            client.recv(reads)
    end = time.monotonic() + 30
    while inside.tasks() > before and time.monotonic() < end:
        time.sleep(0.05)
    assert inside.tasks() == before
