"""The chat page in a headless Chromium: what a user types, sees, drops and stops."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import pytest
from chat_page import ANSWERED, ask, events_of, open_page, replies, wait_answered
from serve_process import serving

from edgellm.device_runtime import SamplingParams

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
SCREENSHOTS = os.environ.get("EDGELLM_SCREENSHOTS")  # a folder that keeps them


def _settings(page, tokens, temperature=0):
    page.locator("summary", has_text="Settings").click()
    page.fill("#tokens", str(tokens))
    page.fill("#temperature", str(temperature))
    page.locator("summary", has_text="Settings").click()


def test_a_conversation_by_keyboard(page, server, offline):
    open_page(page, server)
    assert page.inner_text("#model") == "tiny"
    _settings(page, 40)
    page.focus("#text")
    page.keyboard.type("w20 w30")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("w40")
    page.keyboard.press("Enter")
    wait_answered(page)
    greedy = SamplingParams(temperature=0)
    messages = [{"role": "user", "content": "w20 w30\nw40"}]
    answer = offline.generate(messages, sampling=greedy, max_generate_length=40)
    list(answer)
    assert page.locator(".user .text").inner_text() == "w20 w30\nw40"
    assert page.locator(".assistant .markdown").text_content().split() == answer.text.split()
    assert page.evaluate("document.activeElement.id") == "text"  # to go on typing
    assert page.locator(".tokens").count() == 0
    page.click(".assistant button:text('Tokens')")
    assert page.locator(".assistant .tokens").text_content() == answer.text
    origins = page.eval_on_selector_all(".tokens span", "all => all.map(e => e.className)")
    assert {"bonus", "plain"} <= set(origins) <= {"drafted", "bonus", "plain"}
    assert page.locator(".legend li").count() == len(set(origins))
    assert page.locator("#passes rect").count() > 10
    assert page.get_attribute("#speeds polyline", "points").count(",") > 10
    assert float(page.inner_text("#speed")) > 0
    assert float(page.inner_text("#length")) >= 1
    page.focus("#text")
    page.keyboard.type("w50")
    page.keyboard.press("Enter")
    wait_answered(page, 2)
    tokens, reused = page.inner_text("#prompt").split(", ")
    assert 40 < int(reused) < int(tokens)
    assert page.inner_text("#used") == f"{int(tokens) + 40} of 4,096 tokens"
    _sees_the_tree_of_a_round(page)
    speed = page.inner_text("#speed")
    page.click("#fresh")
    assert f"{speed} tokens/s in the last output" in page.inner_text("#start p")
    assert not page.locator("#speed").is_visible()


def _sees_the_tree_of_a_round(page):
    """The tree of a drafted token has a node for each draft; its path is what was accepted."""
    page.locator(".assistant button:text('Tokens')").last.click()
    view = page.locator(".tree-view").last
    assert not view.is_visible()  # no token is chosen
    page.locator(".assistant").last.locator(".tokens .bonus").first.click()
    summary = view.locator("summary").inner_text()
    drafted, accepted = map(int, re.findall(r"\d+", summary))
    assert f"Round: {drafted} drafted, {accepted} accepted" in page.inner_text(".detail >> nth=-1")
    assert view.locator(".node").count() == 0
    view.locator("summary").click()
    view.locator(".root").wait_for()
    assert view.locator(".node").count() == 1 + drafted
    assert view.locator(".root").count() == 1
    assert view.locator(".node.rejected").count() == drafted - accepted
    chosen = page.locator(".assistant").last.locator(".tokens .chosen").text_content()
    assert f"the model's own token: {json.dumps(chosen.strip())}" in view.inner_text()


def test_the_tree_of_a_round_has_its_branches(page, server):
    tree = {
        "tokens": ["a", "b", "c", "d", "e"],
        "parents": [-1, 0, 0, 1, 3],
        "confidence": [1, 0.75, 0.25, 0.5, 0.5],
        "path": [0, 1, 3],
        "bonus": "f",
    }
    tokens = [["b", "drafted"], ["d", "drafted"], ["f", "bonus"]]
    bodies = replies(page, events_of("bdf", tokens, tree=tree))
    open_page(page, server)
    ask(page, "w20")
    assert bodies[0]["stream_options"]["include_trees"] is True
    page.click(".assistant button:text('Tokens')")
    page.focus(".tokens")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    page.keyboard.press("Enter")
    page.locator(".tree").wait_for()
    chains = page.eval_on_selector_all(
        ".tree li", "all => all.map(e => [...e.children].filter(c => c.matches('.node'))"
        ".map(c => c.firstChild.textContent).join(''))",
    )  # fmt: skip
    assert chains == ["a", "bde", "c"]
    accepted = page.locator(".node.accepted").all_text_contents()
    assert accepted == ["b accepted, 75 %", "d accepted, 50 %"]
    _picture(page, "serve-tree.png")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("ArrowRight")  # another token of the round: the tree stays open
    assert page.locator(".tree li").count() == 3


def test_the_start_and_the_panel_show_the_device_and_the_defaults(page, roomy_engine):
    defaults = '{"temperature": 0.6, "max_tokens": 9, "min_tokens": 9}'
    flags = ["--modelName", "tiny", "--overrideGenerationConfig", defaults]
    with serving(roomy_engine, *flags) as own:
        open_page(page, own)
        page.wait_for_selector("#start p")
        described = own.json("/api/show", {"model": "tiny"})[1]["edgellm"]
        start = page.inner_text("#start p")
        assert re.search(r"\d+ threads?", described["device"])
        assert described["device"] in start
        rate = math.floor(described["tokens_per_second"] + 0.5)  # JavaScript rounds halves up
        assert f"about {rate} tokens/s without drafts" in start
        values = {
            name: page.get_attribute(f"#{name}", "placeholder")
            for name in ("temperature", "top_p", "top_k", "min_p", "seed", "tokens")
        }
        assert values == {
            "temperature": "0.6", "top_p": "1", "top_k": "all tokens", "min_p": "0",
            "seed": "random", "tokens": "9",
        }  # fmt: skip
        ask(page, "w20")
        assert own.metric("vllm:generation_tokens_total") == 9


def test_an_empty_start_shows_the_model_and_examples_and_nothing_empty(page, server):
    open_page(page, server)
    page.wait_for_selector("#start p")
    assert page.inner_text("#start h2") == "tiny"
    assert "4,096 tokens of context" in page.inner_text("#start p")
    hidden = ("#passes", "#speeds", "#context", "#stop", "#chats", "#attachments", ".legend")
    assert [name for name in hidden if page.locator(name).is_visible()] == []
    assert page.locator("#panel dd:visible").count() == 0
    page.locator(".examples button").nth(1).click()
    assert "prime" in page.input_value("#text")
    assert page.evaluate("document.activeElement.id") == "text"
    replies(page, events_of("2", [["2", "plain"]]))
    page.keyboard.press("Enter")
    wait_answered(page)
    assert page.locator("#start").count() == 0
    page.click(".assistant button:text('Tokens')")
    assert page.locator(".legend li").all_inner_texts() == [
        "plain: from a forward pass without drafted tokens (1)"
    ]
    assert not page.locator("#length").is_visible()  # nothing was drafted
    assert not page.locator("#passes").is_visible()


def test_a_path_prefix(page, server):
    """A proxy serves the page below a path: no request leaves it."""

    def forward(route):
        path = route.request.url.partition("/")[2].partition("/")[2].partition("/")[2]
        assert path.startswith("box/edgellm/"), path
        there = f"{server.url}/{path.removeprefix('box/edgellm/')}"
        route.fulfill(response=route.fetch(url=there))

    page.route("**/*", forward)
    page.goto(f"{server.url}/box/edgellm/")
    page.wait_for_function("() => document.getElementById('model').textContent === 'tiny'")
    _settings(page, 3)
    ask(page, "w20")
    assert page.locator(".assistant .markdown").text_content().strip()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone(page, server, scheme):
    """A page as wide as a phone scrolls to no side, and the messages have most of its height."""
    page.set_viewport_size({"width": 375, "height": 740})
    page.emulate_media(color_scheme=scheme)
    replies(page, events_of(ANSWER, ORIGINS))
    open_page(page, server)
    ask(page, "A table and code, please")
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    assert page.evaluate("document.getElementById('log').clientHeight") > 0.66 * 740
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert colour == {"light": "rgb(251, 250, 248)", "dark": "rgb(23, 24, 27)"}[scheme]
    _picture(page, f"serve-phone-{scheme}.png")
    assert not page.locator("#panel").is_visible()
    page.click("#show-panel")
    assert page.get_attribute("#show-panel", "aria-expanded") == "true"
    page.locator("summary", has_text="Settings").click()
    page.select_option("#theme", "dark")
    page.keyboard.press("Escape")
    assert not page.locator("#panel").is_visible()
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert colour == "rgb(23, 24, 27)"
    page.click("#show-chats")
    assert page.locator("#chat-list .title").is_visible()
    page.mouse.click(370, 300)  # beside the list
    assert not page.locator("#chats").is_visible()


ORIGINS = [["Two ", "drafted"], ["and ", "bonus"]]
ANSWER = """### Primes

