"""A server in a process of its own: the first as users start it, others in forks."""

from __future__ import annotations

import gc
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

from forks import Fork, is_usual, shared

START_S = 300
_started: list[str] = []  # engines of servers


class ServerProcess:
    """`edgellm-serve` on a free port of 127.0.0.1."""

    def __init__(self, engine: Path, *flags: object) -> None:
        flags = ("--engineDir", engine, "--logLevel", "warning", *flags, "--port", "0")
        self.process = _start([*map(str, flags)])
        # An error of the client, not of the server.
        self.expected = {"WARNING: Invalid HTTP request received."}
        watchdog = threading.Timer(START_S, self.process.kill)
        watchdog.start()
        self.greeting = self.process.stdout.readline()
        watchdog.cancel()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", self.greeting)
        assert found, self.process.communicate()[1]
        self.port = int(found[1])
        self.url = found[0]

    def connect(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=60)

    def send(
        self, path: str, body: Any = None, *, method: str | None = None, **headers: str
    ) -> tuple[int, HTTPResponse, bytes]:
        """One request; a body that is not bytes becomes JSON."""
        connection = self.connect()
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            given = {"content-type": "application/json", **given}
        connection.request(method or ("GET" if body is None else "POST"), path, body, given)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, response, content

    def json(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        status, _, content = self.send(path, body, **headers)
        return status, json.loads(content)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = self.send("/metrics")[2].decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}[ {{]", line))

    def wait_until(self, name: str, value: float, *, seconds: float = 60) -> None:
        """Wait until a metric has a value."""
        end = time.monotonic() + seconds
        while self.metric(name) != value:
            assert time.monotonic() < end, f"{name} is {self.metric(name)}, not {value}"
            time.sleep(0.02)

    def expects(self, line: str) -> None:
        """Allow a line on stderr."""
        self.expected.add(line)

    def rss_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024

    def end(self) -> tuple[int, str]:
        """Send SIGTERM; return the exit code and the text of stderr."""
        self.process.send_signal(signal.SIGTERM)
        try:
            _, errors = self.process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, errors


def _start(flags: list[str]) -> subprocess.Popen[str] | Fork:
    if _started and is_usual():
        return shared().start("edgellm-serve", *flags, is_read=True)
    _started.append(flags[1])
    command = [sys.executable, "-m", "edgellm.tools.serve", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextmanager
def serving(engine: Path, *flags: object) -> Iterator[ServerProcess]:
    """A server that must end without complaint."""
    server = ServerProcess(engine, *flags)
    try:
        yield server
        gc.collect()  # connections that a test dropped: the server waits for their readers
        code, errors = server.end()
        assert set(errors.splitlines()) <= server.expected, errors
        assert code == 0
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate()
