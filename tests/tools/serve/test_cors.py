"""Web pages: the server's own and allowed ones may use it, those of other sites may not."""

from __future__ import annotations

import pytest
from serve_process import serving

from edgellm.core.errors import EdgeLLMError
from edgellm.tools.serve.http.cors import read_origins

CHAT, GENERATE = "/v1/chat/completions", "/v2/models/tiny/generate"
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "w20"}], "max_tokens": 2},
    GENERATE: {"text_input": "w20", "sampling_param_max_tokens": 2},
    "/tokenize": {"prompt": "w20"},
}
FRIEND = "http://localhost:3000"


def _post(server, path, **headers):
    return server.send(path, BODIES[path], **headers)[0]


@pytest.mark.parametrize("path", BODIES)
def test_pages_of_other_sites_are_kept_out(server, path):
    own = f"http://127.0.0.1:{server.port}"
    for headers in (
        {"origin": "https://evil.example"},
        {"origin": "null"},  # a sandboxed frame
        {"origin": FRIEND},
        {"origin": "https://evil.example", "sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "cross-site"},
        {"origin": FRIEND, "sec_fetch_site": "same-site"},  # another port of this machine
        {"origin": own, "sec_fetch_site": "cross-site"},
    ):
        for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json"):
            assert _post(server, path, content_type=kind, **headers) == 403, headers
    for headers in (
        {},
        {"origin": own},
        {"origin": own, "sec_fetch_site": "same-origin"},
        {"sec_fetch_site": "none"},
    ):
        assert _post(server, path, **headers) == 200, headers


def test_no_cors_headers_without_the_flag(server):
    ask = {"access_control_request_method": "POST", "origin": FRIEND}
    status, response, _ = server.send(CHAT, method="OPTIONS", **ask)
    assert status == 405
    assert "access-control-allow-origin" not in response.headers
    response = server.send("/v1/models", origin=FRIEND)[1]
    assert "access-control-allow-origin" not in response.headers


def test_only_allowed_origins_get_cors_headers(roomy_engine, tmp_path):
    (tmp_path / "keys").write_text("a-key-of-a-page")
    flags = ["--allowOrigin", "HTTP://localhost:3000/", "--allowOrigin", "app://notes"]
    flags += ["--apiKeyFile", tmp_path / "keys", "--modelName", "tiny"]
    with serving(roomy_engine, *flags) as server:
        for origin in (FRIEND, "app://notes"):
            ask = {
                "origin": origin,
                "access_control_request_method": "POST",
                "access_control_request_headers": "authorization,content-type,x-stainless-os",
            }
            status, response, _ = server.send(CHAT, method="OPTIONS", **ask)
            assert (status, response.headers["access-control-allow-origin"]) == (200, origin)
            assert "authorization" in response.headers["access-control-allow-headers"].lower()
            key = {"authorization": "Bearer a-key-of-a-page"}
            for headers, expected in ((key, 200), ({}, 401)):  # a page can read why, too
                status, response, _ = server.send(
                    CHAT, BODIES[CHAT], origin=origin, sec_fetch_site="same-site", **headers
                )
                assert status == expected
                assert response.headers["access-control-allow-origin"] == origin
        status, response, _ = server.send(CHAT, BODIES[CHAT], origin="http://localhost:3001", **key)
        assert status == 403
        assert "access-control-allow-origin" not in response.headers
        ask["origin"] = "https://evil.example"
        assert server.send(CHAT, method="OPTIONS", **ask)[0] == 400


def test_origins_as_browsers_write_them():
    given = ["https://Chat.Example.com:443/", "http://[::1]:3000", "*"]
    assert read_origins(given) == {"https://chat.example.com", "http://[::1]:3000", "*"}
    for wrong in ("localhost:3000", "null", "https://a.example/page", "http://", "", "http://a:x",
                  "https://me@a.example"):  # fmt: skip
        with pytest.raises(EdgeLLMError, match="is not an origin"):
            read_origins([wrong])
