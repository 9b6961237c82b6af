"""Many clients, disconnects, killed clients, slow readers, and shutdown."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from serve_process import ServerProcess, serving

from edgellm.device_runtime import SamplingParams

PATH = "/v1/completions"
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"

# An answer of this prompt goes on for seconds: no end token comes.
TURNS = [{"role": "user", "content": "w20 w30"}]
LONG = {"prompt": "w20 w30", "max_tokens": 4000, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def small(roomy_engine):
    """A server in which two requests may wait."""
    with serving(roomy_engine, "--queueSize", 2, "--modelName", "tiny") as process:
        yield process


def _begin(server: ServerProcess, body: dict) -> http.client.HTTPConnection:
    """Send a request without reading the response."""
    connection = server.connect()
    content = json.dumps(body).encode()
    connection.request("POST", PATH, content, {"content-type": "application/json"})
    return connection


def _is_idle(server: ServerProcess) -> None:
    server.wait_until(WAITING, 0)
    server.wait_until(RUNNING, 0)


def test_a_full_queue_rejects_with_retry_after(small):
    running = _begin(small, LONG)
    assert running.getresponse().status == 200  # headers come with the first token
    waiting = [_begin(small, {**LONG, "max_tokens": 4}) for _ in range(2)]
    small.wait_until(WAITING, 2)
    refused_before = small.metric("edgellm:request_refused_total")
    status, response, content = small.send(PATH, {**LONG, "max_tokens": 4})
    assert status == 429
    assert 1 <= int(response.headers["retry-after"]) <= 60
    assert json.loads(content)["error"]["code"] == "queue_full"
    assert small.metric("edgellm:request_refused_total") == refused_before + 1
    running.close()  # the first leaves, the others are served
    for connection in waiting:
        assert b"[DONE]" in connection.getresponse().read()
    _is_idle(small)


def test_a_client_that_leaves_stops_the_engine_and_one_in_the_queue_is_forgotten(small):
    """The tokens of a stream are counted while they are generated."""
    counted = small.metric("vllm:generation_tokens_total")
    running = _begin(small, LONG)
    response = running.getresponse()
    response.read(200)
    assert small.metric("vllm:generation_tokens_total") > counted
    assert small.metric(RUNNING) == 1
    waiting = _begin(small, LONG)
    small.wait_until(WAITING, 1)
    waiting.close()
    small.wait_until(WAITING, 0)
    generated = small.metric("vllm:generation_tokens_total")
    response.close()
    running.close()
    _is_idle(small)
    assert small.metric("vllm:generation_tokens_total") - generated < 3900
    assert small.json(PATH, {**LONG, "stream": False, "max_tokens": 3})[0] == 200


def test_a_client_without_streaming_can_disconnect(small):
    connection = _begin(small, {**LONG, "stream": False})
    small.wait_until(RUNNING, 1)
    generated = small.metric("vllm:generation_tokens_total")
    connection.close()
    _is_idle(small)
    assert small.metric("vllm:generation_tokens_total") - generated < 3900


def test_clients_that_are_killed(small):
    code = (
        "import json, sys, urllib.request\n"
        "request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(),"
        " {'content-type': 'application/json'})\n"
        "answer = urllib.request.urlopen(request)\n"
        "answer.read(100)\n"
        "print('reads', flush=True)\n"
        "answer.read()\n"
    )
    command = [sys.executable, "-c", code, small.url + PATH, json.dumps(LONG)]
    for _ in range(3):
        client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert client.stdout.readline() == "reads\n"
        client.send_signal(signal.SIGKILL)
        client.wait()
        client.stdout.close()
        _is_idle(small)
    assert small.json(PATH, {**LONG, "stream": False, "max_tokens": 3})[0] == 200


def test_a_slow_reader_delays_no_other_client(small):
    """The engine continues; unread output waits in the socket and the server."""
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", small.port))
        body = json.dumps({**LONG, "max_tokens": 1500, "logprobs": 20}).encode()
        head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        slow.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert slow.recv(64).startswith(b"HTTP/1.1 200")
        _is_idle(small)
        assert small.json(PATH, {**LONG, "stream": False, "max_tokens": 3})[0] == 200
        content = bytearray()
        while not content.endswith(b"0\r\n\r\n"):
            content += slow.recv(1 << 16)
    assert content.count(b"data: ") == 1502  # tokens, the end, [DONE]


def test_a_slow_reader_is_cut_off_when_its_time_is_over(roomy_engine):
    with serving(roomy_engine, "--totalTimeout", 1) as server:
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", server.port))
            body = json.dumps({**LONG, "max_tokens": 600, "logprobs": 20}).encode()
            head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            slow.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            time.sleep(2)
            assert server.json("/health")[0] == 200
        server.expects("WARNING: a client did not read its output in time")


# What each protocol says of an output that was cut: path, body, place of reason and text.
CUT = {
    "completions": (
        PATH,
        {"prompt": "w20 w30"},
        "choices.0.finish_reason=length",
        "choices.0.text",
    ),
    "chat": (
        "/v1/chat/completions",
        {"messages": TURNS},
        "choices.0.finish_reason=length",
        "choices.0.message.content",
    ),
    "responses": (
        "/v1/responses",
        {"input": "w20 w30", "max_output_tokens": 4000},
        "incomplete_details.reason=max_output_tokens",
        "output.0.content.0.text",
    ),
    "anthropic": (
        "/v1/messages",
        {"messages": TURNS},
        "stop_reason=max_tokens",
        "content.0.text",
    ),
    "ollama": (
        "/api/chat",
        {"messages": TURNS, "options": {"num_predict": 4000}},
        "done_reason=length",
        "message.content",
    ),
    "triton": ("/v2/models/tiny/generate", {"text_input": "w20 w30"}, "", "text_output"),
}


@pytest.fixture(scope="module")
def hurried(roomy_engine):
    """A server whose requests exceed their time limit."""
    flags = "--requestTimeout", 0.3, "--modelName", "tiny"
    with serving(roomy_engine, *flags) as process:
        yield process


def _at(found: object, path: str) -> object:
    for part in path.split("."):
        found = found[int(part)] if part.isdigit() else found[part]
    return found


@pytest.mark.parametrize("protocol", CUT)
def test_an_output_that_times_out_is_truncated(hurried, protocol):
    path, body, reason, text = CUT[protocol]
    if protocol != "triton":  # which names the model in its path
        body = {"model": "tiny", "stream": False, **body}
    if protocol not in ("responses", "ollama"):
        body = {**body, "temperature": 0, "max_tokens": 4000}
    status, found = hurried.json(path, body)
    assert status == 200, found
    if reason:
        where, _, said = reason.partition("=")
        assert _at(found, where) == said
    words = _at(found, text).split()
    assert 1 < len(words) < 4000
    if protocol == "triton":  # takes no other stream at this path
        return
    status, _, content = hurried.send(path, {**body, "stream": True})
    assert status == 200
    assert f'"{reason.partition("=")[2]}"' in content.decode()
    assert "error" not in content.decode().replace('"error":null', "")


def test_a_client_that_tries_again_is_answered_once(hurried):
    """OpenAI's client retries twice by default after 408, 409, 429 and 5xx."""
    hurried.wait_until(RUNNING, 0)
    before = hurried.metric("vllm:request_success_total")
    client = openai.OpenAI(base_url=f"{hurried.url}/v1", api_key="none")
    chat = client.chat.completions
    found = chat.create(model="tiny", messages=TURNS, max_tokens=4000, temperature=0)
    assert found.choices[0].finish_reason == "length"
    assert found.choices[0].message.content
    assert 0 < found.usage.completion_tokens < 4000
    chunks = [*chat.create(model="tiny", messages=TURNS, max_tokens=4000, stream=True)]
    assert chunks[-1].choices[0].finish_reason == "length"
    several = client.completions.create(model="tiny", prompt=["w20", "w30"], max_tokens=4000)
    assert [one.finish_reason for one in several.choices] == ["length"] * 2
    assert hurried.metric("vllm:request_success_total") == before + 4


