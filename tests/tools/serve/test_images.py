"""Pictures in requests: inside them, and from where the server's owner allows."""

from __future__ import annotations

import base64
import io
import struct
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anthropic
import openai
import pytest
from PIL import Image
from serve_process import serving
from vlm_engines import build_vlm

from edgellm.device_runtime import LLM, SamplingParams

CHAT = "/v1/chat/completions"
REFUSED = "outside the folders that are allowed"


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    return build_vlm(tmp_path_factory.mktemp("vlm"), "qwen2_5_vl")


def _png(colour, size=(40, 30)) -> bytes:
    target = io.BytesIO()
    Image.new("RGB", size, colour).save(target, "PNG")
    return target.getvalue()


def _uri(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


RED, BLUE = _png("red"), _png("blue")


class _Pictures(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/elsewhere":
            self.send_response(302)
            self.send_header("location", "/red.png")
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(RED)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def web():
    """A web server with a red picture."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Pictures) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{found.server_port}"
        found.shutdown()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder that is allowed, with a link that leads out of it, and a secret beside it."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "allowed").mkdir()
    (folder / "allowed" / "red.png").write_bytes(RED)
    (folder / "allowed-not").mkdir()
    for path in (folder / "secret.png", folder / "allowed-not" / "secret.png"):
        path.write_bytes(BLUE)
    (folder / "allowed" / "link.png").symlink_to(folder / "secret.png")
    return folder


@pytest.fixture(scope="module")
def server(engines, pictures, web):
    flags = ["--multimodalEngineDir", engines.visual_engine, "--noContextReuse"]
    flags += ["--allowImageFolder", pictures / "allowed", "--allowImageHost", web]
    with serving(engines.engine, *flags) as process:
        yield process


def _messages(*urls):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "w1 w2"}]}]


def _ask(server, *urls):
    body = {"messages": _messages(*urls), "max_tokens": 6, "temperature": 0}
    status, found = server.json(CHAT, body)
    if status != 200:
        return status, found["error"]["message"]
    return status, found["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def offline(engines):
    llm = LLM(engines.engine, multimodal_engine_dir=engines.visual_engine)

    def ask(*contents):
        parts = [{"type": "image", "image": _uri(content)} for content in contents]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "w1 w2"}]}]
        greedy = SamplingParams(temperature=0)
        answer = llm.generate(messages, sampling=greedy, max_generate_length=6)
        list(answer)
        return answer.text

    return ask


def test_pictures_inside_a_request(server, offline):
    assert offline(RED) != offline(BLUE)
    assert _ask(server, _uri(RED)) == (200, offline(RED))
    assert _ask(server, _uri(BLUE)) == (200, offline(BLUE))
    assert _ask(server, _uri(RED), _uri(BLUE)) == (200, offline(RED, BLUE))


def test_videos_of_frames_are_answered_as_by_the_engine(server, engines, pictures):
    """As vLLM's clients send them, and frame by frame; files where they are allowed."""
    frames = [_uri(RED), _uri(BLUE), _uri(RED), _uri(BLUE)]
    llm = LLM(engines.engine, multimodal_engine_dir=engines.visual_engine)
    text = {"type": "text", "text": "w1 w2"}
    messages = [{"role": "user", "content": [{"type": "video", "video": frames}, text]}]
    answer = llm.generate(messages, sampling=SamplingParams(temperature=0), max_generate_length=6)
    list(answer)
    body = {"messages": messages, "max_tokens": 6, "temperature": 0}
    status, found = server.json(CHAT, body)
    assert status == 200, found
    assert found["choices"][0]["message"]["content"] == answer.text
    assert found["usage"]["prompt_tokens"] == answer.prompt_token_count
    for part, message in (
        ({"type": "video_url", "video_url": {"url": _uri(b"no film")}}, "video"),
        ({"type": "video", "video": f"file://{pictures / 'secret.png'}"}, REFUSED),
        ({"type": "video", "video": []}, "messages.0.content"),
    ):
        messages[0]["content"][0] = part
        status, found = server.json(CHAT, {**body, "messages": messages})
        assert status == 400
        assert message in found["error"]["message"]


def test_the_client_of_openai_sends_them(server, offline):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(
        model="engine", messages=_messages(_uri(RED)), max_tokens=6, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == offline(RED)


def test_images_in_results_of_tools(server, engines):
    """As the clients of Anthropic and OpenAI send them; the output is that of a user's image."""
    asked, text = {"role": "user", "content": "w1 w2"}, {"type": "text", "text": "w3"}
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "w3"}
    llm = LLM(engines.engine, multimodal_engine_dir=engines.visual_engine)
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    outputs = []
    for image in (RED, BLUE):
        shown = {"role": "user", "content": [{"type": "image", "image": _uri(image)}]}
        output = llm.generate(
            [asked, called, result, shown],
            sampling=SamplingParams(temperature=0),
            max_generate_length=6,
        )
        list(output)
        outputs.append(output.text)
        source = {"type": "base64", "media_type": "image/png", "data": _uri(image).split(",")[1]}
        block = {"type": "tool_result", "tool_use_id": "c"}
        block["content"] = [text, {"type": "image", "source": source}]
        use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
        turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [block]}]
        made = claude.messages.create(
            model="engine", max_tokens=6, messages=[asked, *turns], extra_body={"temperature": 0}
        )
        assert made.content[0].text == output.text
        function_call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
        parts = [{"type": "input_text", "text": "w3"}]
        parts.append({"type": "input_image", "image_url": _uri(image)})
        returned = {"type": "function_call_output", "call_id": "c", "output": parts}
        made = client.responses.create(
            model="engine",
            max_output_tokens=6,
            temperature=0,
            input=[asked, function_call, returned],
        )
        assert made.output_text == output.text
        part = {"type": "image_url", "image_url": {"url": _uri(image)}}
        made = client.chat.completions.create(
            model="engine",
            max_tokens=6,
            temperature=0,
            messages=[asked, called, result, {"role": "user", "content": [part]}],
        )
        assert made.choices[0].message.content == output.text
    assert outputs[0] != outputs[1]


