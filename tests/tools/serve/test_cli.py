"""Flags of `edgellm-serve`, and its error messages."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from conftest import assert_one_line_error
from serve_process import serving


def _run(*arguments):
    command = [sys.executable, "-m", "edgellm.tools.serve", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_help_names_the_flags():
    printed = _run("--help").stdout
    for flag in ("--engineDir", "--apiKeyFile", "--queueSize", "--eagle", "--allowImageFolder"):
        assert flag in printed


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        (["--host", "0.0.0.0"], ["lets other machines in", "--apiKeyFile"]),
        (["--host", "::"], ["lets other machines in"]),
        (["--api-key-file", "missing"], ["there is no missing", "openssl rand"]),
        (["--host", "192.0.2.1", "--allowNoKey"], ["cannot listen on 192.0.2.1"]),
        (["--allowImageFolder", "missing"], ["missing is not a folder"]),
        (["--eagle", "--eagleTree", "oak"], ["oak"]),
    ],
)
def test_mistakes_get_one_line(command_here, roomy_engine, flags, fragments):
    result = command_here("edgellm-serve", "--engineDir", roomy_engine, "--port", 0, *flags)
    assert_one_line_error(result, *fragments)


def test_a_folder_without_an_engine_is_rejected(tmp_path):
    assert_one_line_error(_run("--engineDir", tmp_path, "--port", 0), str(tmp_path))


@pytest.mark.parametrize(
    ("content", "fragment"),
    [(b"", "holds no key"), (b"# none\n", "holds no key"), (b"short\n", "fewer than 8"),
     (b"\xff\xfe\x00", "is not text"), ("l\u00f6ngenough".encode(), "a header cannot carry")],
)  # fmt: skip
def test_invalid_api_key_files_are_rejected(
    command_here, roomy_engine, tmp_path, content, fragment
):
    keys = tmp_path / "keys"
    keys.write_bytes(content)
    result = command_here("edgellm-serve", "--engineDir", roomy_engine, "--apiKeyFile", keys)
    assert_one_line_error(result, fragment)


@pytest.mark.parametrize("flag", ["--port", "--grpcPort", "--metricsPort"])
def test_a_taken_port_fails_at_start(roomy_engine, flag):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        free = () if flag == "--port" else ("--port", 0)
        result = _run("--engineDir", roomy_engine, flag, port, *free)
        assert_one_line_error(result, f"cannot listen on 127.0.0.1:{port}", f"another {flag} or")


def test_the_greeting_names_model_and_address(roomy_engine):
    with serving(roomy_engine) as server:
        assert server.greeting == f"engine answers at {server.url}/v1; Ctrl-C ends it\n"
        assert server.json("/v1/models")[1]["data"][0]["id"] == "engine"


def test_end_tokens_end_an_answer(tiny_engine):
    """The end token is counted, and is not part of the text."""
    with serving(tiny_engine) as server:
        for seed in range(40):
            body = {"prompt": "w20", "max_tokens": 60, "temperature": 2, "seed": seed}
            found = server.json("/v1/completions", {**body, "logprobs": 0})[1]
            choice = found["choices"][0]
            tokens = choice["logprobs"]["tokens"]
            assert "</s>" not in tokens
            if choice["finish_reason"] == "stop":
                assert len(tokens) == found["usage"]["completion_tokens"] - 1
                return
    pytest.fail("no answer ended")


def test_grpc_port_without_grpcio_names_the_extra(roomy_engine):
    hides = "import sys; sys.modules['grpc'] = None; "
    code = hides + "from edgellm.tools.serve.cli import main; main()"
    command = [sys.executable, "-c", code, "--engineDir", str(roomy_engine)]
    command += ["--port", "0", "--grpcPort", "0"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert_one_line_error(result, "--grpcPort needs grpcio", "pip install")