def test_the_total_time_cuts_an_output_as_well(roomy_engine):
    with serving(roomy_engine, "--totalTimeout", 0.5) as server:
        content = server.send(PATH, LONG)[2].decode()
        assert '"finish_reason":"length"' in content
        assert content.endswith("data: [DONE]\n\n")
        _is_idle(server)
        assert server.metric("vllm:request_success_total") == 1


def test_many_at_once_get_their_own_answers_or_429(small, offline):
    prompts = [f"w{20 + index} w{30 + index % 7} w{50 + index % 11}" for index in range(24)]

    def expected(prompt):
        sampling = SamplingParams(temperature=0.8, top_p=1.0, top_k=0, seed=len(prompt))
        answer = offline.generate(prompt, sampling=sampling, max_generate_length=10)
        list(answer)
        return answer.text

    def ask(prompt):
        body = {"prompt": prompt, "max_tokens": 10, "temperature": 0.8, "seed": len(prompt)}
        return small.json(PATH, body)

    answers = [expected(prompt) for prompt in prompts]
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(ask, prompts))
    assert {status for status, _ in found} == {200, 429}
    for (status, body), answer in zip(found, answers, strict=True):
        assert status == 429 or body["choices"][0]["text"] == answer


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_lets_all_requests_finish(roomy_engine, stop):
    server = ServerProcess(roomy_engine)
    body = {**LONG, "max_tokens": 400}
    connections = [_begin(server, body) for _ in range(3)]
    server.wait_until(WAITING, 2)
    kept = server.connect()
    kept.request("GET", "/ready")
    assert kept.getresponse().read() == b'{"status":"ready"}'
    server.process.send_signal(stop)
    for connection in connections:
        content = connection.getresponse().read()
        assert content.endswith(b"data: [DONE]\n\n")
        assert b'"finish_reason":"length"' in content
        assert content.count(b"data: ") > 350  # some tokens have no text
    printed, errors = server.process.communicate(timeout=60)
    assert (server.process.returncode, errors) == (0, "")
    assert printed == "stopped\n"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))


