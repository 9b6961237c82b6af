"""The chat page of a server in a browser: open it, ask, answer in the server's place."""

from __future__ import annotations

import json

ANSWERED = "() => document.getElementById('send').disabled === false"


def open_page(page, server):
    page.goto(server.url)
    page.wait_for_function("() => document.getElementById('model').textContent !== ''")


def wait_answered(page, count=1):
    page.wait_for_function(f"() => document.querySelectorAll('.assistant').length >= {count}")
    page.wait_for_function(ANSWERED)


def ask(page, text, count=1):
    page.fill("#text", text)
    page.keyboard.press("Enter")
    wait_answered(page, count)


def events_of(text, tokens=(), usage=None, tree=None, **choice):
    """A stream of the server: one event with a text and its tokens, then the usage."""
    origins = {"tokens": list(tokens), "drafted": 3 if len(tokens) > 1 else 0, "accepted": 1}
    origins |= {"tree": tree} if tree else {}
    delta = {"index": 0, "delta": {"content": text}, **choice}
    counts = usage or {"prompt_tokens": 7, "completion_tokens": 3}
    events = [{"choices": [delta], "edgellm": origins}, {"choices": [], "usage": counts}]
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def replies(page, *streams):
    """Answer requests with given streams, the last one again and again; the list of bodies."""
    bodies = []

    def answer(route):
        bodies.append(route.request.post_data_json)
        stream = streams[min(len(bodies), len(streams)) - 1]
        route.fulfill(body=stream, content_type="text/event-stream")

    page.route("**/v1/chat/completions", answer)
    return bodies
