"""What hostile clients do, again and again: nothing crashes, nothing is left, all are served."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time

import pytest
from serve_process import ServerProcess, serving
from vlm_engines import build_vlm

PATH, CHAT = "/v1/completions", "/v1/chat/completions"
KEY = "a-key-of-the-robot"
# An answer of this prompt goes on for seconds: no end token comes.
LONG = {"prompt": "w20 w30", "max_tokens": 4000, "temperature": 0, "stream": True}
GROWTH_BYTES = 8 << 20
SLACK_BYTES = 1 << 20
TIMES = 9  # 1 MB that an act leaves each time is more than `GROWTH_BYTES`
RETURN_S = 5  # within it the server gives memory of large requests back
LONGEST_S = 20


def _head(path: str, *lines: str, method: str = "POST") -> bytes:
    fixed = [f"{method} {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
    return "\r\n".join([*fixed, *lines, "", ""]).encode()


def _request(path: str, body: object, *lines: str) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return _head(path, f"content-length: {len(content)}", *lines) + content


def _chat(content: object) -> dict:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2}


def _connect(server: ServerProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=LONGEST_S)


def _answer(server: ServerProcess, request: bytes) -> bytes:
    """What comes back at once."""
    with _connect(server) as connection:
        connection.sendall(request)
        return connection.recv(1 << 16)


def _kill(server):
    code = (
        "import socket, sys\n"
        "c = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "c.sendall(sys.argv[2].encode())\n"
        "assert c.recv(400).startswith(b'HTTP/1.1 200')\n"
        "print('reads', flush=True)\n"
        "while c.recv(400): pass\n"
    )
    command = [sys.executable, "-I", "-S", "-c", code, str(server.port), _request(PATH, LONG)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        assert client.stdout.readline() == b"reads\n"
        client.send_signal(signal.SIGKILL)


def _reset(server):
    with _connect(server) as connection:
        connection.sendall(_request(PATH, LONG))
        connection.recv(100)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _leave_the_queue(server):
    with _connect(server) as first, _connect(server) as second:
        first.sendall(_request(PATH, LONG))
        first.recv(100)
        second.sendall(_request(PATH, LONG))
        server.wait_until("vllm:num_requests_waiting", 1)


def _read_nothing(server):
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        slow.sendall(_request(PATH, {**LONG, "max_tokens": 60, "logprobs": 20}))
        assert slow.recv(64).startswith(b"HTTP/1.1 200")
        server.wait_until("vllm:num_requests_running", 0)


def _send_and_leave(request: bytes):
    def act(server):
        with _connect(server) as connection:
            connection.sendall(request)

    return act


def _large(chunked: bool):
    piece = b" " * (1 << 20)

    def act(server):
        with _connect(server) as connection:
            length = "transfer-encoding: chunked" if chunked else "content-length: 8388608"
            connection.sendall(_head(CHAT, length))
            for _ in range(8):
                connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            connection.sendall(b"0\r\n\r\n" if chunked else b"")
            assert connection.recv(100).startswith(b"HTTP/1.1 413")

    return act


def _refused(status: int, request: bytes):
    def act(server):
        answer = _answer(server, request)
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer
        assert b"Traceback" not in answer
        assert b"root:" not in answer

    return act


def _words_of_templates(server):
    for code in ("{{ cycler.__init__.__globals__ }}", "{% for x in range(10 ** 9) %}x{% endfor %}"):
        assert server.json(CHAT, _chat(code))[0] == 200


def _pipeline(server):
    with _connect(server) as connection:
        connection.sendall(_head("/health", method="GET") * 500)


ACTS = {
    "is killed": _kill,
    "resets": _reset,
    "leaves the queue": _leave_the_queue,
    "reads nothing": _read_nothing,
    "says nothing": _send_and_leave(b""),
    "half a head": _send_and_leave(b"POST /v1/completions HTTP/1.1\r\nhost: lo"),
    "half a body": _send_and_leave(_head(CHAT, "content-length: 50") + b"{"),
    "half a chunk": _send_and_leave(_head(CHAT, "transfer-encoding: chunked") + b"ff\r\n{"),
    "large body": _large(chunked=False),
    "large chunks": _large(chunked=True),
    "no JSON": _refused(400, _request(CHAT, b'{"messages": [}')),
    "no UTF-8": _refused(400, _request(CHAT, b'{"messages": [{"content": "\xff\xfe"}]}')),
    "half a surrogate": _refused(400, _request(CHAT, _chat("\ud800"))),
    "deep": _refused(400, _request(CHAT, b'{"messages": ' + b"[" * 99_999 + b"]" * 99_999 + b"}")),
    "no sense": _refused(400, _request(PATH, {**LONG, "repetition_penalty": 1e-300})),
    # Cost once 49 s, by the square of their number: longer than a client waits here.
    "special words": _refused(400, _request(CHAT, _chat("</s> " * 50_000))),
    "long prompt": _refused(400, _request(CHAT, _chat("w20 " * 50_000))),
    "foreign name": _refused(403, _head("/v1/models", method="GET").replace(b"localhost", b"evil")),
    "way up": _refused(404, _head("/page/../../../../../etc/passwd", method="GET")),
    "coded way up": _refused(404, _head("/page/%2e%2e/%2e%2e/etc/passwd", method="GET")),
    "TLS": _refused(400, b"\x16\x03\x01\x02\x00\x01" + b"\xab" * 500 + b"\r\n\r\n"),
    "huge header": _refused(400, _head("/health", "x: " + "a" * 200_000, method="GET")),
    "two lengths": _refused(400, _head(CHAT, "content-length: 5", "content-length: 6") + b"hello"),
    "template": _words_of_templates,
    "pipeline": _pipeline,
}


class Watched:
    """A server with the number of files and threads that it has open without requests."""

    def __init__(self, server: ServerProcess, **headers: str) -> None:
        self.server, self.headers = server, headers
        for _ in range(3):  # threads that stay are there afterwards
            self.good = self.answer()
        states = [self.state() for _ in range(10) if not time.sleep(0.1)]
        self.idle = min(states)

    def answer(self) -> str:
        """That of an honest client."""
        body = {"prompt": "w33 w44", "max_tokens": 8, "temperature": 0}
        status, found = self.server.json(PATH, body, **self.headers)
        assert status == 200, found
        return found["choices"][0]["text"]

    def state(self) -> tuple[int, int]:
        """Open files and threads."""
        folder = f"/proc/{self.server.process.pid}"
        return len(os.listdir(f"{folder}/fd")), len(os.listdir(f"{folder}/task"))

    def memory(self, act, times: int, enough: int) -> int:
        """Lowest resident memory within `RETURN_S` after some acts; `enough` ends the wait."""
        for _ in range(times):
            act(self.server)
        assert self.answer() == self.good
        end = time.monotonic() + RETURN_S
        lowest = self.server.rss_bytes()
        while lowest > enough and time.monotonic() < end:
            time.sleep(0.02)
            lowest = min(lowest, self.server.rss_bytes())
        return lowest

    def survives(self, act) -> None:
        """Nothing is left of an act; a leak grows every time, what a heap keeps does not."""
        found = [self.memory(act, 2, self.server.rss_bytes() + SLACK_BYTES)]
        for _ in range(3):
            found.append(self.memory(act, TIMES, found[-1] + GROWTH_BYTES))
            if found[-1] <= found[-2] + GROWTH_BYTES:
                break
        else:
            raise AssertionError(f"memory grows by {TIMES} acts: {found}")
        end = time.monotonic() + LONGEST_S
        while (state := self.state())[0] > self.idle[0] and time.monotonic() < end:
            time.sleep(0.05)
        assert state[0] <= self.idle[0]
        assert state[1] <= self.idle[1] + 1  # a thread for fetching pictures stays for a while


@pytest.fixture(scope="module")
def victim(roomy_engine):
    with serving(roomy_engine, "--queueSize", 2, "--modelName", "tiny") as process:
        yield Watched(process)


@pytest.mark.parametrize("name", ACTS)
def test_a_hostile_client_disturbs_no_other(victim, name):
    victim.survives(ACTS[name])


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A server of pictures that asks for a key and lets clients read one folder."""
    folder = tmp_path_factory.mktemp("guarded")
    engines = build_vlm(folder, "smolvlm")
    (folder / "keys").write_text(KEY)
    (folder / "pictures").mkdir()
    flags = ["--multimodalEngineDir", engines.visual_engine, "--apiKeyFile", folder / "keys"]
    with serving(engines.engine, *flags, "--allowImageFolder", folder / "pictures") as process:
        yield Watched(process, authorization=f"Bearer {KEY}")


