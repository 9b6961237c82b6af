"""Invalid bodies, keys and host names; the next request is always served."""

from __future__ import annotations

import json
import socket

import pytest
from serve_process import serving

CHAT = "/v1/chat/completions"
GOOD = {"messages": [{"role": "user", "content": "w20"}], "max_tokens": 2}


def _is_served(server) -> bool:
    status, found = server.json(CHAT, GOOD)
    return status == 200 and bool(found["choices"])


def _nested(depth: int) -> bytes:
    inner = b"[" * depth + b"]" * depth
    tools = b'[{"type":"function","function":{"name":"f","parameters":{"a":' + inner + b"}}}]"
    return b'{"messages":[{"role":"user","content":"w20"}],"tools":' + tools + b"}"


@pytest.mark.parametrize(
    ("body", "fragment"),
    [
        (b"", "body"),
        (b"{", "not valid JSON"),
        (b'{"messages": [}', "character 14"),
        (b"[1, 2]", "dictionary"),
        (b'"text"', "dictionary"),
        (b"null", ""),
        (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', ""),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
        (b'{"model": "\\ud800", "messages": 1}', "messages"),
        (b'{"messages": [{"role": "user", "content": "w20"}], "\\ud800": 1}', "unicode"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "messages.0.content"),
        (json.dumps({**GOOD, "temperature": float("nan")}).encode(), "temperature"),
        (json.dumps({**GOOD, "top_p": float("inf")}).encode(), "top_p"),
        (json.dumps({**GOOD, "seed": 2**64}).encode(), "seed"),
        (json.dumps({**GOOD, "max_tokens": 1e300}).encode(), "max_tokens"),
        (b'{"seed": ' + b"9" * 5000 + b"}", ""),
        (_nested(100_000), ""),
        (_nested(300), "tools"),
    ],
)
def test_faulty_bodies_get_one_reason(server, body, fragment):
    status, found = server.json(CHAT, body)
    assert status == 400, found
    assert fragment in found["error"]["message"]
    assert found["error"]["type"] == "invalid_request_error"
    assert "Traceback" not in str(found)
    assert _is_served(server)


def test_a_body_of_another_content_type_gets_415(server):
    status, found = server.json(CHAT, json.dumps(GOOD).encode(), content_type="text/plain")
    assert status == 415
    assert "content-type: application/json" in found["error"]["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_hundred_megabytes_are_refused_without_being_kept(server, chunked):
    before = server.rss_bytes()
    piece = b" " * (1 << 20)
    connection = server.connect()
    connection.putrequest("POST", CHAT)
    connection.putheader("content-type", "application/json")
    if chunked:
        connection.putheader("transfer-encoding", "chunked")
    else:
        connection.putheader("content-length", str(100 * len(piece)))
    connection.endheaders()
    for _ in range(100):
        connection.send(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
    if chunked:
        connection.send(b"0\r\n\r\n")
    response = connection.getresponse()
    assert response.status == 413
    assert "more than 1048576 bytes" in json.loads(response.read())["error"]["message"]
    connection.close()
    assert server.rss_bytes() - before < 20 << 20
    assert _is_served(server)


def test_a_false_content_length_affects_no_other_client(server):
    for head in (
        b"content-length: -5",
        b"content-length: 99999999999999999999",
        b"content-length: x",
        b"transfer-encoding: nonsense",
        b"content-length: 50",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as plain:
            request = b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: localhost\r\n"
            plain.sendall(request + head + b"\r\ncontent-type: application/json\r\n\r\n{}")
            if head != b"content-length: 50":
                answer = plain.recv(4096)
                assert answer[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 413", b"HTTP/1.1 501"), head
    assert _is_served(server)


LISTED = "GET /openapi.json lists all"


def test_unknown_paths_get_404_with_the_nearest_and_methods_405(server):
    status, found = server.json("/v1/nothing")
    assert status == 404
    assert "there is no /v1/nothing here" in found["error"]["message"]
    for method, path, meant in (
        ("POST", "/chat/completions", "POST /v1/chat/completions"),
        ("POST", "/v1/v1/chat/completions", "POST /v1/chat/completions"),
        ("POST", "/v1/message", "POST /v1/messages"),
        ("POST", "/api/gen", "POST /api/generate"),
        ("GET", "/models", "GET /v1/models"),
    ):
        _, _, content = server.send(path, b"{}" if method == "POST" else None)
        message = json.loads(content)["error"]
        message = message if isinstance(message, str) else message["message"]
        assert message == f"there is no {path} here; did you mean {meant}? {LISTED}"
    message = server.json("/qqq")[1]["error"]["message"]
    assert message == f"there is no /qqq here; {LISTED}"
    status, found = server.json("/v2/models/tiny/generates", {})
    assert (status, list(found)) == (404, ["error"])
    assert "did you mean POST /v2/models/{name}/generate?" in found["error"]
    status, response, _ = server.send(CHAT, method="DELETE")
    assert status == 405
    assert response.headers["allow"] == "POST"
    assert server.send("/docs")[0] == 404  # it would load scripts from other hosts


def test_a_foreign_host_name_is_rejected(server):
    """Web pages can reach a local server through their own host name (DNS rebinding)."""
    assert server.send("/v1/models", host="evil.example:80")[0] == 403
    assert server.send(CHAT, GOOD, host="127.0.0.1.evil.example")[0] == 403
    for name in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "[::1]"):
        assert server.send("/v1/models", host=name)[0] == 200, name


def test_all_but_health_paths_need_a_valid_api_key(roomy_engine, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# of the robot\nfirst-secret\n\n second-secret \n")
    with serving(roomy_engine, "--apiKeyFile", keys) as server:
        for header in (None, "first-secret", "Bearer", "Bearer wrong", "Basic first-secret",
                       "Bearer # of the robot", "Bearer first-secret-and-more"):  # fmt: skip
            given = {} if header is None else {"authorization": header}
            for path, body in (("/v1/models", None), (CHAT, GOOD), ("/metrics", None),
                               ("/openapi.json", None), ("/v1/nothing", None)):  # fmt: skip
                status, response, content = server.send(path, body, **given)
                assert status == 401, (header, path)
                assert response.headers["www-authenticate"] == "Bearer"
                assert b"secret" not in content
        assert server.send("/v1/models", authorization="Bearer first-secret")[0] == 200
        assert server.send(CHAT, GOOD, authorization="bearer first-secret")[0] == 200
        assert server.send("/v1/models", authorization="Bearer second-secret")[0] == 200
        assert server.send("/v1/models", authorization=b"Bearer \xff\xfe")[0] == 401
        for path in ("/health", "/ready", "/v2/health/ready", "/v2/health/live"):
            assert server.send(path)[0] == 200
