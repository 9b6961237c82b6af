"""The log: a line for each request, its tokens, and why an output ended early."""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone

import openai
from serve_process import ServerProcess

PROMPT = "w20 w21 w22"
LINE = re.compile(
    r"INFO: (?P<method>\w+) (?P<path>\S+) (?P<status>\d+)"
    r"(, (?P<prompt>\d+) \+ (?P<output>\d+) tokens)?, \d+ ms( \((?P<ending>.*)\))?"
)


def _ended(server: ServerProcess) -> list[str]:
    code, errors = server.end()
    assert code == 0
    return errors.splitlines()


def test_each_request_is_one_line(roomy_engine):
    server = ServerProcess(roomy_engine, "--logLevel", "info", "--modelName", "m")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    usages = []
    for count in (1, 3):
        done = client.completions.create(model="m", prompt=PROMPT, max_tokens=5, n=count)
        usages.append(done.usage)
    stream = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": PROMPT}], max_tokens=6, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    usages.append([*stream][-1].usage)
    server.send("/v1/nothing%0aINFO:%20forged")
    server.send("/v1/completions?key=secret", {"prompt": PROMPT, "max_tokns": 3})
    server.send("/health")
    stream = client.completions.create(model="m", prompt=PROMPT, max_tokens=3000, stream=True)
    next(iter(stream))
    stream.close()
    server.wait_until("vllm:num_requests_running", 0)
    lines = _ended(server)
    # The line of the client that left may come after it.
    lines.remove("INFO: stopping: running requests have 60 s to finish")
    found = [LINE.fullmatch(line).groupdict() for line in lines]
    places = [(one["method"], one["path"], one["status"]) for one in found]
    completion, chat = "/v1/completions", "/v1/chat/completions"
    assert places == [
        ("POST", completion, "200"), ("POST", completion, "200"), ("POST", chat, "200"),
        ("GET", "/v1/nothing%0AINFO:%20forged", "404"), ("POST", completion, "400"),
        ("POST", completion, "200"),
    ]  # fmt: skip
    for one, usage in zip(found, usages, strict=False):
        counts = (int(one["prompt"]), int(one["output"]))
        assert counts == (usage.prompt_tokens, usage.completion_tokens)
    assert found[4]["prompt"] is None
    assert found[5]["ending"] == "the client disconnected"
    assert int(found[5]["output"]) < 3000


def test_json_lines_have_fields(roomy_engine):
    server = ServerProcess(roomy_engine, "--logFormat", "json", "--logLevel", "debug")
    server.json("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "temperature": 0})
    server.send("/health")
    first, probe, last = map(json.loads, _ended(server))
    moment = datetime.fromisoformat(first.pop("time").replace("Z", "+00:00"))
    assert abs((datetime.now(timezone.utc) - moment).total_seconds()) < 60
    assert first.pop("ms") > 0
    assert first.pop("message").startswith("POST /v1/completions 200, 3 + 4 tokens, ")
    assert first == {
        "level": "info", "method": "POST", "path": "/v1/completions", "status": 200,
        "prompt_tokens": 3, "output_tokens": 4,
    }  # fmt: skip
    assert (probe["path"], probe["level"]) == ("/health", "debug")
    assert "status" not in last


def test_a_stop_tells_the_client_and_the_log(roomy_engine):
    server = ServerProcess(roomy_engine, "--logLevel", "info", "--drainTimeout", 0)
    connection = server.connect()
    body = {"prompt": PROMPT, "max_tokens": 3000, "stream": True}
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
    )
    response = connection.getresponse()
    response.readline()
    lines = _ended(server)
    assert b"the server was stopped" in response.read()
    assert lines[-1].endswith("ms (the server was stopped)")