def _picture(url: str) -> bytes:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "w1"}]
    return _request(CHAT, _chat(parts), f"authorization: Bearer {KEY}")


def _coded(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


GUARDED_ACTS = {
    "no key": _refused(401, _request(CHAT, _chat("w1"))),
    "wrong key": _refused(401, _request(CHAT, _chat("w1"), "authorization: Bearer " + "x" * 9000)),
    "no picture": _refused(400, _picture(_coded(b"\x89PNG\r\n\x1a\n" + b"\0" * 300_000))),
    "no base64": _refused(400, _picture("data:image/png;base64,!!!")),
    "a text": _refused(400, _picture(_coded(b"<svg onload='alert(1)'/>"))),
    "secret file": _refused(400, _picture("file:///etc/passwd")),
    "way up": _refused(400, _picture("file:///etc/../etc/passwd")),
    "device": _refused(400, _picture("file:///dev/zero")),
    "inner net": _refused(400, _picture("http://169.254.169.254/latest/meta-data")),
    "many": _refused(400, _picture(_coded(b"GIF89a" + b"\xff" * 500_000))),
}


@pytest.mark.parametrize("name", GUARDED_ACTS)
def test_a_guarded_server_refuses_hostile_requests_and_keeps_answering(guarded, name):
    guarded.survives(GUARDED_ACTS[name])