def test_files_of_the_allowed_folder(server, pictures, offline):
    path = pictures / "allowed" / "red.png"
    assert _ask(server, f"file://{path}") == (200, offline(RED))
    assert _ask(server, f"file://localhost{path}") == (200, offline(RED))


def test_no_way_leads_out_of_the_allowed_folder(server, pictures):
    inside = pictures / "allowed"
    for url in (
        f"file://{pictures}/secret.png",
        f"file://{pictures}/nothing-here.png",
        f"file://{inside}/../secret.png",
        f"file://{inside}/%2e%2e/secret.png",
        f"file://{inside}/..%2fsecret.png",
        f"file://{inside}/x/../../secret.png",
        f"file://{inside}-not/secret.png",
        f"file://{inside}/link.png",
        f"file://elsewhere{inside}/red.png",
        f"file://{inside}/%00.png",
        "file:///etc/passwd",
        "file:///proc/self/environ",
        "FILE:///etc/passwd",
        "file:etc/passwd",
        "file://[",
    ):
        status, message = _ask(server, url)
        assert status == 400, url
        assert REFUSED in message, (url, message)


@pytest.mark.parametrize("url", ["/etc/passwd", "../secret.png", "red.png", "ftp://x/y", "", "C:x"])
def test_paths_are_no_urls(server, url):
    status, message = _ask(server, url)
    assert status == 400
    assert "only data: URIs" in message


def test_allowed_files_that_are_no_images_get_400(server, pictures):
    (pictures / "allowed" / "notes.png").write_text("no picture")
    for name in ("notes.png", "missing.png", "."):
        status, message = _ask(server, f"file://{pictures}/allowed/{name}")
        assert status == 400
        assert "Traceback" not in message


@pytest.mark.parametrize(
    "url",
    [
        "data:",
        "data:image/png;base64,",
        "data:image/png;base64,!!!!",
        "data:image/png,plain",
        _uri(b"no picture"),
        _uri(RED[: len(RED) // 2]),
        "data:image/png;base64," + "A" * 200_000,
    ],
)
def test_damaged_pictures_are_refused(server, url, offline):
    status, message = _ask(server, url)
    assert status == 400, message
    assert len(message) < 400
    assert _ask(server, _uri(RED)) == (200, offline(RED))


def test_a_bomb_is_not_unpacked(server):
    size = b"IHDR" + struct.pack(">II", 20_000, 6_000) + RED[24:29]
    bomb = RED[:12] + size + struct.pack(">I", zlib.crc32(size)) + RED[33:]
    status, message = _ask(server, _uri(bomb))
    assert status == 400
    assert "pixels" in message


def test_pictures_of_allowed_hosts_only(server, web, offline):
    assert _ask(server, f"http://{web}/red.png") == (200, offline(RED))
    port = web.partition(":")[2]
    for url in (
        f"http://localhost:{port}/red.png",
        f"http://user@{web}/red.png",
        f"http://{web}@example.com/red.png",
        "http://127.0.0.1:1/red.png",
        "http://127.0.0.1/red.png",
        "http://[::1]/x",
        "https://example.com/red.png",
        "http://:80/x",
        "http://x:99999/",
    ):
        status, message = _ask(server, url)
        assert status == 400, url
        assert "host" in message or "URL" in message, (url, message)
    status, message = _ask(server, f"http://{web}/elsewhere")  # no redirect is followed
    assert status == 400
    assert "cannot be fetched" in message


def test_without_permission_there_are_neither_files_nor_urls(engines, pictures, web):
    with serving(engines.engine, "--multimodalEngineDir", engines.visual_engine) as closed:
        status, message = _ask(closed, f"file://{pictures}/allowed/red.png")
        assert (status, "not allowed here" in message) == (400, True)
        status, message = _ask(closed, f"http://{web}/red.png")
        assert (status, "not allowed here" in message) == (400, True)


def test_image_tokens_in_a_text_are_words(server):
    body = {"messages": [{"role": "user", "content": "w1 <image> w2"}], "max_tokens": 2}
    status, found = server.json(CHAT, body)
    assert status == 200, found  # they are words, and no picture's place