@pytest.mark.parametrize("second", [True, False])
def test_the_end_does_not_wait_for_ever(roomy_engine, second):
    server = ServerProcess(roomy_engine, "--drainTimeout", 60 if second else 1)
    connection = _begin(server, LONG)
    response = connection.getresponse()
    response.read(50)
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    if second:
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
    _, errors = server.process.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert (server.process.returncode, errors) == (0, "")
    assert b"the server was stopped" in response.read()


def test_files_and_threads_do_not_pile_up(small):
    def state():
        folder = f"/proc/{small.process.pid}"
        return len(os.listdir(f"{folder}/fd")), len(os.listdir(f"{folder}/task"))

    def rounds(count):
        for _ in range(count):
            _begin(small, LONG).close()
            connection = _begin(small, LONG)
            connection.getresponse().read(30)
            connection.close()
            small.json(PATH, {**LONG, "stream": False, "max_tokens": 2})
        _is_idle(small)

    rounds(3)
    before = state()
    rounds(10)
    assert abs(state()[0] - before[0]) <= 2
    assert state()[1] == before[1]


def test_two_threads_share_one_connection_each(small):
    """Connections are kept for further requests."""
    found = []

    def talk():
        connection = small.connect()
        for _ in range(3):
            content = json.dumps({"prompt": "w20", "max_tokens": 2}).encode()
            connection.request("POST", PATH, content, {"content-type": "application/json"})
            found.append(connection.getresponse().read())
        connection.close()

    threads = [threading.Thread(target=talk) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert all(b'"choices"' in content for content in found)


def _assert_prompts_grow_together(server):
    """The texts of one request with several choices equal those of single requests."""
    prompts = [f"w{20 + at} w33" for at in range(4)]
    common = {"max_tokens": 30, "temperature": 0, "ignore_eos": True}
    alone = [server.json(PATH, {"prompt": one, **common})[1] for one in prompts]
    before = server.metric("edgellm:batch_size_count")
    together = server.json(PATH, {"prompt": prompts, **common})[1]
    assert server.metric("edgellm:batch_size_count") - before < 3 * 30
    assert [one["text"] for one in together["choices"]] == [
        one["choices"][0]["text"] for one in alone
    ]
    assert together["usage"]["completion_tokens"] == 4 * 30
    content = server.send(PATH, {"prompt": prompts, "stream": True, **common})[2]
    lines = [line[6:] for line in content.splitlines() if line.startswith(b"data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    said, order = [""] * 4, [choice["index"] for choice in choices]
    for choice in choices:
        said[choice["index"]] += choice["text"]
    assert said == [one["text"] for one in together["choices"]]
    assert sum(a != b for a, b in itertools.pairwise(order)) > 30  # they take turns


def test_a_batch_of_three_serves_clients_concurrently(shared_engine):
    """Each output equals the output alone: with drafts, sampling, or stop strings."""
    bodies = [
        {
            "prompt": f"w{20 + at} w30 w{40 + at}", "max_tokens": 20 + at, "seed": at,
            "temperature": at % 3 / 2, "stop": ["w77"], "priority": at % 2, "logprobs": 1,
        }
        for at in range(9)
    ]  # fmt: skip
    with serving(shared_engine, "--spec", "auto", "--maxStallMs", 20) as server:
        alone = [server.json(PATH, body)[1]["choices"] for body in bodies]
        assert server.metric("edgellm:batch_size_sum") == server.metric("edgellm:batch_size_count")
        passes = server.metric("edgellm:batch_size_count")
        with ThreadPoolExecutor(9) as pool:
            found = list(pool.map(lambda body: server.json(PATH, body)[1]["choices"], bodies * 2))
        for one, expected in zip(found, alone * 2, strict=True):
            assert one[0]["text"] == expected[0]["text"]
            assert one[0]["logprobs"]["tokens"] == expected[0]["logprobs"]["tokens"]
        assert server.metric("edgellm:batch_size_count") < 3 * passes
        assert server.metric("vllm:kv_cache_usage_perc") < 0.5
        _assert_prompts_grow_together(server)
        assert server.json(PATH, {**bodies[0], "priority": -1})[0] == 400
