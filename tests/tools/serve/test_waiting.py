"""Clients that wait: headers and pings of streams, health checks, proxies, long prompts."""

from __future__ import annotations

import asyncio
import json
import time

import openai
import pytest
from serve_process import serving

from edgellm.tools.serve.engines.events import Finished, Started
from edgellm.tools.serve.output import streams
from edgellm.tools.serve.output.streams import EVENTS, LINES, NAMED_EVENTS, EventStream

PATH = "/v1/completions"
LONG = {"prompt": "w20 w30", "max_tokens": 4000, "temperature": 0, "stream": True}
TURNS = [{"role": "user", "content": "w20"}]


def _send(server, body):
    connection = server.connect()
    connection.request("POST", PATH, json.dumps(body), {"content-type": "application/json"})
    return connection


def test_a_stream_has_its_headers_while_it_waits_in_the_queue(roomy_engine):
    with serving(roomy_engine, "--modelName", "tiny") as server:
        running = _send(server, LONG)
        assert running.getresponse().status == 200
        began = time.monotonic()
        waiting = _send(server, {**LONG, "max_tokens": 3})
        response = waiting.getresponse()
        assert (response.status, server.metric("vllm:num_requests_waiting")) == (200, 1)
        assert time.monotonic() - began < 5
        faulty = _send(server, {**LONG, "prompt": "w20 " * 2000})
        assert faulty.getresponse().status == 200  # it is read when its turn comes
        server.wait_until("vllm:num_requests_waiting", 2)
        running.close()
        assert response.read().endswith(b"data: [DONE]\n\n")
        waiting.close()
        faulty.close()


class _Call:
    """A call whose events come late."""

    deadline = float("inf")

    def __init__(self, events, delay_s):
        self._events, self._delay_s, self._next = events, delay_s, 0

    @property
    def has_more(self):
        return bool(self._events)

    async def arrived(self):
        clock = asyncio.get_running_loop().time
        self._next = self._next or clock() + self._delay_s  # a wait that is cut goes on
        await asyncio.sleep(self._next - clock())
        self._next = 0
        return [self._events.pop(0)]

    def close(self):
        pass


class _Writer:
    last = b"END"

    def __init__(self, framing):
        self.framing = framing

    def begin(self, started):
        return [{"type": "begin", "prompt": started.prompt_tokens}]

    def end(self, figures):
        assert figures.finish_reason == "stop"
        return [{"type": "end"}]


@pytest.mark.parametrize(
    ("framing", "has_pings"), [(EVENTS, True), (NAMED_EVENTS, True), (LINES, False)]
)
def test_a_stream_pings_while_it_waits(monkeypatch, framing, has_pings):
    monkeypatch.setattr(streams, "PING_S", 0.02)
    finished = Finished(
        finish_reason="stop",
        prompt_tokens=1,
        cached_tokens=0,
        completion_tokens=1,
        rounds=(),
        queue_ms=0,
        first_token_ms=0,
        generation_ms=0,
    )
    call = _Call([Started(1), finished], 0.18)
    sent = []

    async def send(message):
        sent.append(message)

    stream = EventStream(
        call=call, writer=_Writer(framing), first=[], path="/v1/chat/completions", headers={}
    )
    asyncio.run(stream({}, None, send))
    assert sent[0]["type"] == "http.response.start"
    bodies = [message["body"] for message in sent[1:]]
    pings = [at for at, body in enumerate(bodies) if body == b": ping\n\n"]
    assert (len(pings) >= 4) == has_pings
    events = [body for body in bodies if body != b": ping\n\n"]
    assert [b"begin" in events[0], b"end" in events[1], events[2]] == [True, True, b"END"]
    assert not has_pings or pings[0] == 0  # before the first event, and between the two
    assert not has_pings or pings[-1] > bodies.index(events[0])


def test_the_clients_skip_pings():
    """OpenAI's and Anthropic's decoders of server-sent events."""
    import anthropic._streaming
    import openai._streaming

    lines = ["", ": ping", "", 'data: {"a": 1}', "", ": ping", "", ": ping", "", "data: [DONE]", ""]
    for module in (openai._streaming, anthropic._streaming):
        decoder = module.SSEDecoder()
        found = [event for line in lines if (event := decoder.decode(line)) is not None]
        assert [event.data for event in found if event.data] == ['{"a": 1}', "[DONE]"]


def test_head_is_get_without_a_body(server):
    for path in ("/health", "/ready", "/v1/models", "/"):
        status, response, content = server.send(path, method="HEAD")
        assert (status, content) == (200, b""), path
        assert response.headers["content-length"] != "0"
    assert server.send("/v1/chat/completions", method="HEAD")[0] == 405
    assert server.send("/nothing", method="HEAD")[0] == 404


def test_the_host_name_of_a_proxy_has_a_remedy(server):
    status, found = server.json("/v1/models", host="llm.example.com")
    assert status == 403
    assert "proxy_set_header Host localhost" in found["error"]["message"]


def test_a_prompt_that_is_too_long_has_openais_code(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    turns = [{"role": "user", "content": "w20 " * 2000}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=turns, stream=stream)
        assert caught.value.code == "context_length_exceeded"
    status, found = server.json("/v1/messages", {"messages": turns, "max_tokens": 3})
    assert (status, found["error"]["message"][:19]) == (400, "prompt is too long:")
