"""The chat page in a headless Chromium: what a user types, sees, drops and stops."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import real_cases
from serve_process import serving

from edgellm.device_runtime import SamplingParams

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")
SCREENSHOTS = os.environ.get("EDGELLM_SCREENSHOTS")  # a folder that keeps them
ANSWERED = "() => document.getElementById('send').disabled === false"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser):
    """A fresh page; whatever it complains about, and whatever it loads from elsewhere, fails."""
    context = browser.new_context(viewport={"width": 1180, "height": 760})
    found = context.new_page()
    complaints, hosts = [], set()

    def said(message):
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    found.on("console", said)
    found.on("pageerror", lambda error: complaints.append(str(error)))
    found.on("request", lambda sent: hosts.add(sent.url.split("/")[2].partition(":")[0]))
    found.expected = set()
    yield found
    context.close()
    assert not [line for line in complaints if not any(map(line.count, found.expected))]
    assert hosts <= {"127.0.0.1", ""}


def _open(page, server):
    page.goto(server.url)
    page.wait_for_function("() => document.getElementById('model').textContent !== ''")


def _settings(page, tokens, temperature=0):
    page.locator("summary").click()
    page.fill("#tokens", str(tokens))
    page.fill("#temperature", str(temperature))
    page.locator("summary").click()


def test_a_conversation_by_keyboard(page, server, offline):
    _open(page, server)
    assert page.inner_text("#model") == "tiny"
    _settings(page, 40)
    page.focus("#text")
    page.keyboard.type("w20 w30")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("w40")
    page.keyboard.press("Enter")
    page.wait_for_function(ANSWERED)
    greedy = SamplingParams(temperature=0)
    messages = [{"role": "user", "content": "w20 w30\nw40"}]
    answer = offline.generate(messages, sampling=greedy, max_generate_length=40)
    list(answer)
    assert page.locator(".user").inner_text() == "w20 w30\nw40"
    assert page.locator(".assistant").text_content() == answer.text
    origins = page.eval_on_selector_all(".assistant span", "all => all.map(e => e.className)")
    assert {"bonus", "plain"} <= set(origins) <= {"drafted", "bonus", "plain"}
    assert page.locator("#passes rect").count() > 10
    assert page.get_attribute("#speeds polyline", "points").count(",") > 10
    assert float(page.inner_text("#speed")) > 0
    assert float(page.inner_text("#length")) >= 1
    assert page.evaluate("document.activeElement.id") == "text"  # to go on typing
    page.keyboard.type("w50")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelectorAll('.assistant').length === 2")
    page.wait_for_function(ANSWERED)
    tokens, reused = page.inner_text("#prompt").split(", ")
    assert 40 < int(reused) < int(tokens)


def test_escape_stops_an_answer_and_a_new_chat_forgets(page, server):
    _open(page, server)
    _settings(page, 3000)
    page.fill("#text", "w20")
    page.keyboard.press("Enter")
    page.wait_for_selector(".assistant span:nth-of-type(3)")
    page.keyboard.press("Escape")
    page.wait_for_function(ANSWERED)
    assert page.inner_text("#state") == "stopped"
    server.wait_until("vllm:num_requests_running", 0)
    page.click("#fresh")
    assert page.locator(".turn").count() == 0
    assert page.evaluate("messages.length") == 0


def test_what_a_model_writes_is_text(page, server):
    _open(page, server)
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    page.evaluate(
        "text => show(turn('assistant'), {edgellm: {tokens: [[text, 'plain']], drafted: 0,"
        " accepted: 0}, choices: [{delta: {content: text}}]})".replace(
            "show(", "(figures = {begin: 0, passes: [], speeds: [], tokens: 0}, show)("
        ),
        evil,
    )
    assert page.locator(".assistant").text_content() == evil
    assert page.locator(".assistant img, .assistant script").count() == 0


def test_refusals_are_shown_and_the_next_question_is_asked(page, server):
    page.expected = {"400"}
    _open(page, server)
    page.fill("#text", "w20 " * 3000)
    page.keyboard.press("Enter")
    page.wait_for_selector(".fault")
    assert "the engine takes 1024" in page.locator(".fault").inner_text()
    _settings(page, 4)
    page.fill("#text", "w20")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelectorAll('.assistant span').length > 2")
    page.wait_for_function(ANSWERED)


def test_a_picture_is_dropped_seen_and_removed(page, server):
    page.expected = {"400"}
    _open(page, server)
    drop = """async () => {
        const canvas = new OffscreenCanvas(40, 30);
        canvas.getContext("2d").fillRect(0, 0, 20, 30);
        const content = new DataTransfer();
        content.items.add(new File([await canvas.convertToBlob()], "a.png", {type: "image/png"}));
        const how = {dataTransfer: content, bubbles: true, cancelable: true};
        const event = new DragEvent("drop", how);
        document.getElementById("chat").dispatchEvent(event);
    }"""
    page.evaluate(drop)
    page.wait_for_selector("#pictures img")
    page.focus("#pictures button")
    page.keyboard.press("Enter")
    assert page.locator("#pictures img").count() == 0
    page.evaluate(drop)
    page.wait_for_selector("#pictures img")
    page.fill("#text", "w20")
    page.keyboard.press("Enter")
    page.wait_for_selector(".fault")  # this engine has no eyes, and says so
    assert "takes text only" in page.locator(".fault").inner_text()
    assert page.locator(".user img").evaluate("image => image.naturalWidth") == 40


def test_a_key_is_asked_for(page, roomy_engine, tmp_path):
    (tmp_path / "keys").write_text("a-long-secret")
    page.expected = {"401"}
    with serving(roomy_engine, "--apiKeyFile", tmp_path / "keys") as server:
        page.goto(server.url)
        page.wait_for_function("() => document.activeElement.id === 'key'")
        page.keyboard.type("a-long-secret")
        page.keyboard.press("Tab")
        page.wait_for_function("() => document.getElementById('model').textContent")
        assert page.text_content("#model") == "engine"


def test_everything_can_be_reached_by_tab(page, server):
    _open(page, server)
    page.focus("#text")
    reached = set()
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"file", "send", "SUMMARY", "fresh", "log", "text"} <= reached


@pytest.mark.real
def test_a_real_answer(page, smollm2_gguf, tmp_path):
    """SmolLM2 with its draft: most of the answer was drafted. The README has the picture."""
    bundles = real_cases.make_bundles(smollm2_gguf, tmp_path)
    engine = real_cases.build(bundles, tmp_path / "engine", "none", "onnxruntime")
    flags = ["--eagle", "--eagleTree", "fixed", "--eagleVerifyTreeSize", 16]
    with serving(engine, *flags, "--modelName", "SmolLM2-135M-Instruct") as server:
        _open(page, server)
        _settings(page, 60)
        for text in ("What is the capital of France?", "Write a Python function that adds two."):
            page.fill("#text", text)
            page.keyboard.press("Enter")
            page.wait_for_selector(".assistant:last-child span")
            page.wait_for_function(ANSWERED, timeout=120_000)
        assert "Paris" in page.locator(".assistant").first.text_content()
        origins = page.eval_on_selector_all(".assistant span", "all => all.map(e => e.className)")
        assert origins.count("drafted") > 0.3 * len(origins)
        assert float(page.inner_text("#length")) > 1.5
        page.screenshot(path=Path(SCREENSHOTS or tmp_path) / "serve.png")