A number is **prime** if `n > 1` and nothing divides it:

```python
def is_prime(n):
    return n > 1 and all(n % k for k in range(2, int(n**0.5) + 1))
```

| n | prime |
|---|---|
| 2 | yes |
| 9 | no |

See [the list](https://oeis.org/A000040).
"""


def _picture(page, name):
    if SCREENSHOTS:
        page.screenshot(path=Path(SCREENSHOTS) / name)


def test_markdown_and_code(page, server):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    replies(page, events_of(ANSWER, ORIGINS))
    open_page(page, server)
    ask(page, "Which numbers are prime?")
    answer = page.locator(".assistant .markdown")
    assert answer.locator("strong").inner_text() == "prime"
    assert answer.locator("td").all_inner_texts() == ["2", "yes", "9", "no"]
    assert answer.locator("h5").inner_text() == "Primes"  # below the page's own headings
    assert answer.locator("a").get_attribute("rel") == "noopener noreferrer"
    assert answer.locator(".code-head span").inner_text() == "python"
    answer.locator(".copy").click()
    answer.locator("button:text('Copied')").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.rstrip("\n") == ANSWER.split("```")[1].removeprefix("python\n").rstrip("\n")
    page.locator(".assistant .actions button:text('Copy')").click()
    page.locator(".assistant .actions button:text('Copied')").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == ANSWER


HOSTILE = """<img src=x onerror=alert(1)><script>alert(2)</script>

[a](javascript:alert(3)) [b](data:text/html,x) ![c](http://example.com/x.png)

<form action=/x><input name=y></form> text <b onclick=alert(4)>bold</b>

```x" onclick="alert(5)
<script>alert(6)</script>
```
"""


def test_what_a_model_writes_runs_and_loads_nothing(page, server):
    replies(page, events_of(HOSTILE))
    dialogs = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    open_page(page, server)
    ask(page, "w20")
    answer = page.locator(".assistant .markdown")
    assert answer.locator("img, script, form, input, b, [onclick], [onerror]").count() == 0
    assert "<img src=x onerror=alert(1)><script>alert(2)</script>" in answer.text_content()
    links = answer.locator("a").evaluate_all("all => all.map(e => e.getAttribute('href'))")
    assert links == [None, None, "http://example.com/x.png"]
    with pytest.raises(playwright.Error, match="TrustedHTML"):  # nothing else may set HTML
        page.evaluate("document.body.innerHTML = '<b>'")
    page.expected = {"TrustedHTML"}
    assert dialogs == []


def test_streaming_draws_once_a_frame_and_keeps_what_is_drawn(page, server):
    """Blocks that are complete keep their elements, so that a selection in them lasts."""
    open_page(page, server)
    counts = page.evaluate(
        """async () => {
            const { drawMarkdown } = await import("./page/markdown.js");
            const { oncePerFrame } = await import("./page/dom.js");
            const element = document.createElement("div");
            let drawn = drawMarkdown(element, "One\\n\\ntw"), draws = 0;
            const first = element.firstChild;
            drawn = drawMarkdown(element, "One\\n\\ntwo **th", drawn);
            drawMarkdown(element, "One\\n\\ntwo **three**", drawn);
            const draw = oncePerFrame(() => { draws += 1; });
            for (let step = 0; step < 100; step += 1) draw();
            await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
            return [first === element.firstChild, element.textContent.includes("two three"), draws];
        }"""
    )
    assert counts == [True, True, 1]


def test_tokens_and_their_alternatives(page, server):
    likely = [{"token": "Two", "logprob": -0.1}, {"token": "Three", "logprob": -2.5}]
    logprobs = {"content": [{"token": "Two", "logprob": -0.1, "top_logprobs": likely}]}
    stream = events_of("Two and", [["Two", "drafted"], [" and", "bonus"]], logprobs=logprobs)
    bodies = replies(page, stream)
    open_page(page, server)
    page.locator("summary", has_text="Settings").click()
    page.check("#alternatives")
    ask(page, "w20")
    assert bodies[0]["top_logprobs"] == 5
    page.click(".assistant button:text('Tokens')")
    page.focus(".tokens")
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".detail") == (
        '"Two": drafted and accepted. Round: 3 drafted, 1 accepted. Probability 90.5 %. '
        'Likeliest: "Two" 90.5 %, "Three" 8.2 %.'
    )
    page.click(".tokens span:last-child")
    assert "the model's own" in page.inner_text(".detail")


def test_alternatives_of_the_server_belong_to_its_tokens(page, server):
    open_page(page, server)
    _settings(page, 8)
    page.locator("summary", has_text="Settings").click()
    page.check("#alternatives")
    ask(page, "w20")
    page.click(".assistant button:text('Tokens')")
    page.focus(".tokens")
    for text in page.locator(".tokens span").all_text_contents():
        page.keyboard.press("ArrowRight")
        detail = page.text_content(".detail")
        assert detail.startswith(json.dumps(text))
        likeliest, _ = json.JSONDecoder().raw_decode(detail.partition("Likeliest: ")[2])
        assert likeliest.strip() == text.strip()  # greedy


def test_escape_stops_an_answer_and_a_new_chat_forgets(page, server):
    open_page(page, server)
    _settings(page, 3000)
    page.fill("#text", "w20")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('.markdown')?.textContent.length > 5")
    assert page.get_attribute("#log", "aria-busy") == "true"
    page.keyboard.press("Escape")
    page.wait_for_function(ANSWERED)
    assert page.inner_text("#state") == "stopped"
    assert page.inner_text(".assistant .note") == "Stopped."
    assert page.get_attribute("#log", "aria-busy") == "false"
    server.wait_until("vllm:num_requests_running", 0)
    page.click("#fresh")
    assert page.locator(".turn").count() == 0
    bodies = replies(page, events_of("x"))
    ask(page, "w30")
    assert [message["content"] for message in bodies[0]["messages"]] == ["w30"]


def test_a_conversation_that_is_deleted_while_it_is_answered_stays_deleted(page, server):
    open_page(page, server)
    _settings(page, 3000)
    page.fill("#text", "w20")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('.markdown')?.textContent.length > 5")
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#chat-list button:text('Delete')")
    page.wait_for_function(ANSWERED)
    server.wait_until("vllm:num_requests_running", 0)
    assert page.locator("#chat-list .title").count() == 0
    assert "chat:" not in page.evaluate("Object.keys(localStorage).join()")


def test_edit_and_regenerate(page, server):
    bodies = replies(
        page, events_of("one"), events_of("two"), events_of("three"), events_of("four")
    )
    open_page(page, server)
    ask(page, "first")
    ask(page, "second", 2)
    assert page.locator("button:text('Regenerate'):visible").count() == 1
    page.click("button:text('Regenerate'):visible")
    page.wait_for_function("() => document.querySelector('#log').textContent.includes('three')")
    page.wait_for_function(ANSWERED)
    sent = [message["content"] for message in bodies[2]["messages"]]
    assert sent == ["first", "one", "second"]
    page.locator(".user button:text('Edit')").first.click()
    assert page.input_value("#text") == "first"
    assert page.locator("#editing").is_visible()
    page.fill("#text", "changed")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('#log').textContent.includes('four')")
    page.wait_for_function(ANSWERED)
    assert [message["content"] for message in bodies[3]["messages"]] == ["changed"]
    assert page.locator(".turn").count() == 2


def test_conversations_are_kept_renamed_exported_and_deleted(page, server):
    replies(page, events_of("An answer."))
    open_page(page, server)
    ask(page, "First question")
    page.click("#fresh")
    ask(page, "Second question")
    titles = page.locator("#chat-list .title")
    assert titles.all_inner_texts() == ["Second question", "First question"]
    page.reload()
    assert page.locator(".user .text").inner_text() == "Second question"
    titles.nth(1).click()
    assert page.locator(".user .text").inner_text() == "First question"
    page.click("#chat-list button:text('Rename')")
    page.keyboard.type("Primes")
    page.keyboard.press("Enter")
    assert titles.first.inner_text() == "Primes"
    assert titles.first.get_attribute("aria-current") == "true"
    assert page.evaluate("document.activeElement.textContent") == "Primes"
    with page.expect_download() as saved:
        page.click("#chat-list button:text('Markdown')")
    assert saved.value.suggested_filename == "Primes.md"
    text = "# Primes\n\n## User\n\nFirst question\n\n## Assistant\n\nAn answer.\n"
    assert saved.value.path().read_text() == text
    with page.expect_download() as saved:
        page.click("#chat-list button:text('JSON')")
    messages = json.loads(saved.value.path().read_text())["messages"]
    assert [message["text"] for message in messages] == ["First question", "An answer."]
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#chat-list button:text('Delete')")
    assert titles.all_inner_texts() == ["Second question"]
    assert page.locator("#start").count() == 1


def test_settings_are_sent_kept_and_reset(page, server):
    bodies = replies(page, events_of("x"))
    open_page(page, server)
    page.locator("summary", has_text="Settings").click()
    page.wait_for_function("() => document.getElementById('temperature').placeholder === '1'")
    page.fill("#temperature", "0.3")
    page.fill("#top_k", "20")
    page.fill("#system", "Be brief.")
    ask(page, "w20")
    assert bodies[0] | {"temperature": 0.3, "top_k": 20} == bodies[0]
    assert bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert not {"max_tokens", "top_p", "seed"} & set(bodies[0])  # the model's
    page.reload()
    assert page.input_value("#top_k") == "20"
    page.locator("summary", has_text="Settings").click()
    page.click("#defaults")
    assert page.input_value("#top_k") == ""


def test_the_key_is_not_kept(page, server):
    open_page(page, server)
    page.locator("summary", has_text="Settings").click()
    page.fill("#key", "a-long-secret")
    page.keyboard.press("Tab")
    assert "secret" not in page.evaluate("JSON.stringify({...localStorage})")


def test_refusals_are_shown_and_the_question_can_be_asked_again(page, server):
    page.expected = {"400"}
    open_page(page, server)
    _settings(page, 4)
    page.fill("#text", "w20 " * 3000)
    page.keyboard.press("Enter")
    page.wait_for_selector(".fault")
    assert "the engine takes 1024" in page.locator(".fault .text").inner_text()
    ask(page, "w20")  # without the question that failed
    assert page.locator(".assistant .markdown").text_content().strip()
    page.fill("#text", "w30 " * 3000)
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelectorAll('.fault').length === 2")
    page.wait_for_function(ANSWERED)
    again = page.locator("button:text('Try again'):visible")
    assert again.count() == 1  # asking the first again would drop what follows it
    bodies = replies(page, events_of("now"))
    again.click()
    page.wait_for_function("() => document.querySelector('#log').textContent.includes('now')")
    assert [message["role"] for message in bodies[0]["messages"]] == ["user", "assistant", "user"]
    assert page.locator(".fault").count() == 1


def test_reasoning_is_beside_the_output_and_not_sent_back(page, server):
    thought = {"delta": {"content": "Four.", "reasoning_content": "Two and two."}}
    bodies = replies(page, events_of("", **thought))
    open_page(page, server)
    ask(page, "w20")
    assert page.locator(".assistant .markdown").inner_text() == "Four."
    page.click("summary:text('Reasoning')")
    assert page.locator(".assistant details .text").inner_text() == "Two and two."
    ask(page, "w30", 2)
    assert bodies[1]["messages"][1] == {"role": "assistant", "content": "Four."}


def test_several_models_can_be_chosen(page, server):
    cards = [{"id": "tiny", "max_model_len": 4096}, {"id": "other", "max_model_len": 512}]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": cards}))
    page.route("**/api/show", lambda route: route.fulfill(status=404))
    page.expected = {"404"}
    bodies = replies(page, events_of("x"))
    open_page(page, server)
    page.get_by_role("combobox", name="Model").select_option("other")
    page.wait_for_function("() => document.querySelector('#start h2').textContent === 'other'")
    ask(page, "w20")
    assert bodies[0]["model"] == "other"
    assert page.inner_text("#used") == "10 of 512 tokens"


def test_a_full_storage_keeps_the_texts(page, server):
    about = {"model_info": {"general.architecture": "llava"}, "capabilities": ["vision"]}
    page.route("**/api/show", lambda route: route.fulfill(json=about))
    replies(page, events_of("x"))
    open_page(page, server)
    page.wait_for_function("() => document.querySelector('#start p')")
    page.evaluate(
        """() => { for (let size = 1 << 20; size; size >>= 1) {
            try { for (;;) localStorage.setItem(`${size} ${Math.random()}`, "x".repeat(size)); }
            catch {} }
            for (const name of Object.keys(localStorage)) {
                if (name.startsWith("512 ")) localStorage.removeItem(name);
            }
            const spare = Object.keys(localStorage).find((name) => name.startsWith("1024 "));
            if (spare) localStorage.removeItem(spare); }"""
    )
    page.evaluate(
        """async () => { const { setAll } = await import("./page/attachments.js");
            setAll({pictures: ["data:image/png;base64," + "A".repeat(40000)]}); }"""
    )
    ask(page, "w20")
    kept = page.evaluate(
        """() => Object.entries(localStorage).filter(([name]) => name.includes("chat:"))
            .map(([, value]) => JSON.parse(value).messages)"""
    )
    assert [[message["text"] for message in messages] for messages in kept] == [["w20", "x"]]
    assert "pictures" not in kept[0][0]
    assert "storage is full" in page.inner_text("#state")


def test_text_is_copied_where_there_is_no_clipboard(page, server):
    """As on pages that come over HTTP from another machine."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    replies(page, events_of("An answer."))
    open_page(page, server)
    ask(page, "w20")
    page.evaluate(
        """() => { window.real = navigator.clipboard;
            Object.defineProperty(navigator, "clipboard", {value: undefined}); }"""
    )
    page.locator(".assistant .actions button:text('Copy')").click()
    page.locator(".assistant .actions button:text('Copied')").wait_for()
    assert page.evaluate("real.readText()") == "An answer."


DROP = """async (isPicture) => {
    const content = new DataTransfer();
    if (isPicture) {
        const canvas = new OffscreenCanvas(40, 30);
        canvas.getContext("2d").fillRect(0, 0, 20, 30);
        content.items.add(new File([await canvas.convertToBlob()], "a.png", {type: "image/png"}));
    } else {
        content.items.add(new File(["x = 1"], "a.py", {type: ""}));
    }
    const how = {dataTransfer: content, bubbles: true, cancelable: true};
    document.getElementById("chat").dispatchEvent(new DragEvent("drop", how));
}"""


def test_a_picture_is_dropped_seen_and_removed(page, server):
    page.expected = {"400"}
    about = {"model_info": {"general.architecture": "llava"}, "capabilities": ["vision"]}
    page.route("**/api/show", lambda route: route.fulfill(json=about))
    open_page(page, server)
    page.wait_for_function("() => document.querySelector('#start p')")
    page.evaluate(DROP, True)
    page.wait_for_selector("#attachments img")
    page.focus("#attachments button")
    page.keyboard.press("Enter")
    assert page.locator("#attachments img").count() == 0
    page.evaluate(DROP, True)
    page.wait_for_selector("#attachments img")
    page.fill("#text", "w20")
    page.keyboard.press("Enter")
    page.wait_for_selector(".fault")  # this engine takes none, and says so
    assert "takes text only" in page.locator(".fault").inner_text()
    assert page.locator(".user img").evaluate("image => image.naturalWidth") == 40


def test_a_text_file_is_dropped_and_pictures_need_a_model_for_them(page, server):
    bodies = replies(page, events_of("x"))
    open_page(page, server)
    page.wait_for_function("() => document.getElementById('attach').textContent === 'File'")
    page.evaluate(DROP, True)
    page.wait_for_function("() => document.getElementById('state').textContent !== ''")
    assert page.inner_text("#state") == "This model takes no pictures."
    page.evaluate(DROP, False)
    page.wait_for_selector("#attachments button")
    assert page.get_attribute("#attachments button", "aria-label") == "Remove a.py"
    ask(page, "What is x?")
    assert bodies[0]["messages"][0]["content"] == "a.py:\n```\nx = 1\n```\n\nWhat is x?"


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


def test_everything_can_be_reached_by_tab_and_has_a_name(page, server):
    replies(page, events_of(ANSWER, ORIGINS))
    open_page(page, server)
    ask(page, "w20")
    page.focus("#text")
    reached = set()
    for _ in range(24):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"file", "send", "SUMMARY", "fresh", "log", "text", "BUTTON", "PRE", "A"} <= reached
    page.locator("summary", has_text="Settings").click()
    nameless = """() => [...document.querySelectorAll("button, input, select, textarea, a")]
        .filter((e) => e.checkVisibility() && !e.textContent.trim())
        .filter((e) => !e.ariaLabel && !e.labels?.length)
        .map((e) => e.outerHTML)"""
    assert page.evaluate(nameless) == []


@pytest.mark.real
def test_a_real_answer(page, smollm2_engine):
    """SmolLM2 with its draft: most of the answer was drafted. The README has the picture."""
    flags = ["--eagle", "--eagleTree", "fixed", "--eagleVerifyTreeSize", 16]
    with serving(smollm2_engine, *flags, "--modelName", "SmolLM2-135M-Instruct") as server:
        open_page(page, server)
        _settings(page, 60)
        for text in ("What is the capital of France?", "Write a Python function that adds two."):
            page.fill("#text", text)
            page.keyboard.press("Enter")
            page.wait_for_selector(".assistant:last-child .block")
            page.wait_for_function(ANSWERED, timeout=120_000)
        assert "Paris" in page.locator(".assistant").first.text_content()
        for index in range(2):
            page.locator(".assistant button:text('Tokens')").nth(index).click()
        origins = page.eval_on_selector_all(".tokens span", "all => all.map(e => e.className)")
        assert origins.count("drafted") > 0.3 * len(origins)
        assert float(page.inner_text("#length")) > 1.5
        page.locator(".assistant button:text('Tokens')").nth(1).click()
        page.mouse.move(0, 0)
        _picture(page, "serve.png")
        page.set_viewport_size({"width": 375, "height": 740})
        page.emulate_media(color_scheme="dark")
        _picture(page, "serve-phone.png")
